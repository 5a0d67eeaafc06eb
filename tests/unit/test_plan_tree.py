# SPDX-License-Identifier: Apache-2.0
"""The tree of an exchange of plans, between threads that stand for ranks."""

from __future__ import annotations

import itertools
import pickle
import queue
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from bytecheckpoint import _testing
from bytecheckpoint.distributed.channel import Peers
from bytecheckpoint.planning.plan_cache import EncodedAssignment
from bytecheckpoint.planning.plan_tree import PlanTree

Messages = dict[tuple[int, int], list[Any]]


class Channels:
    """Messages between the threads of one exchange."""

    def __init__(self, size: int) -> None:
        self._queues: dict[tuple[int, int], queue.Queue[bytes]] = {
            pair: queue.Queue() for pair in itertools.permutations(range(size), 2)
        }
        self.sent: Messages = defaultdict(list)

    def of(self, rank: int) -> Any:
        return _Channel(self, rank)

    def send(self, data: bytes, sender: int, to: int) -> None:
        self.sent[sender, to].append(pickle.loads(data)[0])
        self._queues[sender, to].put(data)

    def receive(self, sender: int, to: int) -> bytes:
        return self._queues[sender, to].get(timeout=30)


class _Channel:
    def __init__(self, channels: Channels, rank: int) -> None:
        self._channels = channels
        self._rank = rank

    def send(self, data: bytes, to: int) -> None:
        self._channels.send(data, self._rank, to)

    def receive(self, sender: int) -> bytes:
        return self._channels.receive(sender, self._rank)


def inventory_of(rank: int) -> bytes:
    entry: Any = (f"of {rank}", "tensor", b"", True, "float32", [4], [([0], [4])], False, False, 0)
    return _testing.Inventory.of_rank(rank, [entry]).encode()


def exchange(size: int, fan_out: int, coordinator: int) -> Messages:
    """Runs an exchange, and returns what each rank sent to each other one."""
    wanted = [EncodedAssignment(b"for %d" % rank, rank) for rank in range(size)]
    channels = Channels(size)

    def plan(below: list[bytes]) -> list[EncodedAssignment]:
        merged = _testing.Inventory.merge([inventory_of(coordinator), *below])
        assert (merged.num_ranks, merged.num_entries) == (size, size)
        return wanted

    def run(rank: int) -> EncodedAssignment:
        tree = PlanTree(channels.of(rank), Peers(None, rank, size, coordinator), fan_out)
        return tree.exchange(inventory_of(rank), plan if rank == coordinator else None)

    with ThreadPoolExecutor(size) as pool:
        got = list(pool.map(run, range(size)))
    assert got == wanted
    return channels.sent


def children_of(sent: Messages, rank: int) -> dict[int, int]:
    """Returns the number of ranks below each child of ``rank``, the child included."""
    handed = {to: of_pair[-1] for (sender, to), of_pair in sent.items() if sender == rank}
    return {to: len(assignments) for to, assignments in handed.items() if isinstance(assignments, dict)}


def depth_below(sent: Messages, rank: int) -> int:
    return max((1 + depth_below(sent, child) for child in children_of(sent, rank)), default=0)


@pytest.mark.parametrize(
    ("size", "fan_out", "depth"), [(1, 2, 0), (2, 2, 1), (7, 2, 2), (8, 2, 3), (20, 3, 3), (40, 3, 3)]
)
@pytest.mark.parametrize("coordinator", [0, 1])
def test_siblings_have_equally_many_ranks_below_them(size: int, fan_out: int, depth: int, coordinator: int) -> None:
    """Else all would wait for the sibling that has more to merge."""
    coordinator %= size
    sent = exchange(size, fan_out, coordinator)
    assert len(sent) == 2 * (size - 1), "each rank sends up once, and is sent to once"
    assert depth_below(sent, coordinator) == depth, "as few levels as the fan-out allows"
    for rank in range(size):
        below = children_of(sent, rank).values()
        assert len(below) <= fan_out
        assert max(below, default=0) - min(below, default=0) <= 1
