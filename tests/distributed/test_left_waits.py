# SPDX-License-Identifier: Apache-2.0
"""A wait for bytes ends when the rank at the other end is lost, even if a part of the bytes has arrived."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable
from typing import TypeAlias

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks

from bytecheckpoint import new_group
from bytecheckpoint.distributed.channel import Channel
from bytecheckpoint.distributed.groups import between_ranks, calling
from bytecheckpoint.distributed.waits import Collective
from bytecheckpoint.errors import RankLostError

STALL_S = 2.0
# More than sockets buffer.
NUM_BYTES = 1 << 28

# Rank 1 begins a transfer. Then rank 0 takes part, stops rank 1 with the function that it gets, and waits.
Begin: TypeAlias = Callable[[dist.ProcessGroup, torch.Tensor], object]
Wait: TypeAlias = Callable[[dist.ProcessGroup, torch.Tensor, Callable[[], None]], None]


def send(group: dist.ProcessGroup, message: torch.Tensor, stop: Callable[[], None]) -> None:
    stop()
    Channel(group).begin_send(message, 1).wait()


def receive(group: dist.ProcessGroup, message: torch.Tensor, stop: Callable[[], None]) -> None:
    arriving = Channel(group).begin_receive(message, 1)
    while not message[0]:
        os.sched_yield()
    stop()
    arriving.wait()


def collective(group: dist.ProcessGroup, message: torch.Tensor, stop: Callable[[], None]) -> None:
    stop()
    Collective(broadcast(group, message), group).wait()


def begin_to_send(group: dist.ProcessGroup, message: torch.Tensor) -> object:
    return Channel(group).begin_send(message, 0)


def begin_to_receive(group: dist.ProcessGroup, message: torch.Tensor) -> object:
    return Channel(group).begin_receive(message, 0)


def broadcast(group: dist.ProcessGroup, message: torch.Tensor) -> dist.Work:
    work = dist.broadcast(message, 0, group, async_op=True)
    assert work is not None
    return work


def lose_one(begin: Begin, wait: Wait) -> None:
    pids = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    lose_within_a_group(begin, wait, pids[1])
    gc.collect()  # frees the group itself; its own timeout is half an hour
    os.kill(pids[1], signal.SIGKILL)


def lose_within_a_group(begin: Begin, wait: Wait, victim: int) -> None:
    group = new_group(stall_timeout=STALL_S)
    message = torch.full((NUM_BYTES,), dist.get_rank(), dtype=torch.uint8)
    if dist.get_rank() == 1:
        under_way = begin(group, message)
        dist.barrier()
        signal.pause()  # until it is killed
        del under_way
    dist.barrier()
    with pytest.raises(RankLostError, match="rank 1 stopped"), calling(group, "save", "somewhere"):
        between_ranks(lambda: wait(group, message, lambda: os.kill(victim, signal.SIGSTOP)))
    dist.destroy_process_group(group)


@pytest.mark.parametrize(
    ("begin", "wait"), [(begin_to_receive, send), (begin_to_send, receive), (broadcast, collective)]
)
def test_a_rank_stops_while_bytes_travel(begin: Begin, wait: Wait) -> None:
    run_ranks(2, lose_one, begin, wait, limit_s=60, may_die=1)
