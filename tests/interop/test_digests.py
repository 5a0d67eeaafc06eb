# SPDX-License-Identifier: Apache-2.0
"""Tests that digests are the same for what stock DCP wrote, on ranks, and for what we write of it on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.cli_runs import as_json
from support.goldens import GOLDEN as GOLDENS
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from bytecheckpoint import BcpWriter, digest, save_state_dict
from interop.stock_states import state_of

GOLDEN = GOLDENS / "stock"
KINDS = ("dtypes", "files", "fsspec", "mesh", "no_crc", "olmo", "sharded", "threads")


def kind_and_version(name: str) -> tuple[str, tuple[int, int]]:
    version, kind = name.split("-")[:2]
    major, minor = version.split(".")[:2]
    return kind, (int(major), int(minor))


NAMES = [
    entry.name
    for entry in sorted(GOLDEN.iterdir())
    if kind_and_version(entry.name)[0] in KINDS
    and kind_and_version(entry.name)[1] >= (2, 4)  # before, DCP did not flatten dicts in lists
]


@pytest.mark.parametrize("name", NAMES)
def test_what_stock_wrote(tmp_path: Path, name: str) -> None:
    save_state_dict(tmp_path, state_of(*kind_and_version(name)))
    theirs, ours = digest(GOLDEN / name), digest(tmp_path)
    assert theirs.keys == ours.keys
    assert theirs.total == ours.total
    assert theirs.as_stored == ours.as_stored == ()


def tensors() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(2)
    return {
        "rows": torch.randn(1001, 700, generator=generator),
        "columns": torch.randn(700, 1001, generator=generator).to(torch.bfloat16),
        "both": torch.arange(4 * 6 * 500_000, dtype=torch.uint8).reshape(4, 6, 500_000),  # more than a block in a row
        "replicated": torch.arange(5.0),
    }


def save_on_ranks(path: str) -> None:
    state = {**tensors(), "step": 3}
    line = init_device_mesh("cpu", (dist.get_world_size(),))
    square = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    state["rows"] = distribute_tensor(state["rows"], line, [Shard(0)])
    state["columns"] = distribute_tensor(state["columns"], line, [Shard(1)])
    state["both"] = distribute_tensor(state["both"], square, [Shard(2), Shard(1)])
    dcp.save(state, checkpoint_id=path + "/stock")
    report = save_state_dict(path + "/ours", state, digest=True)
    assert bool(report.digest) == (dist.get_rank() == 0)


def test_what_ranks_write(tmp_path: Path) -> None:
    run_ranks(4, save_on_ranks, str(tmp_path))
    save_state_dict(tmp_path / "whole", {**tensors(), "step": 3}, no_dist=True)
    whole = digest(tmp_path / "whole")
    for name in ("stock", "ours"):
        found = digest(tmp_path / name)
        assert (found.total, found.keys) == (whole.total, whole.keys), name
    assert found.stored == whole.total


def save_alone(path: str) -> None:
    state = {"w": torch.full((3,), 2.0), "rank": dist.get_rank()}
    for writer in (BcpWriter(path + "/ours", digest=True), dcp.FileSystemWriter(path + "/stock")):
        dcp.save(state, storage_writer=writer, use_collectives=False)


def test_parts_of_ranks_that_saved_alone(tmp_path: Path) -> None:
    run_ranks(2, save_alone, str(tmp_path))
    ours, stock = (as_json("digest", str(tmp_path / name)) for name in ("ours", "stock"))
    assert [*ours["parts"]] == ["rank 0", "rank 1"]
    assert ours["total"] == stock["total"]
    assert {part["stored"]["equal"] for part in ours["parts"].values()} == {True}
    weights, ranks = ({part["keys"][key] for part in ours["parts"].values()} for key in ("w", "rank"))
    assert (len(weights), len(ranks)) == (1, 2)
