# SPDX-License-Identifier: Apache-2.0
"""Saves and loads that failed."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

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
    """

    kind: str
    path: str
    rank: int
    began_at: float
    total_s: float
    error_type: str
    message: str

    @classmethod
    def by(
        cls, error: BaseException, *, kind: str, path: str | os.PathLike[str], rank: int, began_at: float
    ) -> CallFailure:
        """Returns the failure of a call that ``error`` ends now. It does not keep the error alive."""
        return cls(
            kind=kind,
            path=os.fspath(path),
            rank=rank,
            began_at=began_at,
            total_s=max(time.time() - began_at, 0.0),
            error_type=_type_of(error),
            message=str(error) or type(error).__name__,
        )


def _type_of(error: Any) -> str:
    """Returns the name of the class of ``error``; where it stands for errors of ranks of one class, of that class."""
    of_ranks = getattr(error, "reasons", None) or getattr(error, "failures", None)
    if isinstance(of_ranks, dict) and of_ranks:
        # DCP keeps each error with its traceback.
        errors = [each[0] if isinstance(each, tuple) else each for each in of_ranks.values()]
        names = {_type_of(each) for each in errors if isinstance(each, BaseException)}
        if len(names) == 1:
            return names.pop()
    return type(error).__name__
