# SPDX-License-Identifier: Apache-2.0
"""Looks at a place that may hang, by somebody who need not wait for it. Needs no torch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from errno import ETIMEDOUT
from typing import TypeVar

from bytecheckpoint.errors import StorageError
from bytecheckpoint.storage.paths import Place

__all__ = ["look_far"]

T = TypeVar("T")

_MOST_LOOK_S = 20.0


def look_far(look: Callable[[Place], T], place: Place, asked: str) -> T:
    """Returns what ``look`` finds in a place, where a nearer one has something: a restart is not to wait for it.

    Args:
        look: Looks at the place. Its thread ends when the place answers.
        place: The place.
        asked: Name of the function that the user called, for messages.

    Raises:
        StorageError: It has not answered within 20 s.
        Exception: What ``look`` raised.
    """
    looking: Future[T] = Future()

    def work() -> None:
        try:
            looking.set_result(look(place))
        except BaseException as error:
            looking.set_exception(error)

    threading.Thread(target=work, name="bytecheckpoint-look", daemon=True).start()
    if wait([looking], _MOST_LOOK_S).not_done:
        raise StorageError(f"{asked}({place}): no answer within {_MOST_LOOK_S:g} s", str(place), ETIMEDOUT)
    return looking.result()
