# SPDX-License-Identifier: Apache-2.0
"""Plain calls of several ranks: ours plan them on all ranks. If a planner was touched on one, all go DCP's way."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.ranks import run_ranks
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from bytecheckpoint import BcpReader, BcpSavePlanner, BcpWriter, Config, verify
from bytecheckpoint.errors import ConfigError
from bytecheckpoint.planning.plan_cache import plan_cache

NUM_RANKS = 4


def state(value: float) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, NUM_RANKS // 2), mesh_dim_names=("replicas", "shards"))
    whole = torch.arange(64 * 32, dtype=torch.float32).reshape(64, 32) * value
    return {
        "sharded": distribute_tensor(whole, mesh, [Replicate(), Shard(0)]),
        "replicated": distribute_tensor(whole + value, mesh, [Replicate(), Replicate()]),
        "nested": {f"of rank {dist.get_rank()}": torch.full((5,), value)},
    }


def check(path: Path, value: float, planner: Any = None) -> None:
    got = state(0.0)
    dcp.load(got, storage_reader=BcpReader(path), planner=planner)
    wanted = state(value)
    for key in ("sharded", "replicated"):
        assert torch.equal(got[key].full_tensor(), wanted[key].full_tensor())
    torch.testing.assert_close(got["nested"], wanted["nested"], rtol=0, atol=0)


def chunks(path: Path) -> dict[Any, Any]:
    metadata = BcpReader(path).read_metadata()
    places = {index: (place.offset, place.length) for index, place in metadata.storage_data.items()}
    return {"keys": metadata.state_dict_metadata, "nested": metadata.planner_data, "places": places}


def save_both_ways(folder: Path) -> None:
    for name, planner in (("plain", None), ("explicit", BcpSavePlanner())):
        writer = BcpWriter(folder / name)
        dcp.save(state(2.0), storage_writer=writer, planner=planner)
        assert writer.last_report is not None
        assert writer.last_report.plan.as_given == ""
        check(folder / name, 2.0)
    if dist.get_rank() == 0:
        assert chunks(folder / "plain") == chunks(folder / "explicit")


def test_the_ranks_save_as_with_our_planner(tmp_path: Path) -> None:
    run_ranks(NUM_RANKS, save_both_ways, tmp_path)
    assert verify(tmp_path / "plain").is_whole


class Touched(DefaultSavePlanner):
    """A planner of somebody else."""


class TouchedLoad(DefaultLoadPlanner):
    """A planner of somebody else."""


def save_with_one(folder: Path, who: int, num_before: int) -> str:
    """Saves plainly some times, and then with a planner that one rank has touched."""
    path, mine = folder / "ck", dist.get_rank() == who
    for _ in range(num_before):
        dcp.save(state(1.0), storage_writer=BcpWriter(path))
    writer = BcpWriter(path)
    dcp.save(state(3.0), storage_writer=writer, planner=Touched() if mine else None)
    dcp.save(state(3.0), storage_writer=BcpWriter(folder / "stock", config=Config(planning="as given")))
    check(path, 3.0, TouchedLoad() if mine else None)
    assert writer.last_report is not None
    return writer.last_report.plan.as_given


@pytest.mark.parametrize("who", [0, 2])
@pytest.mark.parametrize("num_before", [0, 2])
def test_if_one_rank_must_go_dcps_way_all_do(tmp_path: Path, who: int, num_before: int) -> None:
    """Also if the other ranks have sent only digests of what they hold, for plans were alike before."""
    reasons = run_ranks(NUM_RANKS, save_with_one, tmp_path, who, num_before)
    others = "planner: it is another one on some rank"
    assert reasons == ["planner: it is a Touched" if rank == who else others for rank in range(NUM_RANKS)]
    assert chunks(tmp_path / "ck") == chunks(tmp_path / "stock")
    assert verify(tmp_path / "ck").is_whole


def save_with_one_behind_a_new_coordinator(path: Path) -> None:
    """The coordinator has forgotten what the others sent before, as one of another group has never heard it."""
    dcp.save(state(1.0), storage_writer=BcpWriter(path))
    if dist.get_rank() == 0:
        plan_cache().clear()
    planner = Touched() if dist.get_rank() == 2 else None
    dcp.save(state(3.0), storage_writer=BcpWriter(path), planner=planner)
    check(path, 3.0)


def test_the_coordinator_asks_for_plans_that_it_does_not_have(tmp_path: Path) -> None:
    run_ranks(NUM_RANKS, save_with_one_behind_a_new_coordinator, tmp_path)


def save_with_one_through_the_tree(path: Path, who: int) -> list[str]:
    """With so many ranks that plans go through a tree, the coordinator at first gets digests only."""
    reasons = []
    for value in (1.0, 2.0, 3.0):
        given = Touched() if dist.get_rank() == who else None
        writer = BcpWriter(path, config=Config(tree_topo_threshold=1))
        dcp.save(state(value), storage_writer=writer, planner=None if value == 1.0 else given)
        check(path, value)
        assert writer.last_report is not None
        reasons.append(writer.last_report.plan.as_given)
    return reasons


@pytest.mark.parametrize("who", [0, 2])
def test_also_where_plans_go_through_a_tree(tmp_path: Path, who: int) -> None:
    reasons = run_ranks(NUM_RANKS, save_with_one_through_the_tree, tmp_path, who)
    assert all(of_rank[0] == "" and all(of_rank[1:]) for of_rank in reasons)


def save_after_another_plan(path: Path) -> None:
    """What the ranks hold changes, so they exchange plans among themselves, which the coordinator does not see."""
    for step in range(3):
        held = {**state(1.0), **({f"new {step}": torch.ones(2)} if dist.get_rank() == 0 else {})}
        dcp.save(held, storage_writer=BcpWriter(path))
        dcp.save(held, storage_writer=BcpWriter(path), planner=Touched() if dist.get_rank() == 1 else None)
        check(path, 1.0)


def test_also_after_a_plan_that_the_ranks_exchanged(tmp_path: Path) -> None:
    run_ranks(NUM_RANKS, save_after_another_plan, tmp_path)


class Looks(DefaultLoadPlanner):
    """Looks at the items of all ranks."""

    def create_global_plan(self, plans: Any) -> Any:
        assert all(item.dest_index.fqn for plan in plans for item in plan.items)
        assert all(plan.items for plan in plans)
        return super().create_global_plan(plans)


def load_with_one_that_looks(path: Path, who: int) -> None:
    dcp.save(state(1.0), storage_writer=BcpWriter(path))
    for _ in range(2):
        check(path, 1.0, Looks() if dist.get_rank() == who else None)


@pytest.mark.parametrize("who", [0, 2])
def test_a_coordinator_that_looks_at_the_items_of_a_load_gets_them(tmp_path: Path, who: int) -> None:
    run_ranks(NUM_RANKS, load_with_one_that_looks, tmp_path, who)


class Caching(DefaultSavePlanner):
    """A planner of somebody else, which keeps plans."""

    def __init__(self) -> None:
        super().__init__(enable_plan_caching=True)


def save_with_one_that_keeps_plans(folder: Path, all_keep: bool) -> None:
    keeps = DefaultSavePlanner(enable_plan_caching=True) if all_keep else None
    for step in range(3):
        path = folder / str(step)
        planner = Caching() if dist.get_rank() == 1 else keeps
        save_it = partial(dcp.save, state(float(step)), storage_writer=BcpWriter(path), planner=planner)
        if all_keep or step == 0:
            save_it()
            check(path, float(step))
        else:
            with pytest.raises(CheckpointException, match="rank 1 has sent no plan"):
                save_it()


@pytest.mark.parametrize("all_keep", [True, False])
def test_a_rank_that_keeps_plans_loses_nothing(tmp_path: Path, all_keep: bool) -> None:
    """DCP's planner with ``enable_plan_caching`` sends no plan if nothing has changed: the coordinator must keep it."""
    run_ranks(NUM_RANKS, save_with_one_that_keeps_plans, tmp_path, all_keep)


class Finishes(BcpSavePlanner):
    """A planner of ours whose hook, as it is not ours, may look at what it is given."""

    def finish_plan(self, new_plan: Any) -> Any:
        return super().finish_plan(new_plan)


def save_after_a_change_of_all(path: Path, who: int) -> None:
    """What the ranks hold is replicated, so beside the plan that the coordinator knows they send new checksums."""
    for step in range(4):
        own = {f"new {step}": torch.full((2,), float(step))} if step in (1, 2) and dist.get_rank() == who else {}
        held = {"replicated": torch.full((3,), float(step)), f"of rank {dist.get_rank()}": torch.ones(2), **own}
        planner = Finishes() if step in (1, 2) and dist.get_rank() == who else None
        dcp.save(held, storage_writer=BcpWriter(path), planner=planner)
        got = {name: torch.zeros_like(value) for name, value in held.items()}
        dcp.load(got, storage_reader=BcpReader(path))
        assert all(torch.equal(got[name], value) for name, value in held.items())


@pytest.mark.parametrize("who", [0, 1])
def test_the_coordinator_asks_also_for_plans_that_it_had_with_other_checksums(tmp_path: Path, who: int) -> None:
    run_ranks(2, save_after_a_change_of_all, tmp_path, who)


class DropsItems(BcpWriter):
    """A writer that leaves out what its rank would write, and keeps the paths of its state."""

    def prepare_local_plan(self, plan: Any) -> Any:
        return dataclasses.replace(super().prepare_local_plan(plan), items=[])


def save_with_one_that_writes_nothing(path: Path) -> None:
    config = Config(tree_topo_threshold=1)
    for step in range(3):
        writer = (DropsItems if dist.get_rank() == 1 else BcpWriter)(path, config=config)
        dcp.save({"nested": {f"of rank {dist.get_rank()}": torch.ones(2)}}, storage_writer=writer)
        assert list(BcpReader(path).read_metadata().state_dict_metadata) == ["nested.of rank 0"], step


def test_a_writer_may_leave_out_items_where_plans_go_through_a_tree(tmp_path: Path) -> None:
    run_ranks(2, save_with_one_that_writes_nothing, tmp_path)


class KeepsItsPlan(DefaultSavePlanner):
    """Gives the very same local plan in each save."""

    kept: Any = None

    def create_local_plan(self) -> Any:
        self.kept = self.plan = self.kept or super().create_local_plan()
        return self.kept


class LooksAtSaves(DefaultSavePlanner):
    def create_global_plan(self, all_plans: Any) -> Any:
        assert all(item.index.fqn for plan in all_plans for item in plan.items)
        return super().create_global_plan(all_plans)


def save_with_one_that_no_longer_answers(folder: Path) -> None:
    rank = dist.get_rank()
    planner = (LooksAtSaves, KeepsItsPlan, lambda: None)[rank]()
    held = {f"of rank {rank}": torch.ones(2)}
    config = Config(tree_topo_threshold=1)
    dcp.save(held, storage_writer=BcpWriter(folder / "ours", config=config), planner=planner)
    writer = FileSystemWriter(folder / "mixed") if rank == 1 else BcpWriter(folder / "mixed", config=config)
    with pytest.raises(CheckpointException, match="sent only the digest of its plan"):
        dcp.save(held, storage_writer=writer, planner=planner)


def test_a_rank_that_no_longer_understands_is_not_asked(tmp_path: Path) -> None:
    """It would not answer, and the others would wait: the plan that its planner keeps says nothing of this call."""
    run_ranks(3, save_with_one_that_no_longer_answers, tmp_path)


class OwnPlan(BcpReader):
    """A reader that does not hand on to ours."""

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan


def load_with_another_reader(path: Path, kind: Any) -> None:
    held = {f"of rank {dist.get_rank()}": torch.ones(2)}
    dcp.save(held, storage_writer=BcpWriter(path))
    reader = (kind if dist.get_rank() == 1 else BcpReader)(path)
    with pytest.raises(CheckpointException, match="it is not known which save rank 1 would read") as raised:
        dcp.load(held, storage_reader=reader)
    assert [type(error) for error, _ in raised.value.failures.values()] == [ConfigError]


@pytest.mark.parametrize("kind", [FileSystemReader, OwnPlan])
def test_a_rank_with_another_reader_is_named(tmp_path: Path, kind: Any) -> None:
    run_ranks(2, load_with_another_reader, tmp_path, kind)
