# SPDX-License-Identifier: Apache-2.0
"""A save whose chunks do not cover a tensor is refused, as when a rank saves as if it were alone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.ranks import failures, run_ranks
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from bytecheckpoint import BcpLoadPlanner, BcpReader, BcpSavePlanner, BcpWriter, Config, verify
from bytecheckpoint.errors import InvalidPlanError
from bytecheckpoint.native import _core

GAP = "'w': rows 4 to 7 of 8 are in no chunk"


def sharded(offset: float = 0.0) -> torch.Tensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(torch.arange(16.0).view(8, 2) + offset, mesh, [Shard(0)], src_data_rank=None)


def state_of(path: str) -> tuple[str, str]:
    found = _core.inspect_folder(path)
    return found["state"], found["reason"]


def save_as_if_alone(path: str, planner: Any) -> None:
    """All ranks save together. Then rank 0, which holds half of the tensor, saves with ``no_dist``."""
    state = {"w": sharded()}
    dcp.save(state, storage_writer=BcpWriter(path), planner=planner())
    if dist.get_rank() == 0:
        wanted = failures(lambda: dcp.save(state, storage_writer=BcpWriter(path), planner=planner(), no_dist=True))
        assert isinstance(wanted[0], InvalidPlanError)
        assert GAP in str(wanted[0])
        assert "process group of all ranks" in str(wanted[0])
        assert state_of(path) == ("complete", "")
    dist.barrier()
    got = {"w": sharded(-1.0)}
    dcp.load(got, storage_reader=BcpReader(path), planner=BcpLoadPlanner())
    assert torch.equal(got["w"].full_tensor(), torch.arange(16.0).view(8, 2))  # type: ignore[attr-defined]


@pytest.mark.parametrize("planner", [BcpSavePlanner, DefaultSavePlanner])
def test_a_rank_that_saves_as_if_alone_is_refused_and_the_checkpoint_before_stays(planner: Any, tmp_path: Path) -> None:
    run_ranks(2, save_as_if_alone, str(tmp_path), planner)


def save_less_than_there_is(path: str, config: Config, writer: Any) -> None:
    """Rank 1 leaves its shard out. The gap is an error for all ranks, also if they exchange plans through the tree."""
    for _ in range(2):
        state = {"w": sharded()} if dist.get_rank() == 0 else {"other": torch.ones(2)}
        reasons = failures(
            lambda state=state: dcp.save(state, storage_writer=writer(path), planner=BcpSavePlanner(config=config))
        )
        assert all(isinstance(reason, InvalidPlanError) for reason in reasons.values()), reasons
        assert any(GAP in str(reason) for reason in reasons.values())
    dist.barrier()
    assert not Path(path, ".metadata").exists()
    # Now the same ranks save all of it: the refused plan is not remembered.
    dcp.save({"w": sharded()}, storage_writer=writer(path), planner=BcpSavePlanner(config=config))


@pytest.mark.parametrize("threshold", [1, 64])
@pytest.mark.parametrize("writer", [BcpWriter, FileSystemWriter])
def test_a_shard_that_no_rank_has_is_an_error_on_all(threshold: int, writer: Any, tmp_path: Path) -> None:
    run_ranks(2, save_less_than_there_is, str(tmp_path), Config(tree_topo_threshold=threshold), writer)


def save_a_part_on_purpose(path: str, config: Config) -> None:
    state = {"w": sharded()} if dist.get_rank() == 0 else {"other": torch.ones(2)}
    dcp.save(state, storage_writer=BcpWriter(path, config=config), planner=BcpSavePlanner(config=config))
    assert state_of(path) == ("complete", "")


@pytest.mark.parametrize("threshold", [1, 64])
def test_a_part_that_is_meant_is_saved(threshold: int, tmp_path: Path) -> None:
    config = Config(allow_partial_tensors=True, tree_topo_threshold=threshold)
    run_ranks(2, save_a_part_on_purpose, str(tmp_path), config)
    assert verify(tmp_path).is_whole


def save_without_collectives(path: str, planner: Any, writer: Any) -> None:
    state = {"w": sharded(), "mine": torch.full((dist.get_rank() + 1,), 1.0), "all": torch.ones(3)}
    dcp.save(state, storage_writer=writer(path), planner=planner(), use_collectives=False)


@pytest.mark.parametrize(
    ("planner", "writer"),
    [
        (BcpSavePlanner, BcpWriter),
        (DefaultSavePlanner, BcpWriter),
        (BcpSavePlanner, FileSystemWriter),
        (DefaultSavePlanner, FileSystemWriter),
    ],
)
def test_parts_of_ranks_are_judged_together(planner: Any, writer: Any, tmp_path: Path) -> None:
    run_ranks(3, save_without_collectives, str(tmp_path / "all"), planner, writer)
    assert state_of(str(tmp_path / "all")) == ("complete", "")
    # Without the last rank's part, only the missing rows show that there was one.
    shutil.copytree(tmp_path / "all", tmp_path / "fewer")
    (tmp_path / "fewer" / "__2.metadata").unlink()
    fault = "'w': rows 6 to 7 of 8 are in no chunk of any part"
    assert state_of(str(tmp_path / "fewer")) == ("incomplete", fault)
    if writer is BcpWriter:
        assert verify(tmp_path / "all").is_whole
        problems = verify(tmp_path / "fewer").problems
        assert [(p.file, p.section, p.fqns, p.message) for p in problems] == [
            ("__0.metadata", "metadata", ["w"], fault)
        ]
