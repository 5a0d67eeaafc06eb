# SPDX-License-Identifier: Apache-2.0
"""An error that comes from a rank of another machine names its host."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.pretended_hosts import pretend_host
from support.ranks import run_ranks
from torch.distributed.checkpoint.api import CheckpointException

from bytecheckpoint import (
    BcpLoadPlanner,
    BcpReader,
    BcpSavePlanner,
    BcpWriter,
    Config,
    load_state_dict,
    save_state_dict,
)
from bytecheckpoint.errors import CheckpointError, RankLostError
from bytecheckpoint.runtime.place import name_own_address

NUM_RANKS, VICTIM = 3, 1
HOST = f"node{VICTIM}"


class Failing(BcpSavePlanner):
    """Fails on one rank while it writes."""

    def resolve_data(self, write_item: Any) -> Any:
        if dist.get_rank() == VICTIM:
            raise ValueError("no such thing")
        return super().resolve_data(write_item)


class FailingLoad(BcpLoadPlanner):
    """Fails on one rank while it reads."""

    def load_bytes(self, read_item: Any, value: Any) -> None:
        if dist.get_rank() == VICTIM:
            raise ValueError("no such thing")
        super().load_bytes(read_item, value)


def state() -> dict[str, Any]:
    return {f"of {dist.get_rank()}": torch.full((10,), dist.get_rank()), "object": {1, 2}}


def text_of(error: BaseException) -> str:
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


def fail(path: Path) -> dict[str, str]:
    """Returns what each kind of call says on this rank if it fails on the victim."""
    pretend_host(f"node{dist.get_rank()}")
    said = {}
    with pytest.raises((CheckpointError, ValueError)) as caught:
        save_state_dict(path, state(), planner=Failing())
    said["save_state_dict"] = text_of(caught.value)
    with pytest.raises(CheckpointException) as caught_by_dcp:
        dcp.save(state(), storage_writer=BcpWriter(path), planner=Failing())
    said["dcp.save"] = str(caught_by_dcp.value)
    save_state_dict(path, state())
    with pytest.raises((CheckpointError, ValueError)) as caught:
        load_state_dict(path, state(), planner=FailingLoad())
    said["load_state_dict"] = text_of(caught.value)
    with pytest.raises(CheckpointException) as caught_by_dcp:
        dcp.load(state(), storage_reader=BcpReader(path), planner=FailingLoad())
    said["dcp.load"] = str(caught_by_dcp.value)
    return said


def test_every_call_that_fails_names_the_host(tmp_path: Path) -> None:
    for rank, said in enumerate(run_ranks(NUM_RANKS, fail, tmp_path)):
        for call, text in said.items():
            assert "no such thing" in text, (rank, call, text)
            assert HOST in text or rank == VICTIM, (rank, call, text)  # a rank's own log says where it runs
            assert not {"node0", "node2"} & {*text.replace(",", " ").replace(":", " ").split()}, (rank, call, text)


def die(path: Path) -> tuple[str, dict[int, str]]:
    pretend_host("worker")  # as in containers that all have one name; then the address tells
    name_own_address(f"10.0.0.{dist.get_rank()}")
    config = Config(stall_timeout_s=5)
    save_state_dict(path, state(), config=config)
    if dist.get_rank() == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RankLostError) as caught:
        save_state_dict(path, state(), config=config)
    return str(caught.value), caught.value.ranks


def test_a_lost_rank_is_named_with_its_host_and_address(tmp_path: Path) -> None:
    where = f"(on host worker, 10.0.0.{VICTIM})"
    for text, ranks in run_ranks(NUM_RANKS, die, tmp_path, may_die=VICTIM):
        assert text == f"save({tmp_path}): rank {VICTIM} died: its connection has ended {where}"
        assert ranks == {VICTIM: f"died: its connection has ended {where}"}
