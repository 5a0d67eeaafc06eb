# SPDX-License-Identifier: Apache-2.0
"""If TCP says that data of one rank do not arrive, all ranks are told which rank sends, and to which ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.pretended_hosts import pretend_host
from support.ranks import run_ranks

from bytecheckpoint import Config, save_state_dict
from bytecheckpoint.distributed import groups
from bytecheckpoint.distributed.groups import calling, monitor_of, own_group
from bytecheckpoint.distributed.mixed_calls import CallKind
from bytecheckpoint.distributed.sent_data import SentData
from bytecheckpoint.errors import RankLostError
from bytecheckpoint.runtime.place import name_own_address

NUM_RANKS, SENDER = 4, 1
CONFIG = Config(stall_timeout_s=2)


def begin(path: Path) -> None:
    """Saves once: two ranks each believe that they are on one machine."""
    rank = dist.get_rank()
    pretend_host(f"node{rank // 2}")
    name_own_address(f"10.0.0.{rank // 2}")
    save_state_dict(path, {f"of {rank}": torch.ones(10)}, config=CONFIG)


def lost_by(call: Any) -> tuple[str, dict[int, str]]:
    with pytest.raises(RankLostError) as caught:
        call()
    return str(caught.value), caught.value.ranks


def save_stuck(path: Path) -> tuple[str, dict[int, str]]:
    begin(path)
    rank = dist.get_rank()
    if rank == SENDER:
        SentData.stuck = lambda *_: ["10.0.0.9", "10.0.0.1"]  # type: ignore[method-assign]
    if rank == 2:  # the others wait for its data, and it waits for nobody
        group = own_group(None, False, "calls", CONFIG.stall_timeout_s, ("save", str(path)))
        return lost_by(lambda: _wait_in_call(group, str(path)))
    return lost_by(lambda: save_state_dict(path, {f"of {rank}": torch.ones(10)}, config=CONFIG))


def _until_lost(group: dist.ProcessGroup | None, path: str) -> None:
    monitor = monitor_of(group)
    assert monitor is not None
    assert monitor.wait_for_loss(30)
    raise monitor.error("save", path)


def _wait_in_call(group: dist.ProcessGroup | None, path: str) -> None:
    with calling(group, "save", path, CallKind.UNKNOWN):  # it may come when the others have noticed already
        _until_lost(group, path)


def test_all_ranks_name_the_sender_and_the_receivers(tmp_path: Path) -> None:
    """Data to addresses of no rank, which belong to connections of others, accuse nobody."""
    fate = (
        "sends data to rank 2, 3 (on host node1, 10.0.0.1) that have not moved for more than 2 s, while signs of life "
        "pass: look for a smaller MTU on the way, and for a firewall that drops large packets (on host node0, 10.0.0.0)"
    )
    for text, ranks in run_ranks(NUM_RANKS, save_stuck, tmp_path):
        assert text == f"save({tmp_path}): rank {SENDER} {fate}"
        assert ranks == {SENDER: fate}


def save_cut_off(path: Path) -> tuple[str, dict[int, str]]:
    begin(path)
    groups._TOLD_WITHIN_S = 0.1  # nobody else tells of a loss
    rank = dist.get_rank()
    group = own_group(None, False, "calls", CONFIG.stall_timeout_s, ("save", str(path)))

    def call() -> None:
        with calling(group, "save", str(path)):
            between_ranks(rank, group, str(path))

    return lost_by(call)


def between_ranks(rank: int, group: dist.ProcessGroup | None, path: str) -> None:
    """Its name tells ``calling`` that other ranks may wait for this one."""
    if rank == SENDER:
        raise RuntimeError("[pair.cc:561] Read error [::ffff:10.0.0.1]:4827: Connection timed out")
    _until_lost(group, path)


def test_a_rank_whose_connection_ends_says_to_whom(tmp_path: Path) -> None:
    fate = "has lost its connection to rank 2, 3 (on host node1, 10.0.0.1) (on host node0, 10.0.0.0)"
    for text, ranks in run_ranks(NUM_RANKS, save_cut_off, tmp_path):
        assert text == f"save({tmp_path}): rank {SENDER} {fate}"
        assert ranks == {SENDER: fate}
