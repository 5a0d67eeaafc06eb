# SPDX-License-Identifier: Apache-2.0
"""How an exception travels to other ranks."""

from __future__ import annotations

import pickle
from typing import Any

from bytecheckpoint.errors import RankError, name_and_text, note_host, sendable
from bytecheckpoint.runtime.place import Place, own_place

__all__ = ["Parcel"]


class Parcel:
    """Stands for an exception in a message to other ranks. Unpickled, it is that exception again.

    It is a ``RankError`` instead if the sender cannot pickle the exception, or the receiver cannot unpickle it, such as
    one of a class that only the sender can import. On another machine it has a note that names the sender's host.
    """

    def __init__(self, error: BaseException) -> None:
        self._error = sendable(error)

    def __reduce__(self) -> tuple[Any, ...]:
        instead = RankError(name_and_text(self._error))
        return _unpacked, (pickle.dumps(self._error), instead, own_place())


def _unpacked(pickled: bytes, instead: RankError, place: Place) -> BaseException:
    try:
        error = pickle.loads(pickled)
    except BaseException:  # whatever was raised, other ranks wait for this one
        error = instead
    error = error if isinstance(error, BaseException) else instead
    if not place.is_with(own_place()):
        note_host(error, str(place))
    return error
