# SPDX-License-Identifier: Apache-2.0
"""Steps that each rank takes by itself, and that succeed on all ranks or on none."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from bytecheckpoint.distributed.call_order import CallOrder, check_in_step, check_same_kind, in_turn
from bytecheckpoint.distributed.collectives import all_gather, all_reduce_max, broadcast
from bytecheckpoint.distributed.groups import between_ranks, calling
from bytecheckpoint.distributed.parcel import Parcel
from bytecheckpoint.errors import CheckpointError, ConfigError

__all__ = ["agree", "all_together", "gathered", "held_by_none", "held_first", "joined", "of_each", "of_first"]

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

_DIGEST_BYTES = 7  # so that the digest fits an int64, and its negative, too


def all_together(group: dist.ProcessGroup | None, what: str, path: str, step: Callable[[], T]) -> T:
    """Runs ``step``, and returns its value once it has succeeded on all ranks. Collective over ``group``.

    If it fails on a rank, the others hear of that; otherwise they would wait for that rank later. If no rank fails,
    each rank sends only three numbers.

    Args:
        group: A gloo group of our own; None if there is only this rank.
        what: What is being done, for errors.
        path: Path of it, for errors.
        step: What this rank does.

    Raises:
        Exception: The failure of the lowest rank that has one, on all ranks.
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
    turn: CallOrder | None = None,
) -> None:
    """Checks that no rank has failed, and that all ranks have the same arguments. Collective over ``group``.

    Args:
        group: See ``all_together``.
        what: See ``all_together``.
        path: See ``all_together``.
        arguments: What must be the same on all ranks, by name; compared by ``repr``.
        failure: Why this rank cannot take part; None if it can.
        error: Makes the error for arguments that differ, from a message and a path.
        turn: Which call this is on this rank; None if calls are not counted.

    Raises:
        OutOfStepError: Ranks have come with different calls.
        Exception: ``failure`` of the lowest rank that has one, on all ranks; otherwise ``error`` if arguments differ.
    """
    if group is None or group.size() == 1:
        if failure is not None:
            raise failure
        return
    texts = {name: repr(value) for name, value in arguments.items()}
    call = 0 if turn is None else turn.number
    with in_turn(turn, what, path):
        if _is_same(group, what, path, repr((what, texts, call)), failure is not None):
            return
        answers = gathered(group, what, path, (None if failure is None else Parcel(failure), texts, call, what))
        check_same_kind(what, path, {rank: other for rank, (_, _, _, other) in enumerate(answers) if other != what})
        check_in_step(what, path, {rank: of_rank for rank, (_, _, of_rank, _) in enumerate(answers)})
    for rank, (of_rank, _, _, _) in enumerate(answers):
        if of_rank is None:
            continue
        if failure is not None and rank == group.rank():
            raise failure
        of_rank.add_note(f"raised on rank {rank}")
        raise of_rank from failure
    odd = [rank for rank, (_, others, _, _) in enumerate(answers) if others.keys() != texts.keys()]
    check_same_kind(what, path, dict.fromkeys(odd, f"another {what}"))
    first = answers[0][1]
    for rank, (_, others, _, _) in enumerate(answers):
        for name in first:
            if others[name] != first[name]:
                raise error(
                    f"{what}({path}): {name} is {first[name]} on rank 0, and {others[name]} on rank {rank}: it must be "
                    "the same on all ranks",
                    path,
                )


def held_by_none(group: dist.ProcessGroup | None, what: str, path: str, is_held: list[bool]) -> list[int]:
    """Returns the positions in ``is_held`` at which no rank has True. Collective over ``group``."""
    held = torch.tensor(is_held, dtype=torch.uint8)
    if group is not None and group.size() > 1 and held.numel() > 0:
        with calling(group, what, path):
            between_ranks(lambda: all_reduce_max(group, held))
    positions: list[int] = (held == 0).nonzero().flatten().tolist()
    return positions


def held_first(group: dist.ProcessGroup | None, what: str, path: str, keys: Sequence[K]) -> set[K]:
    """Returns those of ``keys`` that no lower rank has. Collective over ``group``."""
    if group is None or group.size() == 1:
        return {*keys}
    rank = group.rank()
    if _is_same(group, what, path, repr([*keys])):  # true unless ranks have different modules; then no names are sent
        return {*keys} if rank == 0 else set()
    return {*keys}.difference(*gathered(group, what, path, [*keys])[:rank])


def joined(group: dist.ProcessGroup | None, what: str, path: str, values: Mapping[K, T]) -> dict[K, T]:
    """Returns the values of all ranks by key, of a key of several ranks the lowest one's. Collective over ``group``.

    If all ranks have the same, only three numbers are sent.
    """
    own = {**values}
    if group is None or group.size() == 1 or _is_same(group, what, path, repr(own)):
        return own
    return {key: value for of_rank in reversed(gathered(group, what, path, own)) for key, value in of_rank.items()}


def of_each(group: dist.ProcessGroup, what: str, path: str, value: object) -> list[Any]:
    """Returns ``value`` of each rank, by rank. If all have the same, only three numbers are sent. Collective."""
    if _is_same(group, what, path, repr(value)):
        return [value] * group.size()
    return gathered(group, what, path, value)


def of_first(group: dist.ProcessGroup, what: str, path: str, value: T) -> T:
    """Returns ``value`` of the lowest rank. Collective."""
    with calling(group, what, path):
        said: T = between_ranks(lambda: broadcast(group, value, 0))
    return said


def _is_same(group: dist.ProcessGroup, what: str, path: str, text: str, is_odd: bool = False) -> bool:
    """Whether ``text`` is the same on all ranks, and ``is_odd`` on none. Each rank sends three numbers."""
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:_DIGEST_BYTES], "big")
    largest = torch.tensor([is_odd, digest, -digest], dtype=torch.int64)
    with calling(group, what, path):
        between_ranks(lambda: all_reduce_max(group, largest))
    is_any_odd, greatest, least = largest.tolist()
    return not is_any_odd and bool(greatest == -least)


def gathered(group: dist.ProcessGroup, what: str, path: str, value: object) -> list[Any]:
    """Returns ``value`` of each rank, by rank; it should be small, and is pickled. Collective over ``group``."""
    with calling(group, what, path):
        return between_ranks(lambda: all_gather(group, value))
