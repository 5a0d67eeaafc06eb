# SPDX-License-Identifier: Apache-2.0
"""Steps that each rank takes by itself, and that all of them get through or none."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from bytecheckpoint.dcp._collectives import all_gather, all_reduce_max
from bytecheckpoint.dcp._groups import between_ranks, calling
from bytecheckpoint.dcp._turns import Turn, check_in_step, in_turn
from bytecheckpoint.errors import CheckpointError, ConfigError, sendable

__all__ = ["agree", "all_together", "gathered", "held_by_none", "held_first"]

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

_DIGEST_BYTES = 7  # of an int64 that can be negated


def all_together(group: dist.ProcessGroup | None, what: str, path: str, step: Callable[[], T]) -> T:
    """What ``step`` gives on this rank, once it has succeeded on all.

    Collective over ``group``, a gloo group of our own; None if there is but this rank. A rank whose step fails is heard
    by the others, which else would wait for it in what follows. Where none fails, three numbers of each rank travel.

    Raises:
        Exception: What was raised first by number of the rank, on all of them.
    """
    failure: Exception | None = None
    value: Any = None
    try:
        value = step()
    except Exception as error:
        failure = error
    agree(group, what, path, {}, failure)
    return value  # type: ignore[no-any-return]


def agree(
    group: dist.ProcessGroup | None,
    what: str,
    path: str,
    arguments: Mapping[str, object],
    failure: Exception | None = None,
    error: Callable[[str, str], CheckpointError] = ConfigError,
    turn: Turn | None = None,
) -> None:
    """Begins something together: no rank has failed, and all mean the same. Collective, as ``all_together``.

    Args:
        arguments: What must be the same on all ranks, by name; compared by their texts.
        failure: Why this rank cannot take part.
        error: Makes what is raised of a message and a path if ranks mean different things.
        turn: Which call this is, on this rank.

    Raises:
        OutOfStepError: Ranks have come with different calls.
        Exception: ``failure`` of the lowest rank that has one, on all ranks; else ``error`` if arguments differ.
    """
    if group is None or group.size() == 1:
        if failure is not None:
            raise failure
        return
    texts = {name: repr(value) for name, value in arguments.items()}
    call = 0 if turn is None else turn.number
    with in_turn(turn, what, path):
        if _is_same(group, what, path, repr((texts, call)), failure is not None):
            return
        heard = gathered(group, what, path, (None if failure is None else sendable(failure), texts, call))
        check_in_step(what, path, {rank: of_rank for rank, (_, _, of_rank) in enumerate(heard)})
    for rank, (of_rank, _, _) in enumerate(heard):
        if of_rank is None:
            continue
        if failure is not None and rank == group.rank():
            raise failure
        of_rank.add_note(f"raised on rank {rank}")
        raise of_rank from failure
    first = heard[0][1]
    for rank, (_, others, _) in enumerate(heard):
        for name in first:
            if others[name] != first[name]:
                raise error(
                    f"{what}({path}): {name} is {first[name]} on rank 0, and {others[name]} on rank {rank}: it must be "
                    "the same on all ranks",
                    path,
                )


def held_by_none(group: dist.ProcessGroup | None, what: str, path: str, is_held: list[bool]) -> list[int]:
    """Positions at which no rank of ``group`` says True. Collective, as ``all_together``."""
    held = torch.tensor(is_held, dtype=torch.uint8)
    if group is not None and group.size() > 1 and held.numel() > 0:
        with calling(group, what, path):
            between_ranks(lambda: all_reduce_max(group, held))
    positions: list[int] = (held == 0).nonzero().flatten().tolist()
    return positions


def held_first(group: dist.ProcessGroup | None, what: str, path: str, keys: Sequence[K]) -> set[K]:
    """Those of ``keys`` that no rank before this one has. Collective, as ``all_together``."""
    if group is None or group.size() == 1:
        return {*keys}
    rank = group.rank()
    if _is_same(group, what, path, repr([*keys])):  # as it is unless ranks have other modules: no names are sent
        return {*keys} if rank == 0 else set()
    return {*keys}.difference(*gathered(group, what, path, [*keys])[:rank])


def _is_same(group: dist.ProcessGroup, what: str, path: str, text: str, is_odd: bool = False) -> bool:
    """Do all ranks say the same, and none that it is odd? Three numbers of each rank travel."""
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:_DIGEST_BYTES], "big")
    largest = torch.tensor([is_odd, digest, -digest], dtype=torch.int64)
    with calling(group, what, path):
        between_ranks(lambda: all_reduce_max(group, largest))
    is_any_odd, greatest, least = largest.tolist()
    return not is_any_odd and bool(greatest == -least)


def gathered(group: dist.ProcessGroup, what: str, path: str, value: object) -> list[Any]:
    """``value`` of each rank, which must be little and can be pickled. Collective over ``group``."""
    with calling(group, what, path):
        return between_ranks(lambda: all_gather(group, value))
