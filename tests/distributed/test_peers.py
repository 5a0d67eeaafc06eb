# SPDX-License-Identifier: Apache-2.0
"""Hooks know the other ranks of their DCP call, and messages between these ranks arrive whole."""

from __future__ import annotations

import inspect
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.ranks import run_ranks

from bytecheckpoint import BcpReader, BcpWriter
from bytecheckpoint.dcp.call_context import CallContext
from bytecheckpoint.distributed import channel as _peers
from bytecheckpoint.distributed.channel import Peers

SEEN: list[Peers | None] = []


class LookingWriter(BcpWriter):
    def prepare_local_plan(self, plan: Any) -> Any:
        SEEN.append(self._session.context.peers)
        return super().prepare_local_plan(plan)

    def write_data(self, plan: Any, planner: Any) -> Any:
        SEEN.append(self._session.context.peers)
        return super().write_data(plan, planner)


class LookingReader(BcpReader):
    def prepare_local_plan(self, plan: Any) -> Any:
        SEEN.append(self._call.peers)
        return super().prepare_local_plan(plan)

    def read_data(self, plan: Any, planner: Any) -> Any:
        SEEN.append(self._call.peers)
        return super().read_data(plan, planner)


def save_and_load(path: str, **how: Any) -> list[Peers | None]:
    """Saves and loads, and returns the peers that each of four hooks knows."""
    SEEN.clear()
    state = {"of every rank": torch.ones(3)}
    dcp.save(state, storage_writer=LookingWriter(path), **how)
    dcp.load(state, storage_reader=LookingReader(path), **how)
    return SEEN


def on_the_default_group(path: str) -> None:
    seen = save_and_load(path)
    assert seen == [Peers(None, dist.get_rank(), 3, 0)] * 4


def on_a_group(path: str) -> None:
    group = dist.new_group([0, 2], backend="gloo")
    if dist.get_rank() == 1:
        return
    seen = save_and_load(path, process_group=group)
    assert seen == [Peers(group, dist.get_rank() // 2, 2, 0)] * 4


def alone(path: str) -> None:
    assert save_and_load(f"{path}/{dist.get_rank()}", no_dist=True) == [None] * 4


def by_hand() -> None:
    assert CallContext.of_save(BcpWriter("nowhere")).peers is None


def test_every_hook_knows_whom_the_call_is_with(tmp_path: Path) -> None:
    run_ranks(3, on_the_default_group, str(tmp_path))


def test_a_group_is_known_by_its_own_numbers(tmp_path: Path) -> None:
    run_ranks(3, on_a_group, str(tmp_path))


def test_a_call_of_one_rank_has_no_peers(tmp_path: Path) -> None:
    run_ranks(2, alone, str(tmp_path))
    assert save_and_load(str(tmp_path / "one process")) == [None] * 4


def test_hooks_called_by_hand_are_with_nobody() -> None:
    run_ranks(2, by_hand)


def send_in_a_ring(group: dist.ProcessGroup | None, own_carrier: bool) -> None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if own_carrier:
        _peers._compat.is_gloo_on_host = lambda group: False
    channel = Peers(group, rank, size, 0).connect()
    before, behind = (rank - 1) % size, (rank + 1) % size
    messages = [b"", f"from {rank}".encode(), bytes(range(256)) * 40_000]
    if rank == 0:
        for message in messages:
            channel.send(message, behind)
    got = [channel.receive(before) for _ in messages]
    if rank != 0:
        for message in messages:
            channel.send(message, behind)
    assert got == [b"", f"from {before}".encode(), bytes(range(256)) * 40_000]
    assert channel.bytes_received == sum(map(len, got)) + 8 * len(got)
    assert channel.bytes_sent == sum(map(len, messages)) + 8 * len(messages)


@pytest.mark.parametrize("own_carrier", [False, True])
def test_messages_arrive_whole_and_in_order(own_carrier: bool) -> None:
    run_ranks(3, send_in_a_ring, None, own_carrier)


def send_in_a_ring_of_two() -> None:
    group = dist.new_group([2, 1], backend="gloo", use_local_synchronization=True, sort_ranks=False)
    if dist.get_rank() != 0:
        send_in_a_ring(group, False)


@pytest.mark.skipif(
    "sort_ranks" not in inspect.signature(dist.new_group).parameters, reason="this torch sorts the ranks of a group"
)
def test_ranks_of_a_group_are_numbered_as_in_the_group() -> None:
    run_ranks(3, send_in_a_ring_of_two)


def carry_beside_other_groups() -> None:
    """Connects over two groups of the same ranks, in a different order on each rank.

    Each rank is also in a different number of groups.
    """
    _peers._compat.is_gloo_on_host = lambda group: False
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    for _ in range(2 * rank):
        dist.new_group([rank], backend="gloo", use_local_synchronization=True)
    order = [0, 1] if rank == 0 else [1, 0]
    channels: dict[int, Any] = {}

    def connect(which: int) -> None:
        channels[which] = Peers(groups[which], rank, 2, 0).connect()

    threads = [threading.Thread(target=connect, args=(which,)) for which in order]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for which in range(2):
        if rank == 0:
            channels[which].send(f"of group {which}".encode(), 1)
        else:
            assert channels[which].receive(0) == f"of group {which}".encode()


def test_each_group_has_a_carrier_of_its_own() -> None:
    run_ranks(2, carry_beside_other_groups)


def run_out_of_memory() -> None:
    channel = Peers(None, dist.get_rank(), 2, 0).connect()
    _peers._PIECE_BYTES = 1 << 20
    large, small = bytes(range(256)) * 10_000, b"and after it"
    if dist.get_rank() == 1:
        channel.send(large, 0)
        channel.send(small, 0)
        return

    def scarce(argument: Any = b"") -> bytearray:
        if argument == len(large):
            raise MemoryError("as if")
        return bytearray(argument)

    _peers.bytearray = scarce  # type: ignore[attr-defined]
    with pytest.raises(MemoryError, match="as if"):
        channel.receive(1)
    assert channel.receive(1) == small


def test_a_message_for_which_there_is_no_memory_is_taken_all_the_same() -> None:
    run_ranks(2, run_out_of_memory, limit_s=20)


def lose_a_peer() -> float:
    channel = Peers(None, dist.get_rank(), 2, 0).connect()
    if dist.get_rank() == 1:
        channel.send(b"still here", 0)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    assert channel.receive(1) == b"still here"
    try:
        channel.receive(1)
    except RuntimeError:
        raise ValueError("the peer is gone") from None
    raise AssertionError("received something from a dead rank")


def test_a_dead_peer_is_noticed() -> None:
    with pytest.raises(AssertionError, match="the peer is gone"):
        run_ranks(2, lose_a_peer, limit_s=20)
