# SPDX-License-Identifier: Apache-2.0
"""Saves and loads that failed."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

from bytecheckpoint.errors import texts_of_ranks

__all__ = ["CallFailure"]


@dataclass(frozen=True, kw_only=True)
class CallFailure:
    """A save or a load that failed, as its coordinator saw it.

    Attributes:
        kind: ``save`` or ``load``.
        path: Path of the checkpoint.
        rank: Number of the coordinator.
        began_at: Unix time at which the call began.
        total_s: Seconds until it failed.
        error_type: Name of the class of the error. If all ranks failed with one class, it is that of the ranks.
        message: Text of the error.
        save_id: Id of the save, 32 hex digits; "" if it had none yet, and of a load.
    """

    kind: str
    path: str
    rank: int
    began_at: float
    total_s: float
    error_type: str
    message: str
    save_id: str = ""

    @classmethod
    def by(
        cls,
        error: BaseException,
        *,
        kind: str,
        path: str | os.PathLike[str],
        rank: int,
        began_at: float,
        save_id: str = "",
    ) -> CallFailure:
        """Returns the failure of a call that ``error`` ends now. It does not keep the error alive."""
        return cls(
            kind=kind,
            path=os.fspath(path),
            rank=rank,
            began_at=began_at,
            total_s=max(time.time() - began_at, 0.0),
            error_type=_type_of(error),
            message=_text_of(error),
            save_id=save_id,
        )


def _type_of(error: BaseException) -> str:
    """Returns the name of the class of ``error``; where it stands for errors of ranks of one class, of that class."""
    names = {_type_of(each) for each in _of_ranks(error).values()}
    return names.pop() if len(names) == 1 else type(error).__name__


def _text_of(error: BaseException) -> str:
    """Returns the text of ``error``. That of DCP's own exception has the numbers of the ranks alone."""
    failures = {} if hasattr(error, "reasons") else _of_ranks(error)
    undone = [each for each in failures.values() if hasattr(each, "reasons")]  # of the coordinator, with those of all
    text = str(undone[0]) if undone else texts_of_ranks(failures) if failures else str(error)
    return text or type(error).__name__


def _of_ranks(error: Any) -> dict[int, BaseException]:
    """Returns the errors of ranks for which ``error`` stands. DCP keeps each of them with its traceback."""
    of_ranks = getattr(error, "reasons", None) or getattr(error, "failures", None)
    if not isinstance(of_ranks, dict):
        return {}
    errors = {rank: each[0] if isinstance(each, tuple) else each for rank, each in of_ranks.items()}
    return {rank: each for rank, each in errors.items() if isinstance(each, BaseException)}
