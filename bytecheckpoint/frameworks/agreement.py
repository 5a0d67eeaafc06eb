# SPDX-License-Identifier: Apache-2.0
"""Steps that each rank takes by itself, and that all of them get through or none."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from bytecheckpoint.dcp._groups import calling
from bytecheckpoint.errors import sendable

__all__ = ["all_together", "held_by_none", "held_first"]

T = TypeVar("T")


def all_together(group: dist.ProcessGroup | None, what: str, path: str, step: Callable[[], T]) -> T:
    """What ``step`` gives on this rank, once it has succeeded on all.

    Collective over ``group``, a gloo group of our own; None if there is but this rank. A rank whose step fails is heard
    by the others, which else would wait for it in what follows.

    Raises:
        Exception: What was raised first by number of the rank, on all of them.
    """
    failure: BaseException | None = None
    value: Any = None
    try:
        value = step()
    except Exception as error:
        failure = error
    if group is None or group.size() == 1:
        if failure is not None:
            raise failure
        return value  # type: ignore[no-any-return]
    failures: list[Any] = [None] * group.size()
    with calling(group, what, path):
        dist.all_gather_object(failures, None if failure is None else sendable(failure), group=group)
    for rank, of_rank in enumerate(failures):
        if of_rank is None:
            continue
        if failure is not None and rank == group.rank():
            raise failure
        of_rank.add_note(f"raised on rank {rank}")
        raise of_rank from failure
    return value  # type: ignore[no-any-return]


def held_by_none(group: dist.ProcessGroup | None, what: str, path: str, is_held: list[bool]) -> list[int]:
    """Positions at which no rank of ``group`` says True. Collective, as ``all_together``."""
    held = torch.tensor(is_held, dtype=torch.uint8)
    if group is not None and group.size() > 1 and held.numel() > 0:
        with calling(group, what, path):
            dist.all_reduce(held, op=dist.ReduceOp.MAX, group=group)
    positions: list[int] = (held == 0).nonzero().flatten().tolist()
    return positions


def held_first(group: dist.ProcessGroup | None, what: str, path: str, keys: Sequence[str]) -> set[str]:
    """Those of ``keys`` that no rank before this one has. Collective, as ``all_together``."""
    if group is None or group.size() == 1:
        return {*keys}
    rank, size = group.rank(), group.size()
    digests: list[Any] = [None] * size
    with calling(group, what, path):
        digest = hashlib.sha256("\0".join(keys).encode()).digest()
        dist.all_gather_object(digests, digest, group=group)
        if len({*digests}) == 1:  # as it is unless ranks have other modules: no names are sent
            return {*keys} if rank == 0 else set()
        of_ranks: list[Any] = [None] * size
        dist.all_gather_object(of_ranks, [*keys], group=group)
    return {*keys}.difference(*of_ranks[:rank])
