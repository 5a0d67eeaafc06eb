# SPDX-License-Identifier: Apache-2.0
"""Steps that each rank takes by itself, and that all of them get through or none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from bytecheckpoint.dcp._groups import calling
from bytecheckpoint.errors import sendable

__all__ = ["all_together", "gathered", "held_by_none", "raise_on_all"]

T = TypeVar("T")


def all_together(group: dist.ProcessGroup | None, what: str, path: str, step: Callable[[], T]) -> T:
    """What ``step`` gives on this rank, once it has succeeded on all.

    Collective over ``group``, a gloo group of our own; None if there is but this rank. A rank whose step fails is heard
    by the others, which else would wait for it in what follows.

    Raises:
        Exception: What was raised first by number of the rank, on all of them.
    """
    values: list[T] = []

    def keep() -> None:
        values.append(step())

    gathered(group, what, path, keep)
    return values[0]


def gathered(group: dist.ProcessGroup | None, what: str, path: str, step: Callable[[], T]) -> list[T]:
    """What ``step`` gives on each rank, which must be little and can be pickled. Else as ``all_together``."""
    failure: BaseException | None = None
    value: Any = None
    try:
        value = step()
    except Exception as error:
        failure = error
    if group is None or group.size() == 1:
        if failure is not None:
            raise failure
        return [value]
    outcomes: list[Any] = [None] * group.size()
    with calling(group, what, path):
        own = (value, None) if failure is None else (None, sendable(failure))
        dist.all_gather_object(outcomes, own, group=group)
    for rank, (_, of_rank) in enumerate(outcomes):
        if of_rank is None:
            continue
        if failure is not None and rank == group.rank():
            raise failure
        of_rank.add_note(f"raised on rank {rank}")
        raise of_rank from failure
    return [of_rank for of_rank, _ in outcomes]


def raise_on_all(group: dist.ProcessGroup | None, what: str, path: str, error: BaseException) -> NoReturn:
    """Takes part in the step of the others, ``gathered`` or ``all_together``, with a failure."""

    def fail() -> NoReturn:
        raise error

    all_together(group, what, path, fail)
    raise error


def held_by_none(group: dist.ProcessGroup | None, what: str, path: str, is_held: list[bool]) -> list[int]:
    """Positions at which no rank of ``group`` says True. Collective, as ``all_together``."""
    held = torch.tensor(is_held, dtype=torch.uint8)
    if group is not None and group.size() > 1 and held.numel() > 0:
        with calling(group, what, path):
            dist.all_reduce(held, op=dist.ReduceOp.MAX, group=group)
    positions: list[int] = (held == 0).nonzero().flatten().tolist()
    return positions
