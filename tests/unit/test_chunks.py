# SPDX-License-Identifier: Apache-2.0
"""Tests tensors of which a process holds some boxes: our planners and DCP's own save and load them."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner

import bytecheckpoint
from bytecheckpoint import BcpLoadPlanner, BcpReader, BcpSavePlanner, BcpWriter
from bytecheckpoint.errors import InvalidPlanError
from bytecheckpoint.native import _core
from bytecheckpoint.tensors.chunks import LocalChunks, Spread

WHOLE = torch.arange(60.0).view(3, 4, 5)
# Where tests cut the flat elements of WHOLE into parts.
FIRST, LAST = 7, 52
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def chunks_of(whole: torch.Tensor, begin: int, end: int) -> LocalChunks:
    """Returns elements [begin, end) of ``whole``, flat, as views of one run of memory."""
    flat = whole.clone().view(-1)
    (boxes,) = _core.boxes_of_flat_shard([(whole.shape, 0)], begin, end)
    pieces = [flat[begin + at :][: torch.Size(sizes).numel()].view(sizes) for _, sizes, at in boxes]
    return LocalChunks(whole.shape, [offsets for offsets, _, _ in boxes], pieces, whole.dtype)


def all_of(whole: torch.Tensor) -> LocalChunks:
    parts = [chunks_of(whole, 0, FIRST), chunks_of(whole, FIRST, LAST), chunks_of(whole, LAST, whole.numel())]
    offsets = [offsets for part in parts for offsets in part.offsets]
    return LocalChunks(whole.shape, offsets, [tensor for part in parts for tensor in part.tensors], whole.dtype)


@pytest.mark.parametrize("save_planner", [BcpSavePlanner, DefaultSavePlanner])
@pytest.mark.parametrize("load_planner", [BcpLoadPlanner, DefaultLoadPlanner])
@pytest.mark.parametrize("stock", ["ours", "stock writer", "stock reader"])
def test_boxes_are_saved_and_loaded(tmp_path: Path, save_planner: Any, load_planner: Any, stock: str) -> None:
    """Every planner, writer and reader can load a whole tensor, or other boxes, from boxes that were saved."""
    state = {"weight": all_of(WHOLE), "nothing here": LocalChunks([0, 3], [], [], torch.int64)}
    writer = None if stock == "stock writer" else BcpWriter(tmp_path)
    dcp.save(state, storage_writer=writer, checkpoint_id=tmp_path, planner=save_planner())
    loaded: dict[str, Any] = {"weight": torch.zeros_like(WHOLE)}
    parts: dict[str, Any] = {"weight": chunks_of(torch.zeros_like(WHOLE), 13, 47)}
    for wanted in (loaded, parts):
        reader = None if stock == "stock reader" else BcpReader(tmp_path)
        dcp.load(wanted, storage_reader=reader, checkpoint_id=tmp_path, planner=load_planner())
    assert torch.equal(loaded["weight"], WHOLE)
    got = torch.cat([tensor.reshape(-1) for tensor in parts["weight"].tensors])
    assert torch.equal(got, WHOLE.view(-1)[13:47])


def test_a_background_save_keeps_what_they_were(tmp_path: Path) -> None:
    """Boxes are staged like other tensors: they may change once the call has returned a handle."""
    chunks = all_of(WHOLE)
    handle = bytecheckpoint.async_save_state_dict(tmp_path, {"weight": chunks})
    for tensor in chunks.tensors:
        tensor.fill_(-1)
    handle.committed.result()
    loaded = {"weight": torch.zeros_like(WHOLE)}
    bytecheckpoint.load_state_dict(tmp_path, loaded)
    assert torch.equal(loaded["weight"], WHOLE)
    bytecheckpoint.shutdown()


def test_boxes_in_any_order(tmp_path: Path) -> None:
    """If the dims of a tensor lie in another order in memory, its boxes do, too. Each box keeps its own elements."""
    at = [(2, 0), (0, 5), (1, 0), (0, 0), (0, 2)]
    sizes = [(1, 7), (1, 2), (1, 7), (1, 2), (1, 3)]
    whole = torch.arange(21.0).view(3, 7)
    pieces = [whole[y : y + h, x : x + w].clone() for (y, x), (h, w) in zip(at, sizes, strict=True)]
    bytecheckpoint.save_state_dict(tmp_path, {"weight": LocalChunks([3, 7], at, pieces, torch.float32)})
    loaded: dict[str, Any] = {"weight": torch.zeros(3, 7)}
    bytecheckpoint.load_state_dict(tmp_path, loaded)
    assert torch.equal(loaded["weight"], whole)
    blank = [torch.zeros_like(piece) for piece in pieces]
    bytecheckpoint.load_state_dict(tmp_path, {"weight": LocalChunks([3, 7], at, blank, torch.float32)})
    assert all(map(torch.equal, blank, pieces))


def test_boxes_that_overlap_are_refused(tmp_path: Path) -> None:
    """If two boxes of one rank share elements, nobody knows which of them counts."""
    pieces = [torch.zeros(2, 3), torch.ones(2, 3)]
    chunks = LocalChunks([3, 3], [(0, 0), (1, 0)], pieces, torch.float32)
    with pytest.raises(InvalidPlanError, match=r"'weight'.*overlap"):
        bytecheckpoint.save_state_dict(tmp_path, {"weight": chunks})


@pytest.mark.parametrize(
    ("offsets", "tensor"),
    [
        ((2, 0), torch.zeros(2, 3)),
        ((-1, 0), torch.zeros(2, 3)),
        ((0,), torch.zeros(3)),
        ((0, 0), torch.zeros(3)),
        ((0, 0), torch.zeros(2, 3, dtype=torch.float64)),
    ],
)
def test_boxes_are_inside_and_of_one_dtype(offsets: tuple[int, ...], tensor: torch.Tensor) -> None:
    """``LocalChunks`` refuses a box that is not inside the tensor or has another dtype or number of dims."""
    with pytest.raises(ValueError, match=r"LocalChunks of \[3, 3\]"):
        LocalChunks([3, 3], [offsets], [tensor], torch.float32)


def test_they_hold_and_do_not_compute() -> None:
    """Copies have the same boxes and their own memory. Arithmetic raises an error that says what to do instead."""
    chunks = chunks_of(WHOLE, FIRST, LAST)
    for other in (chunks.clone(), copy.deepcopy(chunks), pickle.loads(pickle.dumps(chunks)), chunks.detach()):
        assert type(other) is LocalChunks
        assert other.offsets == chunks.offsets
        assert all(map(torch.equal, other.tensors, chunks.tensors))
    assert chunks.detach().tensors[0].data_ptr() == chunks.tensors[0].data_ptr()
    assert copy.deepcopy(chunks).tensors[0].data_ptr() != chunks.tensors[0].data_ptr()
    assert chunks.to(torch.float64).dtype == torch.float64
    assert "[1, 1, 3] at [0, 1, 2]" in repr(chunks)
    with pytest.raises(TypeError, match="compute with its `tensors`"):
        torch.add(chunks, chunks)


@pytest.mark.parametrize(
    "kwargs", [{"dtype": torch.float64}, {"device": "cpu", "copy": True}, {"device": "meta"}], ids=str
)
def test_they_go_where_tensors_go(kwargs: dict[str, Any]) -> None:
    """``to`` copies each box, and keeps where the boxes lie in the whole tensor."""
    chunks = chunks_of(WHOLE, FIRST, LAST)
    chunks.spread = Spread((0, FIRST, LAST, 60), (0, 1, 2))
    moved: Any = chunks.to(**kwargs)
    assert (type(moved), moved.offsets, moved.spread) == (LocalChunks, chunks.offsets, chunks.spread)
    for tensor, before in zip(moved.tensors, chunks.tensors, strict=True):
        wanted = before.to(**kwargs)
        assert (tensor.dtype, tensor.device, tensor.shape) == (wanted.dtype, wanted.device, wanted.shape)
        assert tensor is not before
