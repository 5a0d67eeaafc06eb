# SPDX-License-Identifier: Apache-2.0
"""Tests BcpLoadPlanner: what it fills, what it refuses, and that it loads what DCP's own planner loads."""

from __future__ import annotations

import argparse
import io
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.equality import assert_equal, blank
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from unit.planned_states import state

from bytecheckpoint import BcpLoadPlanner, BcpReader, BcpWriter, Config, LoadSpec
from bytecheckpoint.errors import InvalidPlanError, KeyMismatchError, ShapeMismatchError
from bytecheckpoint.planning.plan_items import PlanItems, source_of

READERS = [BcpReader, dcp.FileSystemReader]


def tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (dict, list)):
        return [t for v in (value.values() if isinstance(value, dict) else value) for t in tensors_of(v)]
    return []


def load(into: dict[str, Any], reader: Any, planner: Any = None) -> None:
    dcp.load(into, storage_reader=reader, planner=planner or BcpLoadPlanner(), no_dist=True)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    dcp.save(state(), storage_writer=BcpWriter(tmp_path / "ck"), no_dist=True)
    return tmp_path / "ck"


@pytest.mark.parametrize("reader", READERS)
def test_it_fills_in_place(path: Path, reader: Any) -> None:
    got = blank(state())
    before = [tensor.data_ptr() for tensor in tensors_of(got)]
    versions = [tensor._version for tensor in tensors_of(got)]
    load(got, reader(path))
    assert_equal(got, state())
    assert [tensor.data_ptr() for tensor in tensors_of(got)] == before
    changed = [now._version > was for now, was in zip(tensors_of(got), versions, strict=True) if now.numel()]
    assert all(changed)


@pytest.mark.parametrize("reader", READERS)
def test_it_converts_and_scatters_where_memory_differs(path: Path, reader: Any) -> None:
    got = blank(state())
    got["model"]["w"] = torch.zeros(7, 5, dtype=torch.float64)
    got["model"]["t"] = torch.zeros(4, 12)[:, ::2]
    got["model"]["b"] = torch.zeros(5, dtype=torch.bfloat16)
    load(got, reader(path))
    wanted = state()["model"]
    assert torch.equal(got["model"]["w"], wanted["w"].double())
    assert torch.equal(got["model"]["t"], wanted["t"])
    assert torch.equal(got["model"]["b"], wanted["b"].bfloat16())


@pytest.mark.parametrize("flatten", [True, False])
def test_it_loads_what_the_stock_planner_loads(tmp_path: Path, flatten: bool) -> None:
    flat = {"w": torch.arange(6.0).reshape(2, 3), "n": 5, "nested": {"x": [1, 2]}}
    planner = dcp.DefaultSavePlanner(flatten_state_dict=flatten)
    dcp.save(flat, storage_writer=BcpWriter(tmp_path), planner=planner, no_dist=True)
    # If the state is not flattened, DCP's own planner loads objects to where nobody finds them.
    for make in (BcpLoadPlanner, DefaultLoadPlanner) if flatten else (BcpLoadPlanner,):
        got: dict[str, Any] = {"w": torch.zeros(2, 3), "n": 0, "nested": {"x": None}}
        load(got, BcpReader(tmp_path), make(flatten_state_dict=flatten))
        assert_equal(got, flat)


def test_tensors_on_meta_are_made(path: Path) -> None:
    got = blank(state())
    got["model"]["w"] = torch.empty(7, 5, device="meta")
    got["model"]["layers"][1]["deep"] = torch.empty(4, device="meta")
    load(got, BcpReader(path))
    assert_equal(got, state())


def test_tensors_on_meta_under_keys_of_any_kind(tmp_path: Path) -> None:
    def of(make: Any) -> dict[str, Any]:
        return {"opt": {"state": {0: {"m": make(3)}, 1: {"m": make(4)}}, "list": [make(2), {"x": make(1)}]}}

    dcp.save(of(torch.ones), storage_writer=BcpWriter(tmp_path), no_dist=True)
    got = of(lambda n: torch.empty(n, device="meta"))
    load(got, BcpReader(tmp_path))
    assert_equal(got, of(torch.ones))


def test_chunks_that_overlap_hide_nothing(path: Path) -> None:
    metadata = BcpReader(path).read_metadata()
    entry: Any = metadata.state_dict_metadata["model.w"]
    boxes = (((0, 0), (4, 5)), ((2, 0), (4, 5)), ((6, 0), (1, 5)))
    entry.chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]
    planner = BcpLoadPlanner()
    planner.set_up_planner({"model": {"w": torch.zeros(7, 5)}}, metadata, True)
    items = planner.create_local_plan().items
    assert sorted(item.storage_index.offset for item in items) == [offsets for offsets, _ in boxes]


class LooksAtPlans(BcpReader):
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        self.seen = [item.dest_index.fqn for plan in plans for item in plan.items]
        return super().prepare_global_plan(plans)


def test_a_reader_that_looks_at_plans_gets_them(path: Path) -> None:
    reader = LooksAtPlans(path)
    planner = BcpLoadPlanner()
    planner.set_up_planner(blank(state()), reader.read_metadata(), True)
    there = pickle.loads(pickle.dumps(reader.prepare_local_plan(planner.create_local_plan())))
    reader.prepare_global_plan([there])
    assert "model.w" in reader.seen


@pytest.mark.parametrize("reader", READERS)
def test_all_keys_that_do_not_match_are_named_at_once(path: Path, reader: Any) -> None:
    got = {"model": {"w": torch.zeros(7, 5), "nope": torch.zeros(1), "also": 3}}
    with pytest.raises(CheckpointException) as caught:
        load(got, reader(path))
    error = caught.value.failures[0][0]
    assert isinstance(error, KeyMismatchError)
    text = str(error)
    for name in ("'model.nope'", "'model.also'", "'model.b'", "'epoch'", "allow_partial_load"):
        assert name in text
    assert "'model.w'" not in text
    assert not got["model"]["w"].any()  # type: ignore[union-attr]
    load(got, reader(path), BcpLoadPlanner(allow_partial_load=True))
    assert torch.equal(got["model"]["w"], state()["model"]["w"])  # type: ignore[arg-type]
    assert got["model"]["also"] == 3


def test_all_shapes_that_do_not_match_are_named_at_once(path: Path) -> None:
    got = blank(state())
    got["model"]["w"] = torch.zeros(7, 6)
    got["model"]["b"] = torch.zeros(4)
    with pytest.raises(CheckpointException) as caught:
        load(got, BcpReader(path))
    error = caught.value.failures[0][0]
    assert isinstance(error, ShapeMismatchError)
    for part in ("'model.w'", "[7, 5]", "[7, 6]", "'model.b'", "[4]"):
        assert part in str(error)


def test_keys_and_shapes_that_do_not_match_are_in_one_error(path: Path) -> None:
    got = {"model": {"w": torch.zeros(7, 6), "nope": torch.zeros(1)}}
    with pytest.raises(CheckpointException) as caught:
        load(got, BcpReader(path))
    error = caught.value.failures[0][0]
    assert isinstance(error, KeyMismatchError)
    for part in ("'model.nope'", "not asked for: 'epoch'", "'model.w': stored is a tensor of [7, 5]", "[7, 6]"):
        assert part in str(error), str(error)
    with pytest.raises(CheckpointException) as caught:
        load(got, BcpReader(path), BcpLoadPlanner(allow_partial_load=True))
    assert isinstance(caught.value.failures[0][0], ShapeMismatchError)


@pytest.mark.parametrize(
    ("nope", "strict", "kind"),
    [
        ({"nope": torch.zeros(1)}, True, KeyMismatchError),
        ({}, True, ShapeMismatchError),
        ({}, False, ShapeMismatchError),
    ],
)
def test_refused_dtypes_are_in_the_error_of_keys_and_shapes(
    path: Path, nope: dict[str, Any], strict: bool, kind: type[Exception]
) -> None:
    got = {"model": {"w": torch.zeros(7, 6), "b": torch.zeros(5, dtype=torch.int8), **nope}}
    with pytest.raises(CheckpointException) as caught:
        load(got, BcpReader(path), BcpLoadPlanner(spec=LoadSpec(cast="widen", strict=strict)))
    error = caught.value.failures[0][0]
    assert type(error) is kind
    for part, is_named in (
        ("'model.nope'", bool(nope)),
        ("not asked for: 'epoch'", strict),
        ("'model.w': stored is a tensor of [7, 5]", True),
        ("'model.b' is float32, to be loaded into int8", True),
    ):
        assert (part in str(error)) == is_named, str(error)
    assert not got["model"]["b"].any()


@pytest.mark.parametrize("planner", [BcpLoadPlanner, DefaultLoadPlanner])
def test_what_does_not_match_is_told_in_the_words_of_dcps_planner(path: Path, planner: Any) -> None:
    """Callers and their tests look for these words."""
    with pytest.raises(CheckpointException, match=r"Missing key in checkpoint state_dict: model\.nope\."):
        load({"model": {"nope": torch.zeros(1)}}, BcpReader(path), planner())
    sentence = "Size mismatch between saved torch.Size([7, 5]) and current: torch.Size([7, 6]) for model.w"
    with pytest.raises(CheckpointException, match=re.escape(sentence)):
        load({"model": {"w": torch.zeros(7, 6)}}, BcpReader(path), planner())


def test_a_tensor_into_something_else_is_refused(path: Path) -> None:
    got = blank(state())
    got["model"]["w"] = 5
    with pytest.raises(CheckpointException) as caught:
        load(got, BcpReader(path))
    assert "'model.w'" in str(caught.value.failures[0][0])
    assert "int" in str(caught.value.failures[0][0])


def test_complex_numbers_into_real_ones_are_refused(tmp_path: Path) -> None:
    dcp.save({"c": torch.ones(3, dtype=torch.complex64)}, storage_writer=BcpWriter(tmp_path), no_dist=True)
    with pytest.raises(CheckpointException) as caught:
        load({"c": torch.zeros(3)}, BcpReader(tmp_path))
    assert "imaginary" in str(caught.value.failures[0][0])


@pytest.mark.parametrize("target", [torch.ones(3).to_sparse(), torch.ones(3).to_mkldnn(), torch.ones(1).expand(3)])
def test_a_tensor_that_cannot_be_copied_to_is_named(tmp_path: Path, target: torch.Tensor) -> None:
    dcp.save({"a": torch.ones(3), "w": torch.ones(3)}, storage_writer=BcpWriter(tmp_path), no_dist=True)
    with pytest.raises(CheckpointException) as caught:
        load({"a": torch.zeros(3), "w": target}, BcpReader(tmp_path))
    assert "'w': what is stored cannot be copied: " in str(caught.value.failures[0][0])


def test_a_box_that_no_chunk_covers_is_refused(path: Path) -> None:
    metadata = BcpReader(path).read_metadata()
    metadata.state_dict_metadata["model.w"].chunks.clear()  # type: ignore[union-attr]
    planner = BcpLoadPlanner()
    planner.set_up_planner({"model": {"w": torch.zeros(7, 5)}}, metadata, True)
    with pytest.raises(InvalidPlanError, match=r"'model\.w': rows 0 to 6 of 7 are in no stored chunk"):
        planner.create_local_plan()


def test_items_are_built_only_if_somebody_looks(path: Path) -> None:
    reader = BcpReader(path)
    planner = BcpLoadPlanner()
    planner.set_up_planner(blank(state()), reader.read_metadata(), True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    assert source_of(plan.items) is not None
    assert len(plan.items) == 12
    kept_at = pickle.loads(pickle.dumps(plan))
    assert kept_at.items is plan.items
    assert len(pickle.dumps(plan)) < 1000
    assert {item.dest_index.fqn for item in plan.items} >= {"model.w", "epoch"}
    assert source_of(plan.items) is None
    assert isinstance(pickle.loads(pickle.dumps(plan)).items, list)


def test_items_are_those_of_the_stock_planner(path: Path) -> None:
    items = []
    for planner in (BcpLoadPlanner(), DefaultLoadPlanner()):
        planner.set_up_planner(blank(state()), BcpReader(path).read_metadata(), True)
        items.append(sorted(planner.create_local_plan().items, key=lambda item: item.dest_index.fqn))
    assert items[0] == items[1]
    assert all(type(item) is ReadItem for item in items[0])


class Halves(BcpLoadPlanner):
    """Overrides one hook that is called per tensor."""

    def transform_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> torch.Tensor:
        self.seen = [*getattr(self, "seen", []), read_item.dest_index.fqn]
        return super().transform_tensor(read_item, tensor)  # type: ignore[no-any-return]


class Objects(BcpLoadPlanner):
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        super().load_bytes(read_item, value)
        self.seen = [*getattr(self, "seen", []), read_item.dest_index.fqn]


class Fewer(BcpLoadPlanner):
    """Changes its own plan."""

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        return LoadPlan([item for item in plan.items if item.dest_index.fqn != "model.w"])


def test_hooks_of_subclasses_are_called(path: Path) -> None:
    halves, objects = Halves(), Objects()
    for planner in (halves, objects):
        got = blank(state())
        load(got, BcpReader(path), planner)
        assert_equal(got, state())
    assert "model.w" in halves.seen
    assert "epoch" in objects.seen
    instance = BcpLoadPlanner()
    seen = []
    instance.commit_tensor = lambda item, tensor: seen.append(item.dest_index.fqn)  # type: ignore[method-assign]
    got = blank(state())
    load(got, BcpReader(path), instance)
    assert_equal(got, state())
    assert "model.w" in seen
    got = blank(state())
    load(got, BcpReader(path), Fewer())
    assert not got["model"]["w"].any()
    assert torch.equal(got["model"]["b"], state()["model"]["b"])


class Swaps(BcpLoadPlanner):
    """Puts another tensor into the state dict after the plan was made."""

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        self.swapped = self.state_dict["model.w"] = torch.zeros(7, 5)
        return super().finish_plan(new_plan)  # type: ignore[no-any-return]


def test_the_state_dict_of_the_planner_is_the_truth(path: Path) -> None:
    planner = Swaps()
    got = blank(state())
    load(got, BcpReader(path), planner)
    assert torch.equal(planner.swapped, state()["model"]["w"])
    assert not got["model"]["w"].any()


def test_objects_that_are_not_plain_data(tmp_path: Path) -> None:
    unsafe = {"o": argparse.Namespace(a=1), "w": torch.ones(2)}
    dcp.save(unsafe, storage_writer=BcpWriter(tmp_path), no_dist=True)
    got: dict[str, Any] = {"o": None, "w": torch.zeros(2)}
    with pytest.raises(CheckpointException) as caught:
        load(got, BcpReader(tmp_path))
    assert "argparse.Namespace" in str(caught.value.failures[0][0])
    load(got, BcpReader(tmp_path, config=Config(allow_pickle=True)))
    assert got["o"] == unsafe["o"]


def test_names_of_older_versions_are_found(tmp_path: Path) -> None:
    from torch.distributed.checkpoint import _version

    lists = {"groups": [{"lr": 0.5, "n": [1, 2]}]}
    _version._derived_version = "2_3"
    try:
        dcp.save(lists, storage_writer=BcpWriter(tmp_path), no_dist=True)
    finally:
        _version._derived_version = None
    names = set(BcpReader(tmp_path).read_metadata().state_dict_metadata)
    got: dict[str, Any] = {"groups": [{"lr": 0.0, "n": [0, 0]}]}
    load(got, BcpReader(tmp_path))
    assert got == lists, names


def test_duplicated_names_and_loops_are_refused(path: Path) -> None:
    reader = BcpReader(path)
    planner = BcpLoadPlanner()
    with pytest.raises(ValueError, match=r"duplicated flatten key a\.b"):
        planner.set_up_planner({"a": {"b": 1}, "a.b": 2}, reader.read_metadata(), True)
    loop: dict[str, Any] = {}
    loop["self"] = loop
    with pytest.raises(RecursionError):
        planner.set_up_planner(loop, reader.read_metadata(), True)


def test_plan_items_are_a_list_to_whoever_changes_them() -> None:
    class Source:
        num_items = 3

        def items(self) -> list[int]:
            return [1, 2, 3]

    items: PlanItems[int] = PlanItems(Source())
    assert len(items) == 3
    assert source_of(items) is not None
    assert items + [4] == [1, 2, 3, 4]  # noqa: RUF005  # as a list would do it
    assert [0] + items == [0, 1, 2, 3]  # noqa: RUF005
    assert source_of(items) is None
    items.append(9)
    del items[0]
    items[0] = 7
    assert items == [7, 3, 9]
    assert items[1:] == [3, 9]
    assert repr(items) == "[7, 3, 9]"
