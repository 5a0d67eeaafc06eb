# SPDX-License-Identifier: Apache-2.0
"""Tests ``bcp du`` and ``bcp why`` on a checkpoint that several ranks have written."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.cli_runs import as_json
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from bytecheckpoint import BcpSavePlanner, BcpWriter
from bytecheckpoint.observability import flush

NUM_RANKS = 4
WHOLE = torch.arange(400 * 300, dtype=torch.float32).reshape(400, 300)


def save(path: str, use_collectives: bool) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = {
        "w": distribute_tensor(WHOLE, mesh, [Shard(0)]),
        "same": distribute_tensor(WHOLE[:10], mesh, [Replicate()]),
    }
    planner = BcpSavePlanner() if use_collectives else None
    dcp.save(
        {"model": model, "step": 7}, storage_writer=BcpWriter(path), planner=planner, use_collectives=use_collectives
    )
    assert flush()


def bytes_below(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def test_pieces_of_all_ranks(tmp_path: Path) -> None:
    step = tmp_path / "step_3"
    run_ranks(NUM_RANKS, save, str(step), True)
    told = as_json("du", str(step))
    (of_all,) = told["checkpoints"]
    assert {row["key"]: row["bytes"] for row in told["keys"]}["model"] == WHOLE.nbytes + WHOLE[:10].nbytes
    assert of_all["bytes"] == bytes_below(step)
    assert of_all["bytes"] == sum(row["bytes"] for row in told["keys"]) + of_all["overhead"]["bytes"]
    told = as_json("why", str(step), "model.w")
    assert told["notes"] == []
    (item,) = told["items"]
    assert {chunk["rank"] for chunk in item["chunks"]} == {*range(NUM_RANKS)}
    for chunk in item["chunks"]:
        assert chunk["file"].startswith(f"__{chunk['rank']}_")
        content = (step / chunk["file"]).read_bytes()
        rows = WHOLE[chunk["offsets"][0] :][: chunk["sizes"][0]]
        assert content[chunk["elements_offset"] :][: chunk["elements_bytes"]] == rows.numpy().tobytes()
        assert chunk["written"]["num_bytes"] == len(content)
        assert chunk["written"]["host"]


def test_ranks_that_committed_by_themselves(tmp_path: Path) -> None:
    """Each has a commit mark of its own, and a copy of what all of them have."""
    run_ranks(NUM_RANKS, save, str(tmp_path), False)
    told = as_json("du", str(tmp_path))
    (of_all,) = told["checkpoints"]
    assert told["findings"] == 0
    assert of_all["bytes"] == bytes_below(tmp_path)
    assert of_all["bytes"] == sum(row["bytes"] for row in told["keys"]) + of_all["overhead"]["bytes"]
    assert {row["key"]: row["bytes"] for row in told["keys"]}["model"] >= WHOLE.nbytes + WHOLE[:10].nbytes
    items = as_json("why", str(tmp_path), "model.w")["items"]
    assert [(item["rank"], item["chunks"][0]["rank"]) for item in items] == [(rank, rank) for rank in range(NUM_RANKS)]
