# SPDX-License-Identifier: Apache-2.0
"""Tests planners whose hooks return the same memory for every item: each item is used before the next is resolved."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.equality import assert_equal
from support.reusing_planners import LOAD_HOOKS, SAVE_HOOKS, reusing
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from bytecheckpoint import BcpLoadPlanner, BcpReader, BcpSavePlanner, BcpWriter, Config, verify
from bytecheckpoint.dcp import rank_load

SAVE_BASES = [DefaultSavePlanner, BcpSavePlanner]
LOAD_BASES = [DefaultLoadPlanner, BcpLoadPlanner]
READERS = [dcp.FileSystemReader, BcpReader]
WRITERS = [dcp.FileSystemWriter, BcpWriter]


def state() -> dict[str, Any]:
    return {
        "model": {f"w{n}": torch.full((5, 7), 10.0 * n) for n in range(1, 5)},
        "half": torch.arange(12).bfloat16().reshape(3, 4),
        "turned": torch.arange(12).reshape(3, 4).t(),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "bools": torch.tensor([True, False, True]),
        "words": ["a", 1],
        "more": ["b", 2, 3],
    }


def blank(dtype: torch.dtype | None = None) -> dict[str, Any]:
    def cleared(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: cleared(part) for key, part in value.items()}
        if isinstance(value, torch.Tensor):
            return torch.zeros_like(value, dtype=dtype or value.dtype)
        return []

    cleared_state: dict[str, Any] = cleared(state())
    return cleared_state


def quantized(value: int) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.full((6,), float(value)), 0.5, 3, torch.qint8)


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("base", SAVE_BASES)
@pytest.mark.parametrize("hook", SAVE_HOOKS)
def test_every_item_is_written_before_the_next_is_resolved(tmp_path: Path, hook: str, base: Any, writer: Any) -> None:
    saved = {**state(), "q1": quantized(1), "q2": quantized(2)}
    dcp.save(saved, storage_writer=writer(tmp_path), planner=reusing(hook, base), no_dist=True)
    got = {**blank(), "q1": quantized(0), "q2": quantized(0)}
    dcp.load(got, storage_reader=dcp.FileSystemReader(tmp_path), planner=DefaultLoadPlanner(), no_dist=True)
    for name, value in (("q1", 1), ("q2", 2)):
        assert torch.equal(got.pop(name).int_repr(), quantized(value).int_repr())
    assert_equal(got, state())
    assert writer is not BcpWriter or verify(tmp_path).is_whole


@pytest.mark.parametrize("copy_bytes", [1, 150, 1 << 20])
@pytest.mark.parametrize("dtype", [None, torch.float64])
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("base", LOAD_BASES)
@pytest.mark.parametrize("hook", LOAD_HOOKS)
def test_every_item_is_committed_before_the_next_is_resolved(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    hook: str,
    base: Any,
    reader: Any,
    dtype: torch.dtype | None,
    copy_bytes: int,
) -> None:
    monkeypatch.setattr(rank_load, "_COPY_BYTES", copy_bytes)
    dcp.save(state(), storage_writer=BcpWriter(tmp_path), no_dist=True)
    got, planner = blank(dtype), reusing(hook, base)
    dcp.load(got, storage_reader=reader(tmp_path), planner=planner, no_dist=True)
    wanted = blank(dtype)
    dcp.load(wanted, storage_reader=dcp.FileSystemReader(tmp_path), planner=DefaultLoadPlanner(), no_dist=True)
    assert_equal(got, wanted)
    names = [name for name, *_ in planner.calls]
    assert names.count("load_bytes") == 2
    assert "resolve_bytes" not in names
    tensors = [call for call in planner.calls if call[0] != "load_bytes"]
    assert {name for name, *_ in tensors[0::2]} == {"resolve_tensor"}
    assert [item for _, *item in tensors[0::2]] == [item for name, *item in tensors[1::2] if name == "commit_tensor"]
    assert len({str(item) for _, *item in tensors}) == len(tensors) // 2


class Gathered(torch.Tensor):
    """A tensor that gives DCP its elements in memory that all tensors of this class share."""

    _memory = torch.zeros(6)

    @classmethod
    def of(cls, value: float) -> Gathered:
        made: Gathered = torch.full((6,), value).as_subclass(cls)  # type: ignore[arg-type]
        return made

    def __create_write_items__(self, fqn: str, value: Any) -> list[WriteItem]:
        chunk = ChunkStorageMetadata(torch.Size([0]), self.shape)
        data = TensorWriteData(chunk, dcp.metadata.TensorProperties(dtype=self.dtype), self.shape)
        return [WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size([0]), self.shape)]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return self._memory.copy_(self.as_subclass(torch.Tensor))  # type: ignore[arg-type]


@pytest.mark.parametrize("base", SAVE_BASES)
@pytest.mark.parametrize("writer", WRITERS)
def test_values_that_reuse_memory_are_written_one_by_one(tmp_path: Path, base: Any, writer: Any) -> None:
    saved = {str(n): Gathered.of(n) if n % 2 else torch.full((6,), float(n)) for n in range(6)}
    dcp.save(saved, storage_writer=writer(tmp_path), planner=base(), no_dist=True)
    got = {str(n): torch.zeros(6) for n in range(6)}
    dcp.load(got, storage_reader=dcp.FileSystemReader(tmp_path), no_dist=True)
    assert_equal(got, {str(n): torch.full((6,), float(n)) for n in range(6)})


class OneMemory(dict[str, Any]):
    """Returns every value in the same memory."""

    memory = torch.zeros(4)

    def __getitem__(self, key: str) -> Any:
        return self.memory.copy_(super().__getitem__(key))


@pytest.mark.parametrize("base", SAVE_BASES)
def test_a_state_that_reuses_memory_is_written_item_by_item(tmp_path: Path, base: Any) -> None:
    wanted = {str(n): torch.full((4,), float(n)) for n in range(4)}
    planner = base(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.save(OneMemory(wanted), storage_writer=BcpWriter(tmp_path), planner=planner, no_dist=True)
    got = {str(n): torch.zeros(4) for n in range(4)}
    dcp.load(got, storage_reader=BcpReader(tmp_path), no_dist=True)
    assert_equal(got, wanted)


@pytest.mark.parametrize("base", SAVE_BASES)
def test_no_more_than_one_tensor_that_a_planner_makes_is_alive(tmp_path: Path, base: Any) -> None:
    made: list[weakref.ref[torch.Tensor]] = []

    class Casting(base):  # type: ignore[misc]
        def transform_object(self, write_item: WriteItem, object: Any) -> Any:
            assert not any(tensor() is not None for tensor in made)
            new = object.double()
            made.append(weakref.ref(new))
            return new

    dcp.save(state()["model"], storage_writer=BcpWriter(tmp_path), planner=Casting(), no_dist=True)
    assert len(made) == 4


@pytest.mark.parametrize("base", LOAD_BASES)
def test_what_a_planner_leaves_on_meta_is_refused_by_name(tmp_path: Path, base: Any) -> None:
    class Leaving(base):  # type: ignore[misc]
        def set_up_planner(
            self, state_dict: dict[str, Any], metadata: Any = None, is_coordinator: bool = False
        ) -> None:
            super().set_up_planner({"w1": state_dict["w1"]}, metadata, is_coordinator)
            self.state_dict = state_dict

    class Resolving(base):  # type: ignore[misc]
        def resolve_tensor(self, read_item: Any) -> torch.Tensor:
            return super().resolve_tensor(read_item).to("meta")  # type: ignore[no-any-return]

    dcp.save(state()["model"], storage_writer=BcpWriter(tmp_path), no_dist=True)
    whole = torch.zeros(5, 7)
    meta = {"w1": whole, "w2": whole.to("meta"), "w3": whole.to("meta")}
    for planner, wanted, into in ((Leaving(), "'w2', 'w3'", meta), (Resolving(), "'w1'", {"w1": torch.zeros(5, 7)})):
        with pytest.raises(dcp.CheckpointException, match=f"on the meta device.*: {wanted};"):
            dcp.load(into, storage_reader=BcpReader(tmp_path), planner=planner, no_dist=True)
    assert not whole.any()


def test_what_a_planner_resolves_to_another_shape_is_refused(tmp_path: Path) -> None:
    class Wrong(DefaultLoadPlanner):
        def resolve_tensor(self, read_item: Any) -> torch.Tensor:
            return torch.zeros(3)

    dcp.save({"w": torch.ones(2)}, storage_writer=BcpWriter(tmp_path), no_dist=True)
    with pytest.raises(dcp.CheckpointException, match=r"'w': wanted \[2\], got a tensor of \[3\]"):
        dcp.load({"w": torch.zeros(2)}, storage_reader=BcpReader(tmp_path, config=Config()), planner=Wrong())
