# SPDX-License-Identifier: Apache-2.0
"""The journal has every rank of a call, with its times on the clock of the coordinator."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from bytecheckpoint import BcpLoadPlanner, BcpReader, BcpSavePlanner, BcpWriter, Config
from bytecheckpoint.observability import flush, read_journal
from bytecheckpoint.observability.trace_files import read_traces, with_whole_traces
from distributed.shared_loads import on_machines_of

NUM_RANKS = 4
LATE_S = 0.4
# A rank in a time namespace has a clock that is so far ahead.
AHEAD_S = 5000


def save_and_load(path: str, late: int, settings: dict[str, Any]) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {"w": distribute_tensor(torch.arange(1 << 20, dtype=torch.float32), mesh, [Shard(0)])}
    state["on all"] = torch.ones(1 << 20)
    config = Config(journal=f"{Path(path).parent}/.bcp", **settings)
    dist.barrier()
    if dist.get_rank() == late:
        time.sleep(LATE_S)
    dcp.save(state, storage_writer=BcpWriter(path, config=config), planner=BcpSavePlanner())
    dcp.load(state, storage_reader=BcpReader(path, config=config), planner=BcpLoadPlanner())
    assert flush()


@pytest.mark.parametrize("reading", ["independent", "cooperative"])
def test_every_rank_is_in_the_journal(tmp_path: Path, reading: str) -> None:
    run_ranks(NUM_RANKS, save_and_load, str(tmp_path / "step_4"), 2, {"shared_reading": reading})
    (save, load), num_skipped = read_journal(tmp_path)
    assert num_skipped == 0
    for record in (save, load):
        ranks = record["ranks"]
        assert record["world_size"] == NUM_RANKS
        assert ranks["rank"] == [*range(NUM_RANKS)]
        assert ranks["clock_error_s"] == [0.0] * NUM_RANKS
        assert ranks["arrived_s"][0] == 0.0
        columns = [*ranks["phases"].values(), ranks["num_bytes"], ranks["ended_s"], ranks["host"]]
        assert {len(column) for column in columns} == {NUM_RANKS}
        assert {*record["timelines"]} == {str(rank) for rank in range(NUM_RANKS)}
        assert max(ranks["ended_s"]) <= record["report"]["total_s"] + 0.5
    assert save["ranks"]["arrived_s"][2] > LATE_S / 2
    assert ("wait_peer" in load["ranks"]["phases"]) == (reading == "cooperative")
    assert sum(save["ranks"]["num_bytes"]) == save["report"]["total_bytes"] >= 4 << 20
    assert all(seconds > 0 for seconds in save["ranks"]["phases"]["write"])


def load_from_other_machines(path: str) -> None:
    on_machines_of(1)
    save_and_load(path, late=NUM_RANKS, settings={"shared_reading": "cooperative"})


def test_blocks_that_travel_between_machines_are_in_the_journal(tmp_path: Path) -> None:
    run_ranks(NUM_RANKS, load_from_other_machines, str(tmp_path / "step_4"))
    (_, load), _ = read_journal(tmp_path)
    phases = load["ranks"]["phases"]
    assert all(seconds > 0 for phase in ("send", "receive", "wait_peer") for seconds in phases[phase])


RANK = """
import sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from bytecheckpoint import BcpLoadPlanner, BcpReader, BcpSavePlanner, BcpWriter, Config
from bytecheckpoint.observability import flush
rank, store, path = int(sys.argv[1]), sys.argv[2], sys.argv[3]
config = Config(journal=path.replace("step_1", ".bcp"))
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
state = {f"w{rank}": torch.ones(1000)}
dcp.save(state, storage_writer=BcpWriter(path, config=config), planner=BcpSavePlanner())
dcp.load(state, storage_reader=BcpReader(path, config=config), planner=BcpLoadPlanner())
assert flush()
dist.barrier()
"""


def test_ranks_with_other_clocks_are_put_on_one(tmp_path: Path) -> None:
    """Rank 1 runs in a time namespace, as on another machine; its name and its Unix clock are the same here."""
    ahead = ["unshare", "--time", "--monotonic", str(AHEAD_S)]
    if subprocess.run([*ahead, "true"], capture_output=True).returncode != 0:
        pytest.skip("this user may not make a time namespace")
    command = [sys.executable, "-c", RANK]
    arguments = [str(tmp_path / "store"), str(tmp_path / "step_1")]
    began = time.monotonic()
    ranks = [subprocess.Popen([*(ahead if rank else []), *command, str(rank), *arguments]) for rank in range(2)]
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    took = time.monotonic() - began
    records, _ = read_journal(tmp_path)
    assert [record["kind"] for record in records] == ["save", "load"]
    for record in records:
        of_ranks = record["ranks"]
        assert of_ranks["clock_error_s"][0] == 0.0
        assert 0.0 < of_ranks["clock_error_s"][1] < took
        assert abs(of_ranks["arrived_s"][1]) < took, json.dumps(of_ranks)
        assert 0.0 < of_ranks["ended_s"][1] < took


def save_whole(path: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    state = {"step": 1, "w": distribute_tensor(torch.ones(64, 64), mesh, [Shard(0), Shard(1)])}
    dcp.save(state, storage_writer=BcpWriter(path, config=Config(trace="full")), planner=BcpSavePlanner())
    assert flush()


def test_whole_traces_and_the_mesh(tmp_path: Path) -> None:
    run_ranks(NUM_RANKS, save_whole, str(tmp_path / "step_1"))
    (record,), _ = read_journal(tmp_path)
    assert record["mesh"] == {"names": ["dp", "tp"], "shape": [2, 2]}
    assert {*read_traces(tmp_path / "step_1" / ".bcp", "save", 1)} == {*range(NUM_RANKS)}
    whole = with_whole_traces({**record, "timelines": {}}, [tmp_path / "step_1" / ".bcp"])
    for rank in range(NUM_RANKS):
        lanes = {lane["name"]: lane["spans"] for lane in whole["timelines"][str(rank)]["lanes"]}
        assert {"call", "fill", "write 0"} <= lanes.keys()
        begin_us = round(record["ranks"]["arrived_s"][rank] * 1e6)
        assert all(span[1] >= begin_us - 1 for spans in lanes.values() for span in spans)
    # A trace of another call at this step is not shown as one of this call.
    later = {**record, "at": record["at"] + 60, "timelines": {}}
    assert with_whole_traces(later, [tmp_path / "step_1" / ".bcp"]) == later
