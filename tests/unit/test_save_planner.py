# SPDX-License-Identifier: Apache-2.0
"""Tests BcpSavePlanner in one process: it writes what DCP's planner writes, and its plans look like DCP's."""

from __future__ import annotations

import collections
import dataclasses
import io
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.equality import assert_equal, blank, without_strides
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from unit.planned_states import more, state

from bytecheckpoint import BcpLoadPlanner, BcpReader, BcpSavePlanner, BcpWriter
from bytecheckpoint.dcp.save_planner import WritePart
from bytecheckpoint.errors import InvalidPlanError
from bytecheckpoint.planning.plan_items import source_of
from bytecheckpoint.tensors.chunks import LocalChunks

WRITERS = [BcpWriter, dcp.FileSystemWriter]


def save(value: dict[str, Any], writer: Any, planner: Any = None) -> Metadata:
    metadata: Metadata = dcp.save(value, storage_writer=writer, planner=planner or BcpSavePlanner(), no_dist=True)
    return metadata


def save_in_background(value: dict[str, Any], writer: Any) -> None:
    dcp.async_save(value, storage_writer=writer, planner=BcpSavePlanner(), no_dist=True).result()  # type: ignore[union-attr]


@pytest.mark.parametrize("writer", WRITERS)
def test_it_saves_what_the_stock_planner_saves(tmp_path: Path, writer: Any) -> None:
    value = more()
    metadata = [
        save(value, writer(tmp_path / name), planner)
        for name, planner in (("ours", BcpSavePlanner()), ("theirs", DefaultSavePlanner()))
    ]
    assert metadata[0].planner_data == metadata[1].planner_data
    ours, theirs = without_strides(metadata)
    assert list(ours.state_dict_metadata.items()) == list(theirs.state_dict_metadata.items())
    # Read from the disk, because the metadata that dcp.save of torch 2.10 returns does not have them.
    places: list[Any] = [
        dcp.FileSystemReader(tmp_path / name).read_metadata().storage_data for name in ("ours", "theirs")
    ]
    assert places[0].keys() == places[1].keys()
    loaded = []
    for name in ("ours", "theirs"):
        for reader in (BcpReader(tmp_path / name), dcp.FileSystemReader(tmp_path / name)):
            got = blank(value)
            dcp.load(got, storage_reader=reader, no_dist=True)
            loaded.append(got)
    for got in loaded:
        assert_equal(got, value)


@pytest.mark.parametrize("flatten", [True, False])
def test_plans_are_those_of_the_stock_planner(flatten: bool) -> None:
    plans = []
    for planner in (BcpSavePlanner(flatten_state_dict=flatten), DefaultSavePlanner(flatten_state_dict=flatten)):
        planner.set_up_planner(more(), None, True)
        plans.append(planner.create_local_plan())
    assert source_of(plans[0].items) is not None
    assert len(plans[0].items) == len(plans[1].items)
    assert without_strides([*plans[0].items]) == without_strides([*plans[1].items])
    assert source_of(plans[0].items) is None
    assert (plans[0].planner_data or {}).items() == (plans[1].planner_data or {}).items()


def test_global_plans_are_those_of_the_stock_planner() -> None:
    results = []
    for planner in (BcpSavePlanner(), DefaultSavePlanner()):
        planner.set_up_planner(more(), None, True)
        results.append(planner.create_global_plan([planner.create_local_plan()]))
    (ours,), metadata = results[0]
    (theirs,), wanted = results[1]
    assert len(ours.items) == len(theirs.items)
    assert without_strides([*ours.items]) == without_strides(
        [*theirs.items]
    )  # hints of chunk positions are not compared
    assert metadata == without_strides(wanted)
    assert metadata.planner_data == wanted.planner_data


def test_little_travels() -> None:
    planner = BcpSavePlanner()
    value = {"model": {f"layers.{i}.weight": torch.zeros(4, 4) for i in range(1000)}}
    planner.set_up_planner(value, None, True)
    plan = planner.create_local_plan()
    there = pickle.loads(pickle.dumps(plan))
    assert len(pickle.dumps(plan)) < 60_000
    (told,), metadata = planner.create_global_plan([there])
    assert len(pickle.dumps(told)) < 10_000
    back = planner.finish_plan(pickle.loads(pickle.dumps(told)))
    assert len(back.items) == 1000
    assert len(metadata.state_dict_metadata) == 1000
    assert {type(item) for item in back.items} == {WriteItem}
    assert [item.index.fqn for item in back.items] == [f"model.{key}" for key in value["model"]]


def plans_of(num_ranks: int, value: dict[str, Any]) -> list[BcpSavePlanner]:
    planners = [BcpSavePlanner() for _ in range(num_ranks)]
    for rank, planner in enumerate(planners):
        planner.set_up_planner(value, None, rank == 0)
    return planners


def test_a_plain_tensor_that_several_ranks_hold_is_written_whole_by_one_of_them() -> None:
    planners = plans_of(2, {f"t{i}": torch.zeros(1000, 1000) for i in range(4)})
    told, metadata = planners[0].create_global_plan([planner.create_local_plan() for planner in planners])
    assert [len(tensor.chunks) for tensor in metadata.state_dict_metadata.values()] == [1] * 4  # type: ignore[union-attr]
    assert [len(plan.items) for plan in told] == [2, 2]


def test_shards_that_several_ranks_hold_are_split_between_them() -> None:
    whole = torch.arange(400_000.0).reshape(400, 1000)
    value = {"w": LocalChunks((400, 1000), [(0, 0)], [whole], torch.float32), "b": torch.ones(3), "n": 7}
    planners = plans_of(4, value)
    plans = [pickle.loads(pickle.dumps(planner.create_local_plan())) for planner in planners]
    told, metadata = planners[0].create_global_plan(plans)
    chunks = metadata.state_dict_metadata["w"].chunks  # type: ignore[union-attr]
    assert sum(chunk.sizes[0] for chunk in chunks) == 400
    assert len(chunks) == 4
    rows: list[torch.Tensor] = []
    num_bytes = []
    for planner, plan in zip(planners, told, strict=True):
        items = list(planner.finish_plan(pickle.loads(pickle.dumps(plan))).items)
        parts = [item for item in items if item.index.fqn == "w"]
        assert [type(item) for item in parts] == [WritePart]
        assert parts[0].type == WriteItemType.SHARD
        part: Any = planner.resolve_data(parts[0])
        assert part.shape == parts[0].tensor_data.chunk.sizes
        rows.append(part)
        # tensor_storage_size() would return the size of the whole tensor.
        chunks_of_rank = [item.tensor_data.chunk for item in items if item.tensor_data is not None]
        num_bytes.append(sum(chunk.sizes.numel() for chunk in chunks_of_rank) * 4)
    assert torch.equal(torch.cat(rows), whole)
    assert max(num_bytes) / (sum(num_bytes) / 4) < 1.02


class OwnResolve(BcpSavePlanner):
    """Knows nothing of parts."""

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        value: torch.Tensor = self.state_dict[write_item.index.fqn]
        return value


def test_boxes_are_not_split_for_who_resolves_data_himself() -> None:
    planners = [OwnResolve() for _ in range(2)]
    value = {"w": torch.arange(200_000.0).reshape(200, 1000)}
    for planner in planners:
        planner.set_up_planner(value, None, True)
    told, _ = planners[0].create_global_plan([planner.create_local_plan() for planner in planners])
    assert [len(plan.items) for plan in told] == [1, 0]
    assert planners[0].resolve_data(told[0].items[0]) is value["w"]


def test_the_lowest_rank_writes_all_if_asked() -> None:
    planners = plans_of(3, {"w": torch.zeros(400, 1000), "n": 7})
    planners[0].dedup_save_to_lowest_rank = True
    told, _ = planners[0].create_global_plan([planner.create_local_plan() for planner in planners])
    assert [len(plan.items) for plan in told] == [2, 0, 0]


def test_ranks_that_disagree_are_named() -> None:
    planners = plans_of(2, {"w": torch.zeros(4)})
    planners[1].state_dict = {"w": torch.zeros(5)}
    with pytest.raises(InvalidPlanError, match=r"'w'.*rank 0.*\[4\].*rank 1.*\[5\]"):
        planners[0].create_global_plan([planner.create_local_plan() for planner in planners])


@pytest.mark.parametrize("writer", WRITERS)
def test_what_cannot_be_stored_is_named(tmp_path: Path, writer: Any) -> None:
    with pytest.raises(CheckpointException) as caught:
        save({"s": torch.eye(3).to_sparse()}, writer(tmp_path))
    assert "'s'" in str(caught.value.failures[0][0])
    assert "sparse" in str(caught.value.failures[0][0])


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.eye(3).to_sparse_csr(), "Sparse CSR"),
        (lambda: torch.eye(3).to_mkldnn(), "OpaqueTensorImpl"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "NestedTensorImpl"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "'NestedIntNode'"),
    ],
)
def test_what_torch_cannot_describe_is_named(tmp_path: Path, make: Callable[[], torch.Tensor], reason: str) -> None:
    """The errors of torch do not say which of the tensors it is."""
    for begin in (save, save_in_background):
        with pytest.raises(CheckpointException) as caught:
            begin({"a": torch.ones(2), "odd": make()}, BcpWriter(tmp_path))
        error = caught.value.failures[0][0]
        assert isinstance(error, InvalidPlanError)
        # Older versions of torch can describe some of them, to no avail.
        unread = f"shape and shards of a (Nested)?Tensor cannot be read: .*{reason}"
        said = f"'odd': ({unread}|a tensor of .*, torch.sparse_csr cannot be stored)"
        assert re.match(said, str(error))
        assert "\n" not in str(error)


class Fewer(BcpSavePlanner):
    """Changes its own plan."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        return dataclasses.replace(plan, items=[item for item in plan.items if item.index.fqn != "model.w"])


class Objects(BcpSavePlanner):
    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        if write_item.index.fqn == "epoch":
            object = 99
        return super().transform_object(write_item, object)


class Swaps(BcpSavePlanner):
    """Puts another tensor into the state dict after the plan was made."""

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        self.state_dict["model.w"] = torch.full((7, 5), 2.0)
        return super().finish_plan(new_plan)


@pytest.mark.parametrize("writer", WRITERS)
def test_subclasses_are_asked(tmp_path: Path, writer: Any) -> None:
    save(state(), writer(tmp_path / "a"), Fewer())
    assert "model.w" not in BcpReader(tmp_path / "a").read_metadata().state_dict_metadata
    save(state(), writer(tmp_path / "b"), Objects())
    got = blank(state())
    dcp.load(got, storage_reader=BcpReader(tmp_path / "b"), planner=BcpLoadPlanner(), no_dist=True)
    assert got["epoch"] == 99
    save(state(), writer(tmp_path / "c"), Swaps())
    dcp.load(got, storage_reader=BcpReader(tmp_path / "c"), planner=BcpLoadPlanner(), no_dist=True)
    assert torch.equal(got["model"]["w"], torch.full((7, 5), 2.0))


def test_a_hook_of_an_instance_is_called(tmp_path: Path) -> None:
    planner = BcpSavePlanner()
    resolve = planner.resolve_data
    seen = []

    def noted(item: WriteItem) -> torch.Tensor | io.BytesIO:
        seen.append(item.index.fqn)
        return resolve(item)

    planner.resolve_data = noted  # type: ignore[method-assign]
    save(state(), BcpWriter(tmp_path), planner)
    assert "model.w" in seen
    assert "epoch" in seen


class AddsData(BcpSavePlanner):
    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        return dataclasses.replace(plan, planner_data={**plan.planner_data, "extra": ("mine",)})


def test_planner_data_that_a_subclass_has_added_to() -> None:
    planner = AddsData()
    planner.set_up_planner(state(), None, True)
    _, metadata = planner.create_global_plan([planner.create_local_plan()])
    assert metadata.planner_data == {**planner.mappings, "extra": ("mine",)}


def test_plans_that_were_looked_at_go_the_way_of_dcp() -> None:
    value = {"model": {f"layers.{i}.weight": torch.zeros(4, 4) for i in range(5000)}}
    planners = plans_of(2, value)
    plans = [planner.create_local_plan() for planner in planners]
    assert len(list(plans[0].items)) == 5000
    plans = [pickle.loads(pickle.dumps(plan)) for plan in plans]
    told, metadata = planners[0].create_global_plan(plans)
    assert sum(len(plan.items) for plan in told) == 5000
    assert metadata.planner_data == planners[0].mappings


def test_a_state_dict_of_another_class(tmp_path: Path) -> None:
    class Flat(BcpSavePlanner):
        def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
            super().set_up_planner(*args, **kwargs)
            self.state_dict = collections.UserDict(self.state_dict)

    save(state(), BcpWriter(tmp_path), Flat())
    got = blank(state())
    dcp.load(got, storage_reader=BcpReader(tmp_path), planner=BcpLoadPlanner(), no_dist=True)
    assert_equal(got, state())


def test_names_that_are_no_text_are_refused() -> None:
    planner = BcpSavePlanner()
    planner.set_up_planner({"a": {"\udc80": torch.ones(1)}}, None, True)
    with pytest.raises(InvalidPlanError, match=r"is not UTF-8 text: 'a\.\\udc80'"):
        planner.create_local_plan()


def test_ways_that_are_lists() -> None:
    planner = BcpSavePlanner()
    planner.set_up_planner(state(), None, True)
    planner.mappings = {fqn: list(way) for fqn, way in planner.mappings.items()}  # type: ignore[misc]
    _, metadata = planner.create_global_plan([planner.create_local_plan()])
    assert [*metadata.planner_data["model.w"]] == ["model", "w"]
