# SPDX-License-Identifier: Apache-2.0
"""Saves and loads through a real server that speaks S3, with several ranks, and with processes that are killed."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.ending_ranks import EndingRanks
from support.ranks import run_ranks
from support.seaweedfs import SeaweedFS
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from bytecheckpoint import (
    BcpLoadPlanner,
    BcpReader,
    BcpSavePlanner,
    BcpWriter,
    Config,
    load_state_dict,
    save_state_dict,
    verify,
)
from bytecheckpoint.errors import CheckpointNotFoundError, StorageError
from bytecheckpoint.observability import read_failures
from bytecheckpoint.storage.object_store.client import StoreClient
from bytecheckpoint.storage.object_store.stores import use_store

ROWS, COLUMNS = 1200, 4096  # 20 MB
_CALLS = ("open", "read", "upload", "entries", "head", "get", "put_if", "delete")
_numbers = itertools.count()


@pytest.fixture
def url() -> str:
    return f"s3://checkpoints/run-{next(_numbers)}/step-1"


def whole(step: int) -> torch.Tensor:
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS) + step


def sharded(step: int, placement: Any) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        "w": distribute_tensor(whole(step), mesh, [placement]),
        "same": distribute_tensor(torch.full((64,), float(step)), mesh, [Replicate()]),
        "step": step,
    }


def save(url: str, options: dict[str, Any], step: int) -> float:
    writer = BcpWriter(url, config=Config(storage_options=options))
    dcp.save(sharded(step, Shard(0)), storage_writer=writer, planner=BcpSavePlanner())
    assert writer.last_report is not None
    return writer.last_report.balance or 1.0


def load(url: str, options: dict[str, Any], step: int, placement: Any) -> float:
    state = sharded(0, placement)
    reader = BcpReader(url, config=Config(storage_options=options))
    dcp.load(state, storage_reader=reader, planner=BcpLoadPlanner())
    assert state["step"] == step
    assert torch.equal(state["w"].full_tensor(), whole(step))
    assert torch.equal(state["same"].full_tensor(), torch.full((64,), float(step)))
    assert reader.last_report is not None
    return reader.last_report.read_amplification if dist.get_rank() == 0 else 0.0


def test_4_ranks_save_and_2_and_3_load(server: SeaweedFS, url: str) -> None:
    assert run_ranks(4, save, url, server.options, 7)[0] < 1.05
    for num_ranks, placement in ((2, Shard(1)), (3, Shard(0)), (3, Replicate())):
        amplification = run_ranks(num_ranks, load, url, server.options, 7, placement)[0]
        assert amplification <= 1.05, (num_ranks, placement)
    assert verify(url, config=Config(storage_options=server.options)).is_whole


def fail_and_recover(url: str, options: dict[str, Any], broken: dict[str, Any]) -> None:
    """One rank has the wrong credentials: all ranks raise, and nothing is replaced."""
    save(url, options, 1)
    own = broken if dist.get_rank() == 1 else options
    with pytest.raises(dcp.api.CheckpointException, match="403 Forbidden"):
        save(url, own, 2)
    dist.barrier()
    load(url, options, 1, Shard(0))


def test_credentials_of_one_rank_that_are_wrong(server: SeaweedFS, url: str) -> None:
    run_ranks(2, fail_and_recover, url, server.options, {**server.options, "secret_access_key": "wrong"})


def test_stock_dcp_reads_what_is_there(server: SeaweedFS, url: str, tmp_path: Path) -> None:
    """The objects are the files of an ordinary checkpoint."""
    config = Config(storage_options=server.options)
    save_state_dict(url, {"w": whole(3), "step": 3}, config=config)
    client = use_store(url, config)
    for name in client.names():
        (tmp_path / name).write_bytes(client.get(name))
    found = {"w": torch.zeros(ROWS, COLUMNS), "step": 0}
    dcp.load(found, storage_reader=dcp.FileSystemReader(tmp_path), no_dist=True)
    assert found["step"] == 3
    assert torch.equal(found["w"], whole(3))


def test_what_the_server_refuses(server: SeaweedFS, url: str) -> None:
    good = server.options
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint there"):
        load_state_dict(url, {"step": 0}, config=Config(storage_options=good))
    for call in (save_state_dict, load_state_dict):
        with pytest.raises(StorageError, match="403 Forbidden") as caught:
            call(url, {"step": 0}, config=Config(storage_options={**good, "secret_access_key": "not this one"}))
        assert "not this one" not in str(caught.value)
    nobody = Config(storage_options={**good, "endpoint": "http://127.0.0.1:1"}, io_timeout_s=2.0)
    with pytest.raises(StorageError, match=r"127\.0\.0\.1:1/"):
        save_state_dict(url, {"step": 0}, config=nobody)


def save_until_killed(rank: int, url: str, options: dict[str, Any], kill_at: int) -> None:
    calls = itertools.count()
    for name in _CALLS:
        original = getattr(StoreClient, name)

        def counted(self: StoreClient, *args: Any, _call: Any = original) -> Any:
            if next(calls) == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return _call(self, *args)

        setattr(StoreClient, name, counted)
    save_state_dict(url, {"w": whole(2), "step": 2}, config=Config(storage_options=options), no_dist=True)
    print(next(calls))


def test_killed_before_each_call_of_the_store(server: SeaweedFS, ending_ranks: EndingRanks) -> None:
    """What loads afterwards is the old checkpoint or the new one, whole, and the next save works.

    A save that died before its commit is told from when its note is there. One that died behind it is never told.
    """
    config = Config(storage_options=server.options)
    seen, told = [], []
    for number in itertools.count():
        url = f"s3://checkpoints/killed-{number}"
        save_state_dict(url, {"w": whole(1), "step": 1}, config=config)
        (ended,) = ending_ranks.run(1, save_until_killed, url, server.options, number)
        found: dict[str, Any] = {"w": torch.zeros(ROWS, COLUMNS), "step": 0}
        load_state_dict(url, found, config=config)
        assert torch.equal(found["w"], whole(found["step"]))
        seen.append(found["step"])
        died = read_failures(url)
        told.append([each["phase"] for each in died])
        if ended.code == 0:
            break
        assert ended.code == -signal.SIGKILL, ended.said
        save_state_dict(url, {"w": whole(3), "step": 3}, config=config)
        assert verify(url, config=config).is_whole
        assert [each["save_id"] for each in read_failures(url)] == [each["save_id"] for each in died]
    assert seen == sorted(seen)
    assert seen[0] == 1
    assert seen[-1] == 2
    assert len(seen) > 8
    assert [*dict.fromkeys(map(tuple, told))] == [(), ("begin",), ("write",)]
    assert {*map(tuple, told[seen.index(2) :])} == {()}
    assert told.count(["begin"]) == 1, "the note is put last of what begins a save"
