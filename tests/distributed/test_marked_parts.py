# SPDX-License-Identifier: Apache-2.0
"""Plain tensors marked as boxes of a larger tensor (``CheckpointableTensor``): torch 2.15 stores them as such."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.ranks import run_ranks
from torch import nn

import bytecheckpoint
from bytecheckpoint import BcpLoadPlanner, BcpReader, BcpSavePlanner, BcpStager, BcpWriter, verify
from bytecheckpoint.errors import UnsupportedError

pytestmark = pytest.mark.skipif(
    not hasattr(dcp, "CheckpointableTensor"), reason="this torch has no CheckpointableTensor (2.15 has)"
)

_WHOLE = torch.arange(96.0).reshape(8, 12)


def marked(local: torch.Tensor, shape: Any, boxes: list[tuple[Any, Any, Any]]) -> torch.Tensor:
    """Returns ``local``, marked as boxes of a tensor of ``shape``.

    Each box has its offsets in the whole tensor, its offsets in ``local``, and its sizes.
    """
    tensor: Any = local
    tensor.global_shape = tuple(shape)
    tensor.global_offsets, tensor.local_offsets, tensor.local_sizes = (tuple(of) for of in zip(*boxes, strict=True))
    return local


def state(rank: int, *, filled: bool = True) -> dict[str, Any]:
    """Returns the state of one of two ranks.

    It holds rows of the tensor; columns in two blocks with padding between them, which are listed from left to right or
    from right to left; a nested state; a parameter; a tensor of which rank 0 holds all and rank 1 an empty box; and
    unmarked tensors.
    """
    whole = _WHOLE if filled else torch.zeros_like(_WHOLE)
    rows = whole[4 * rank : 4 * rank + 4].clone()
    padded = torch.full((8, 7), -1.0)
    padded[:, :3], padded[:, 4:] = whole[:, 3 * rank : 3 * rank + 3], whole[:, 6 + 3 * rank : 9 + 3 * rank]
    columns = [((0, 3 * rank), (0, 0), (8, 3)), ((0, 6 + 3 * rank), (0, 4), (8, 3))]
    uneven = whole.clone() if rank == 0 else whole[8:].clone()
    made: dict[str, Any] = {
        "rows": marked(rows, (8, 12), [((4 * rank, 0), (0, 0), (4, 12))]),
        "columns": marked(padded, (8, 12), columns),
        "turned": marked(padded.clone(), (8, 12), columns[::-1]),
        "nested": {"bf16": marked(rows.bfloat16(), (8, 12), [((4 * rank, 0), (0, 0), (4, 12))])},
        "parameter": marked(nn.Parameter(rows.clone()), (8, 12), [((4 * rank, 0), (0, 0), (4, 12))]),
        "uneven": marked(uneven, (8, 12), [((8 * rank, 0), (0, 0), tuple(uneven.shape))]),
        "plain": whole.clone(),
        "unmarked": torch.full((3,), 5.0 if filled else 0.0),
    }
    made["unmarked"].partition_dim = 0  # an attribute that another library might set
    return made


def save_here(save: str, path: str) -> None:
    """Saves the state of this rank in one of several ways. While a background save runs, the state changes."""
    tree = state(dist.get_rank())
    if save == "ours":
        dcp.save(tree, storage_writer=BcpWriter(path))
    elif save == "stock planner":
        dcp.save(tree, storage_writer=BcpWriter(path), planner=dcp.DefaultSavePlanner())
    elif save == "registered":
        with bytecheckpoint.registered():
            dcp.save(tree, checkpoint_id=path)
    elif save == "state dict":
        bytecheckpoint.save_state_dict(path, tree)
    elif save == "async state dict":
        handle = bytecheckpoint.async_save_state_dict(path, tree)
        scrub(tree)
        handle.committed.result()
    else:
        if save == "our stager, stock writer and planner":
            future = dcp.async_save(tree, storage_writer=dcp.FileSystemWriter(path), async_stager=BcpStager())
        else:
            assert save == "async"
            future = dcp.async_save(tree, storage_writer=BcpWriter(path), async_stager=BcpStager())
        scrub(tree)
        future.result()


def scrub(tree: dict[str, Any]) -> None:
    for value in tree.values():
        if isinstance(value, dict):
            scrub(value)
        else:
            value.data.fill_(-7.0)


def check_stock(path: str) -> None:
    check(path, lambda tree: dcp.load(tree, storage_reader=dcp.FileSystemReader(path)))


def check(path: str, load: Callable[[dict[str, Any]], Any]) -> None:
    rank = dist.get_rank()
    got = state(rank, filled=False)
    load(got)
    for key, wanted in state(rank).items():
        if key != "nested":
            torch.testing.assert_close(got[key], wanted, rtol=0, atol=0)
    torch.testing.assert_close(got["nested"]["bf16"], state(rank)["nested"]["bf16"], rtol=0, atol=0)
    whole = {key: torch.zeros(8, 12) for key in ("rows", "columns", "turned", "uneven")}
    load(whole)
    assert all(torch.equal(value, _WHOLE) for value in whole.values())


def save_and_check(save: str, path: str) -> None:
    save_here(save, path)
    check_stock(path)
    check(path, lambda tree: dcp.load(tree, storage_reader=BcpReader(path)))
    check(path, lambda tree: dcp.load(tree, storage_reader=BcpReader(path), planner=dcp.DefaultLoadPlanner()))
    check(path, lambda tree: bytecheckpoint.load_state_dict(path, tree))


@pytest.mark.parametrize(
    "save",
    [
        "ours",
        "stock planner",
        "registered",
        "state dict",
        "async",
        "async state dict",
        "our stager, stock writer and planner",
    ],
)
def test_boxes_of_a_larger_tensor_are_stored_and_loaded_as_such(tmp_path: Path, save: str) -> None:
    run_ranks(2, save_and_check, save, str(tmp_path / "step"))
    if save != "our stager, stock writer and planner":
        assert verify(tmp_path / "step").is_whole


def save_in_process(path: str) -> None:
    future: Any = dcp.async_save(
        state(dist.get_rank()),
        storage_writer=BcpWriter(path),
        async_stager=BcpStager(),
        async_checkpointer_type=dcp.state_dict_saver.AsyncCheckpointerType.PROCESS,
    )
    future.result()
    check_stock(path)


def test_marks_reach_the_process_that_saves(tmp_path: Path) -> None:
    run_ranks(2, save_in_process, str(tmp_path), limit_s=120)


def save_wrong_marks(path: str) -> str:
    tree = state(dist.get_rank())
    tree["rows"].local_sizes = ((4, 13),)
    with pytest.raises(dcp.api.CheckpointException) as caught:
        dcp.save(tree, storage_writer=BcpWriter(path))
    return str(caught.value)


def test_marks_that_cannot_be_are_an_error_on_every_rank(tmp_path: Path) -> None:
    for message in run_ranks(2, save_wrong_marks, str(tmp_path)):
        assert "outside global_shape" in message


def swizzled(
    ranks: int, rank: int, order: list[int], *, filled: bool = True, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Returns a tensor of rows of four blocks, as gate and up projections have them, and of an empty box.

    Each rank has some rows of each block.
    """
    rows = 24 // 4 // ranks
    whole = torch.arange(24.0)[:, None].expand(24, 3)
    local = torch.full((4 * rows + 1, 3), -1.0, dtype=dtype)
    boxes: list[tuple[Any, Any, Any]] = [
        ((6 * block + rows * rank, 0), (rows * block, 0), (rows, 3)) for block in range(4)
    ]
    for (begin, _), (at, _), _ in boxes:
        local[at : at + rows] = whole[begin : begin + rows] if filled else 0.0
    boxes.append((boxes[2][0], (0, 0), (0, 3)))  # begins where another box does
    return marked(local, (24, 3), [boxes[i] for i in order])


def save_swizzled(path: str, is_same: bool) -> None:
    chance = random.Random(0 if is_same else dist.get_rank())
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for number in range(2):
        order = chance.sample(range(5), 5)
        tree = {"x": swizzled(ranks, rank, order)}
        # The same boxes in another order have the same plan, so the cache of plans has it from the second save on.
        bytecheckpoint.save_state_dict(f"{path}/{number}", tree)
        bytecheckpoint.async_save_state_dict(f"{path}/{number}-async", tree).committed.result()
        dcp.save(tree, storage_writer=BcpWriter(f"{path}/{number}-classes"), planner=BcpSavePlanner())
        dcp.save(tree, checkpoint_id=f"{path}/{number}-stock", planner=BcpSavePlanner())
        for kind in ("", "-async", "-classes", "-stock"):
            back = {"x": torch.zeros(24, 3)}
            dcp.load(back, checkpoint_id=f"{path}/{number}{kind}")
            assert torch.equal(back["x"], torch.arange(24.0)[:, None].expand(24, 3)), (order, kind)
        for dtype in (torch.float32, torch.float64):
            order = chance.sample(range(5), 5)
            into = swizzled(ranks, rank, order, filled=False, dtype=dtype)
            bytecheckpoint.load_state_dict(f"{path}/{number}", {"x": into})
            assert torch.equal(into, swizzled(ranks, rank, order, dtype=dtype))


@pytest.mark.parametrize("is_same", [True, False])
def test_boxes_may_be_listed_in_any_order(tmp_path: Path, is_same: bool) -> None:
    run_ranks(2, save_swizzled, str(tmp_path), is_same, limit_s=120)


def test_meta_tensors_keep_their_marks(tmp_path: Path) -> None:
    path = str(tmp_path)
    rows = [((0, 0), (0, 0), (8, 12))]
    dcp.save({"rows": _WHOLE.clone()}, storage_writer=BcpWriter(path), no_dist=True)
    tree = {"rows": marked(torch.empty(8, 12, device="meta"), (8, 12), rows)}
    dcp.load(tree, storage_reader=BcpReader(path), planner=BcpLoadPlanner(), no_dist=True)
    assert torch.equal(tree["rows"], _WHOLE)
    assert vars(tree["rows"]) == vars(marked(torch.empty(0), (8, 12), rows))


def test_a_module_whose_parameters_are_parts_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    marked(model.weight, (4, 3), [((0, 0), (0, 0), (2, 3))])
    with pytest.raises(UnsupportedError, match="'weight' is marked as parts of a larger tensor"):
        bytecheckpoint.save(str(tmp_path), {"model": model}, framework="ddp")
