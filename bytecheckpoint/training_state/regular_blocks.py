# SPDX-License-Identifier: Apache-2.0
"""Asynchronous tensor merging: ranks exchange pieces of flat shards, so that each rank writes blocks of whole rows.

FSDP1 cuts a flat parameter over ranks without regard to the dims of the parameters in it. Here each cut moves to the
nearest row. The elements between the old and the new place of the cut go point to point from the rank that has them to
the rank that will write them: for each cut less than a row, or a group of rows. In a background save this runs on
staged memory, beside training.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from bytecheckpoint.distributed.agreement import all_together, gathered
from bytecheckpoint.distributed.groups import between_ranks, calling, ranks_of
from bytecheckpoint.distributed.waits import Message
from bytecheckpoint.errors import InvalidPlanError
from bytecheckpoint.native import _core
from bytecheckpoint.staging.merging import merge
from bytecheckpoint.tensors.chunks import LocalChunks, Spread

__all__ = ["with_regular_blocks"]

# Shorter rows are grouped to at least this size. A checksum covers this much, so a reader of one block reads no others.
_MIN_BLOCK_BYTES = 256 << 10
_TAG = 0xB10C

Values = dict[str, dict[str, Any]]  # by part and key
Cuts = dict[tuple[str, str], list[int]]  # by part and key
Received = dict[tuple[str, str], list[tuple[int, torch.Tensor]]]  # by part and key
Messages = dict[int, torch.Tensor]  # by rank at the other end


@dataclass(frozen=True)
class _Move:
    """Flat elements [begin, end) of a tensor that go from one rank to another."""

    part: str
    key: str
    begin: int
    end: int
    source: int
    target: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return (self.end - self.begin) * self.dtype.itemsize


def with_regular_blocks(values: Values, group: dist.ProcessGroup | None, path: str) -> Values:
    """Returns ``values`` with blocks of whole rows instead of irregular pieces.

    Collective over ``group``. It takes additional memory for what ranks exchange, and for the blocks that this becomes
    part of. Tensors that are not cut stay where they are.

    Args:
        values: Values of this rank, by part and key. Pieces on devices are copied to the host.
        group: A gloo group of our own; None, or a group of one rank, returns ``values`` as they are.
        path: Path of the checkpoint, for messages.

    Raises:
        InvalidPlanError: Two ranks disagree about what they exchange. All ranks raise it.
        Exception: One rank raised it, for example because it lacks memory. All ranks raise it.
    """
    if group is None or group.size() == 1:
        return values

    ranks = ranks_of(group)
    own = ranks[group.rank()]

    def plan() -> tuple[Cuts, list[_Move]]:
        cut = {
            (part, key): _cuts(value)
            for part, of_part in values.items()
            for key, value in sorted(of_part.items())
            if isinstance(value, LocalChunks) and value.spread is not None
        }
        return cut, [
            move for (part, key), cuts in cut.items() for move in _moves(part, key, values[part][key], cuts, own)
        ]

    # If a rank fails, for example because it lacks memory, the others must know before they wait for its pieces, or
    # save without it.
    cut, moves = all_together(group, "save", path, plan)
    _agree(moves, group, path)
    outgoing, incoming = all_together(group, "save", path, lambda: _messages(values, moves, own))
    with calling(group, "save", path):
        between_ranks(lambda: _send_and_receive(outgoing, incoming, group))
    return all_together(group, "save", path, lambda: _with_blocks(values, cut, _taken_apart(moves, incoming), own))


def _with_blocks(values: Values, cut: Cuts, received: Received, own: int) -> Values:
    result = {part: dict(of_part) for part, of_part in values.items()}
    for (part, key), cuts in cut.items():
        result[part][key] = _block_of(values[part][key], cuts, received.get((part, key), []), own)
    return result


def _cuts(chunks: LocalChunks) -> list[int]:
    """Returns where the tensor will be cut. All its ranks compute the same cuts, without communication."""
    assert chunks.spread is not None
    return _core.block_cuts(chunks.shape, chunks.spread.cuts, max(1, _MIN_BLOCK_BYTES // chunks.dtype.itemsize))


def _moves(part: str, key: str, chunks: LocalChunks, cuts: list[int], own: int) -> Iterator[_Move]:
    """Returns what this rank sends and what it receives, in the order of the elements. ``own`` is its global rank."""
    spread = _spread(chunks)
    number = spread.ranks.index(own) if own in spread.ranks else None
    if number is None:
        return
    for other, begin, end in _overlaps(cuts, spread.cuts[number], spread.cuts[number + 1]):
        if other != number:
            yield _Move(part, key, begin, end, own, spread.ranks[other], chunks.dtype)
    for other, begin, end in _overlaps(spread.cuts, cuts[number], cuts[number + 1]):
        if other != number:
            yield _Move(part, key, begin, end, spread.ranks[other], own, chunks.dtype)


def _overlaps(cuts: Sequence[int], begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Returns the parts between ``cuts`` that have elements of [begin, end): number of the part, and its elements."""
    number = max(0, bisect_right(cuts, begin) - 1)
    while number + 1 < len(cuts) and cuts[number] < end:
        first, last = max(begin, cuts[number]), min(end, cuts[number + 1])
        if first < last:
            yield number, first, last
        number += 1


def _spread(chunks: LocalChunks) -> Spread:
    assert chunks.spread is not None
    return chunks.spread


def _agree(moves: list[_Move], group: dist.ProcessGroup, path: str) -> None:
    """Checks that sender and receiver agree about every move. Otherwise a rank would wait for what nobody sends."""
    ranks = ranks_of(group)
    own = ranks[group.rank()]
    digests: dict[tuple[int, int], Any] = {}
    for move in moves:
        of_pair = digests.setdefault((move.source, move.target), hashlib.sha256())
        of_pair.update(repr((move.part, move.key, move.begin, move.end, str(move.dtype))).encode())
    of_ranks = gathered(group, "save", path, {pair: of_pair.digest() for pair, of_pair in digests.items()})
    by_rank = dict(zip(ranks, of_ranks, strict=True))
    for rank, of_rank in by_rank.items():
        for (source, target), digest in of_rank.items():
            other = by_rank.get(target if rank == source else source, {})
            if other.get((source, target)) != digest:
                raise InvalidPlanError(
                    f"save({path}): ranks {source} and {target} disagree about the pieces of flat parameters between "
                    f"them (seen on rank {own}): their optimizers do not have the same states; use "
                    "irregular='decompose'"
                )


def _messages(values: Values, moves: list[_Move], own: int) -> tuple[Messages, Messages]:
    """Returns what this rank sends, and memory for what it receives: one message for each pair of ranks."""
    outgoing: dict[int, list[torch.Tensor]] = {}
    incoming: dict[int, int] = {}
    for move in moves:
        if move.source == own:
            outgoing.setdefault(move.target, []).extend(_run(values[move.part][move.key], move.begin, move.end, own))
        else:
            incoming[move.source] = incoming.get(move.source, 0) + move.num_bytes
    return (
        {target: merge(pieces) for target, pieces in outgoing.items()},
        {source: torch.empty(size, dtype=torch.uint8, device="cpu") for source, size in incoming.items()},
    )


def _taken_apart(moves: list[_Move], incoming: Messages) -> Received:
    """Splits the received messages by tensor. Each piece has the index of its first element."""
    received: Received = {}
    ends = dict.fromkeys(incoming, 0)
    for move in moves:
        if move.source in incoming:
            begin = ends[move.source]
            ends[move.source] = begin + move.num_bytes
            elements = incoming[move.source][begin : ends[move.source]]
            received.setdefault((move.part, move.key), []).append((move.begin, elements))
    return received


def _send_and_receive(outgoing: Messages, incoming: Messages, group: dist.ProcessGroup) -> None:
    ranks = ranks_of(group)
    works = [group.recv([message], ranks.index(source), _TAG) for source, message in incoming.items()]
    works += [group.send([message], ranks.index(target), _TAG) for target, message in outgoing.items()]
    for work in works:
        Message(work, group).wait()


def _run(chunks: LocalChunks, begin: int, end: int, own: int) -> list[torch.Tensor]:
    """Returns elements [begin, end) of a tensor, all of which this rank holds, as the pieces in which they lie."""
    spread = _spread(chunks)
    at = spread.cuts[spread.ranks.index(own)]
    pieces = []
    for tensor in chunks.tensors:
        first, last = max(begin, at), min(end, at + tensor.numel())
        if first < last:
            pieces.append(tensor.detach().reshape(-1)[first - at : last - at].cpu())
        at += tensor.numel()
    return pieces


def _block_of(chunks: LocalChunks, cuts: list[int], received: list[tuple[int, torch.Tensor]], own: int) -> LocalChunks:
    """Returns what this rank writes of a tensor: one block, or nothing."""
    spread = _spread(chunks)
    number = spread.ranks.index(own) if own in spread.ranks else None
    if number is None or cuts[number] == cuts[number + 1]:
        return LocalChunks(chunks.shape, [], [], chunks.dtype, ranks=spread.ranks)
    begin, end = cuts[number], cuts[number + 1]
    held = max(begin, spread.cuts[number]), min(end, spread.cuts[number + 1])
    kept = _run(chunks, *held, own) if held[0] < held[1] else []
    if len(kept) == 1 and not received:
        block = kept[0]
    else:
        before = [elements for at, elements in received if at < held[0]]
        behind = [elements for at, elements in received if at >= held[0]]
        block = merge([*before, *kept, *behind]).view(chunks.dtype)
    row = chunks.shape[1:].numel()
    offsets = (begin // row, *[0] * (len(chunks.shape) - 1))
    own_rows = block.view((end - begin) // row, *chunks.shape[1:])
    return LocalChunks(chunks.shape, [offsets], [own_rows], chunks.dtype, ranks=spread.ranks)
