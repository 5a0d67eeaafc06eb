# SPDX-License-Identifier: Apache-2.0
"""Real ranks exchange plans through the cache and the tree."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.equality import assert_equal
from support.ranks import run_ranks
from torch.distributed.tensor import Shard

from bytecheckpoint import BcpReader, BcpSavePlanner, BcpWriter, Config
from bytecheckpoint.planning import plan_tree as _plan_tree
from bytecheckpoint.planning.plan_cache import plan_cache
from bytecheckpoint.report import PlanReport
from distributed.planned_saves import GATHER, TREE, assert_loads, blank, model, numbers, save


def save_twice(path: str, config: Config) -> tuple[PlanReport, PlanReport]:
    first = save(path, model(0), config)
    assert_loads(path, model(0))
    second = save(path, model(7), config)
    assert_loads(path, model(7))
    return first, second


@pytest.mark.parametrize("config", [GATHER, TREE])
@pytest.mark.parametrize("num_ranks", [2, 3, 5, 8])
def test_the_second_save_of_one_structure_sends_digests(num_ranks: int, config: Config, tmp_path: Path) -> None:
    for first, second in run_ranks(num_ranks, save_twice, str(tmp_path), config):
        assert (first.cache, second.cache) == ("miss", "hit")
        assert first.bytes_sent > 100
        # A digest of what the rank holds, the plan that it knows for it, and a hash of what all ranks have copies of.
        assert second.bytes_sent == 16 + 20 + 12
        assert second.bytes_received == 16


def test_a_tree_is_taken_above_the_threshold_alone(tmp_path: Path) -> None:
    sent = {}
    for threshold in (2, 3):
        config = Config(tree_topo_threshold=threshold)
        sent[threshold] = run_ranks(3, tree_bytes, str(tmp_path), config)
    assert sent[3] == [0, 0, 0]
    assert all(sent[2])


def tree_bytes(path: str, config: Config) -> int:
    """Saves once, and returns how many bytes this rank sent over a channel."""
    counted = []
    exchange = _plan_tree.PlanTree.exchange

    def count(tree: Any, *args: Any) -> Any:
        answer = exchange(tree, *args)
        counted.append(tree._channel.bytes_sent)
        return answer

    _plan_tree.PlanTree.exchange = count  # type: ignore[method-assign]
    save(path, model(), config)
    return sum(counted)


def test_a_tree_can_be_turned_off(tmp_path: Path) -> None:
    assert run_ranks(3, tree_bytes, str(tmp_path), Config(tree_topo_threshold=1, enable_tree_topo=False)) == [0, 0, 0]


# Each kind of change is on one rank alone or on all of them.


def on_rank_1(change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    state = model(1)
    if dist.get_rank() == 1:
        change(state["nested"])
    return state


def changed(kind: str) -> dict[str, Any]:
    if kind == "name":
        return on_rank_1(lambda own: own.update({"new name": own.pop("of rank 1")}))
    if kind == "shape":
        return on_rank_1(lambda own: own.update({"of rank 1": numbers(4, 2)}))
    if kind == "dtype":
        return on_rank_1(lambda own: own.update({"of rank 1": numbers(3).to(torch.float64)}))
    if kind == "one more":
        return on_rank_1(lambda own: own.update({"more": torch.ones(5)}))
    if kind == "one less":
        return on_rank_1(lambda own: own.pop("of rank 1"))
    if kind == "an object":
        return on_rank_1(lambda own: own.update({"of rank 1": "an object"}))
    assert kind == "placement"
    return model(1, Shard(1))


def save_changed(path: str, kind: str, config: Config) -> list[str]:
    reports = [save(path, model(0), config)]
    reports.append(save(path, changed(kind), config))
    assert_loads(path, changed(kind))
    reports.append(save(path, changed(kind), config))
    reports.append(save(path, model(3), config))
    assert_loads(path, model(3))
    return [report.cache for report in reports]


@pytest.mark.parametrize("config", [GATHER, TREE])
@pytest.mark.parametrize("kind", ["name", "shape", "dtype", "one more", "one less", "an object", "placement"])
def test_a_change_on_one_rank_is_a_miss_on_all(kind: str, config: Config, tmp_path: Path) -> None:
    for caches in run_ranks(3, save_changed, str(tmp_path), kind, config):
        assert caches == ["miss", "miss", "hit", "hit"]


def save_with_other_settings(path: str, config: Config) -> list[str]:
    caches = [save(path, model(0), config).cache]
    lowest = dist.get_rank() == 1  # only the coordinator's setting counts
    caches.append(save(path, model(1), config, dedup_save_to_lowest_rank=lowest).cache)
    assert_loads(path, model(1))
    caches.append(save(path, model(2), config, dedup_save_to_lowest_rank=True).cache)
    assert_loads(path, model(2))
    reader = BcpReader(path)
    chunks = reader.read_metadata().storage_data
    assert {info.relative_path for index, info in chunks.items() if index.fqn == "plain"} == {
        info.relative_path for index, info in chunks.items() if index.fqn == "nested.of rank 0"
    }, "the lowest rank writes all of it"
    caches.append(save(path, model(3), config).cache)
    assert_loads(path, model(3))
    return caches


@pytest.mark.parametrize("config", [GATHER, TREE])
def test_a_change_of_a_setting_is_a_miss(config: Config, tmp_path: Path) -> None:
    for caches in run_ranks(3, save_with_other_settings, str(tmp_path), config):
        assert caches == ["miss", "miss", "miss", "hit"]


def save_with_fewer_ranks(path: str, config: Config) -> list[str]:
    """Saves the same state, which every rank has whole, with 3 ranks and with 2 of them."""
    state = {"plain": numbers(300, 200), "step": 1}
    caches = [save(path, state, config).cache]
    pair = dist.new_group([1, 2])
    if dist.get_rank() > 0:
        planner = BcpSavePlanner(config=config)
        dcp.save(state, storage_writer=BcpWriter(path), planner=planner, process_group=pair)
        caches.append(planner.last_plan.cache)
    dist.barrier()
    assert_loads(path, state)
    caches.append(save(path, state, config).cache)
    assert_loads(path, state)
    return caches


@pytest.mark.parametrize("config", [GATHER, TREE])
def test_another_world_size_is_a_miss(config: Config, tmp_path: Path) -> None:
    caches = run_ranks(3, save_with_fewer_ranks, str(tmp_path), config)
    # Rank 1 coordinates the pair. From rank 0's planning it knows only its own plan.
    assert caches == [["miss", "hit"], ["miss", "miss", "hit"], ["miss", "miss", "hit"]]


def save_objects(path: str, config: Config) -> list[str]:
    caches = []
    for value in ("short", "long " * 100_000, b"bytes", tuple(range(1000)), None):
        state = {"text": value, "of all": numbers(3), f"of {dist.get_rank()}": str(value) * dist.get_rank()}
        caches.append(save(path, state, config).cache)
        assert_loads(path, state)
    return caches


def test_objects_of_another_length_need_no_other_plan(tmp_path: Path) -> None:
    for caches in run_ranks(2, save_objects, str(tmp_path), GATHER):
        assert caches == ["miss", "hit", "hit", "hit", "hit"]


def save_two_in_turn(path: str, config: Config) -> list[str]:
    caches = []
    for turn in range(3):
        for name, state in (("a", model(turn)), ("b", {"other": model(turn, Shard(1))})):
            caches.append(save(f"{path}/{name}", state, config).cache)
            assert_loads(f"{path}/{name}", state)
    return caches


@pytest.mark.parametrize("config", [GATHER, TREE])
def test_two_models_in_turn(config: Config, tmp_path: Path) -> None:
    for caches in run_ranks(3, save_two_in_turn, str(tmp_path), config):
        assert caches == ["miss", "miss", "hit", "hit", "hit", "hit"]


def save_what_the_coordinator_forgot(path: str, config: Config) -> list[PlanReport]:
    reports = [save(path, model(0), config)]
    if dist.get_rank() == 0:
        plan_cache().clear()
    reports.append(save(path, model(1), config))
    assert_loads(path, model(1))
    reports.append(save(path, model(2), config))
    assert_loads(path, model(2))
    return reports


@pytest.mark.parametrize("config", [GATHER, TREE])
def test_what_the_coordinator_has_forgotten_is_sent_again(config: Config, tmp_path: Path) -> None:
    for reports in run_ranks(3, save_what_the_coordinator_forgot, str(tmp_path), config):
        assert [report.cache for report in reports] == ["miss", "miss", "hit"]


def save_without_cache(path: str, config: Config) -> list[str]:
    caches = []
    for turn in range(2):
        caches.append(save(path, model(turn), config, enable_plan_caching=False).cache)
        assert_loads(path, model(turn))
    return caches


@pytest.mark.parametrize("config", [GATHER, TREE])
def test_a_cache_can_be_turned_off(config: Config, tmp_path: Path) -> None:
    assert run_ranks(3, save_without_cache, str(tmp_path), config) == [["off", "off"]] * 3


def save_beside_the_default_group(path: str) -> None:
    """Saves in a group whose rank numbers are not the global ones, with a coordinator other than rank 0."""
    group = dist.new_group([1, 2, 4, 5])
    if dist.get_rank() not in (1, 2, 4, 5):
        return
    rank = dist.get_rank(group)
    for begin in (0.0, 5.0):
        state = {"plain": numbers(300, 200, begin=begin), f"of {rank}": numbers(4, begin=begin)}
        metadata: Any = dcp.state_dict_saver._save_state_dict(
            state, BcpWriter(path), group, coordinator_rank=2, planner=BcpSavePlanner(config=TREE)
        )
        assert sorted(metadata.state_dict_metadata) == ["of 0", "of 1", "of 2", "of 3", "plain"]
        got = blank(state)
        dcp.load(got, storage_reader=BcpReader(path), process_group=group)
        assert_equal(got, state)


def test_a_tree_in_a_group_with_another_coordinator(tmp_path: Path) -> None:
    run_ranks(6, save_beside_the_default_group, str(tmp_path))


def save_as_another_rank(path: str, config: Config) -> list[str]:
    """Saves one plan with the same two processes: ranks 0 and 1 of one group, and ranks 1 and 0 of the other."""
    groups = [dist.new_group([0, 1], sort_ranks=False), dist.new_group([1, 0], sort_ranks=False)]
    assert [dist.get_rank(group) for group in groups] == [dist.get_rank(), 1 - dist.get_rank()]
    caches = []
    for turn in range(2):
        for group in groups:
            state = {"plain": numbers(300, 200, begin=turn), "step": turn}
            planner = BcpSavePlanner(config=config)
            dcp.save(state, storage_writer=BcpWriter(path), planner=planner, process_group=group)
            caches.append(planner.last_plan.cache)
            assert_loads(path, state)
    return caches


@pytest.mark.skipif(
    "sort_ranks" not in inspect.signature(dist.new_group).parameters, reason="this torch sorts the ranks of a group"
)
@pytest.mark.parametrize("config", [GATHER, TREE])
def test_a_process_may_be_another_rank_of_the_same_plan(config: Config, tmp_path: Path) -> None:
    # Each group has another coordinator.
    assert run_ranks(2, save_as_another_rank, str(tmp_path), config) == [["miss", "miss", "hit", "hit"]] * 2


class LooksAtItems(BcpWriter):
    """Looks at the items of its plan after the base class has prepared it."""

    def prepare_local_plan(self, plan: Any) -> Any:
        plan = super().prepare_local_plan(plan)
        assert sum(item.index.fqn == "plain" for item in plan.items) == 1
        return plan


def save_looked_at(path: str, config: Config) -> None:
    for turn in range(2):
        dcp.save(model(turn), storage_writer=LooksAtItems(path), planner=BcpSavePlanner(config=config))
        assert_loads(path, model(turn))


@pytest.mark.parametrize("config", [GATHER, TREE])
def test_a_writer_may_look_at_its_own_items(config: Config, tmp_path: Path) -> None:
    run_ranks(3, save_looked_at, str(tmp_path), config)


class AddsPlannerData(BcpWriter):
    def prepare_local_plan(self, plan: Any) -> Any:
        added = {f"of rank {dist.get_rank()}": dist.get_rank()}
        return dataclasses.replace(super().prepare_local_plan(plan), planner_data=added)


def save_with_planner_data(path: str, config: Config) -> None:
    for _ in range(2):
        dcp.save({"plain": numbers(3)}, storage_writer=AddsPlannerData(path), planner=BcpSavePlanner(config=config))
        assert dcp.FileSystemReader(path).read_metadata().planner_data == {"of rank 0": 0, "of rank 1": 1}
        dist.barrier()


@pytest.mark.parametrize("config", [GATHER, TREE])
def test_planner_data_that_a_writer_adds_are_kept(config: Config, tmp_path: Path) -> None:
    run_ranks(2, save_with_planner_data, str(tmp_path), config)


def look_at_metadata(path: str) -> None:
    metadata: Any = dcp.save(model(0), storage_writer=BcpWriter(path), planner=BcpSavePlanner(config=TREE))
    assert sorted(metadata.state_dict_metadata) == sorted(BcpReader(path).read_metadata().state_dict_metadata)
    read = BcpReader(path).read_metadata()
    assert read.storage_meta is not None
    read.storage_meta.load_id = None  # each load has its own
    assert metadata == read


def test_metadata_of_a_plan_that_was_exchanged(tmp_path: Path) -> None:
    run_ranks(3, look_at_metadata, str(tmp_path))


@pytest.mark.long
def test_sixty_four_ranks(tmp_path: Path) -> None:
    config = Config(tree_topo_threshold=63)
    reports = run_ranks(64, save_twice, str(tmp_path), config, limit_s=500)
    assert {first.cache for first, _ in reports} == {"miss"}
    assert {(second.cache, second.bytes_sent) for _, second in reports} == {("hit", 48)}
