# SPDX-License-Identifier: Apache-2.0
"""Our strategies for Megatron-Core, with a stand-in for it; ``make ground`` tries the real one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.ranks import run_ranks

import bytecheckpoint
from bytecheckpoint.errors import (
    CheckpointError,
    CorruptCheckpointError,
    InvalidPlanError,
    ShapeMismatchError,
    UnsupportedError,
)
from frameworks.megatron_stub import LoadStrategy, SaveStrategy, ShardedObject, ShardedTensor, strategies

SHAPE = (4, 6, 5)  # layers, rows, columns
WHOLE = torch.arange(120.0).reshape(SHAPE)


def layer(number: int, *, is_filled: bool = True, rows: int = SHAPE[1], **options: Any) -> ShardedTensor:
    """Half of the rows of a layer."""
    rank, half = dist.get_rank(), rows // 2
    data = WHOLE[number, half * rank :][:half].clone() if is_filled else torch.full((half, SHAPE[2]), -1.0)
    at = (number, half * rank, 0)
    return ShardedTensor("layers", data, data.dtype, (4, rows, 5), at, prepend_axis_num=1, **options)


def state(*, is_filled: bool = True) -> dict[Any, Any]:
    rank = dist.get_rank()
    scalar = torch.tensor(2.5 if is_filled else 0.0)
    return {
        "model": {number: layer(number, is_filled=is_filled) for number in range(4)},
        "list": [ShardedTensor("scalar", scalar, scalar.dtype, (), (), replica_id=(0, rank)), {}],
        "objects": {
            "each": ShardedObject("each", {"rank": rank} if is_filled else None, (2,), (rank,)),
            "same": ShardedObject("same", [1, None] if is_filled else None, (1,), (0,), replica_id=rank),
        },
    }


def check(loaded: dict[Any, Any]) -> None:
    rank = dist.get_rank()
    for number in range(4):
        assert torch.equal(loaded["model"][number], WHOLE[number, 3 * rank :][:3])
    assert loaded["list"] == [torch.tensor(2.5), {}]
    assert loaded["objects"] == {"each": {"rank": rank}, "same": [1, None]}


def both_ways(root: str) -> None:
    ours = strategies()
    ours.BcpSaveStrategy().save(state(), f"{root}/a")
    check(ours.BcpLoadStrategy().load(state(is_filled=False), f"{root}/a"))
    same = ShardedObject("same", None, (1,), (0,))
    twice = ours.BcpLoadStrategy().load({"x": same, "y": [same]}, f"{root}/a")
    assert twice == {"x": [1, None], "y": [[1, None]]}
    with pytest.raises(AssertionError, match="own save"):
        SaveStrategy().save(state(), root)
    ours.register()
    ours.register()
    SaveStrategy("torch_dist", 1).save(state(), f"{root}/b")
    check(LoadStrategy().load(state(is_filled=False), f"{root}/b"))
    ours.unregister()
    for call in (SaveStrategy().async_save, LoadStrategy().load):
        with pytest.raises(AssertionError, match="own"):
            call(state(), root)
    assert not hasattr(SaveStrategy, "bytecheckpoint_config")


def test_nested_states_come_back_and_stock_dcp_reads_them(tmp_path: Path) -> None:
    run_ranks(2, both_ways, str(tmp_path))
    for name in "ab":
        stored = bytecheckpoint.read(tmp_path / name)
        assert torch.equal(stored["layers"], WHOLE)
        assert stored["each/shard_1_2"] == [{"rank": 1}]
        assert {*stored} == {"layers", "scalar", "each/shard_0_2", "each/shard_1_2", "same/shard_0_1"}
        wanted: dict[str, Any] = {"layers": torch.zeros(SHAPE), "same/shard_0_1": None}
        dcp.load(wanted, storage_reader=dcp.FileSystemReader(tmp_path / name), no_dist=True)
        assert torch.equal(wanted["layers"], WHOLE)
        assert wanted["same/shard_0_1"] == [[1, None]]


def in_background(root: str) -> None:
    saved = state()
    request = strategies().BcpSaveStrategy().async_save(saved, f"{root}/a")
    for number in range(4):
        saved["model"][number].data.zero_()
    request.async_fn(*request.async_fn_args)
    (finish,) = request.finalize_fns
    finish()
    check(strategies().BcpLoadStrategy().load(state(is_filled=False), f"{root}/a"))


def test_a_save_in_the_background(tmp_path: Path) -> None:
    run_ranks(2, in_background, str(tmp_path))


def other_shapes(root: str) -> None:
    ours = strategies()
    ours.BcpSaveStrategy().save({"x": [layer(number) for number in range(4)]}, f"{root}/a")
    for rows in (4, 8, 16):
        wanted = [layer(number, is_filled=False, rows=rows, allow_shape_mismatch=True) for number in range(4)]
        padded = torch.cat([WHOLE, torch.zeros(4, 10, 5)], 1)
        loaded = ours.BcpLoadStrategy().load({"x": wanted}, f"{root}/a")["x"]
        for number in range(4):
            half = rows // 2
            assert torch.equal(loaded[number], padded[number, half * dist.get_rank() :][:half]), rows
    with pytest.raises(ShapeMismatchError, match="'layers'"):
        ours.BcpLoadStrategy().load({"x": layer(0, is_filled=False, rows=8)}, f"{root}/a")


def test_shapes_may_differ_where_that_is_said(tmp_path: Path) -> None:
    run_ranks(2, other_shapes, str(tmp_path))


class Strange(torch.Tensor):
    """A tensor that may hold its elements elsewhere."""


def failing(root: str) -> None:
    ours, rank = strategies(), dist.get_rank()
    lacking, odd, twofold = state(), state(), state()
    if rank == 1:
        lacking["list"][0].replica_id = (0, 0)
        lacking["list"][0].data = None
        odd["model"][1] = "text"
        twofold["model"][1] = layer(1, rows=8)
    for wrong, said in ((lacking, "'scalar': .* no data"), (odd, "a str is where"), (twofold, "one shape and dtype")):
        with pytest.raises(InvalidPlanError, match=said):
            ours.BcpSaveStrategy().save(wrong, f"{root}/a")
        assert not Path(root, "a", ".metadata").exists()
    request = ours.BcpSaveStrategy().async_save(lacking, f"{root}/a")
    request.async_fn(*request.async_fn_args)
    with pytest.raises(InvalidPlanError, match="no data"):
        request.finalize_fns[0]()
    ours.BcpSaveStrategy().save(state(), f"{root}/a")
    with pytest.raises(InvalidPlanError, match="a str is where"):
        ours.BcpLoadStrategy().load(odd, f"{root}/a")
    strange = state()
    if rank == 1:
        strange["model"][1].data = strange["model"][1].data.as_subclass(Strange)
    for call in (ours.BcpSaveStrategy().save, ours.BcpLoadStrategy().load):
        with pytest.raises(UnsupportedError, match="'layers': a Strange cannot be"):
            call(strange, f"{root}/a")
    bytecheckpoint.save_state_dict(f"{root}/b", {"same/shard_0_1": 5})
    with pytest.raises(UnsupportedError, match="'same/shard_0_1' is a int"):
        ours.BcpLoadStrategy().load({"x": ShardedObject("same", None, (1,), (0,))}, f"{root}/b")
    hinted = ours.BcpSaveStrategy()
    hinted.separation_hint = "optimizer"
    for call in (
        lambda: hinted.save(state(), f"{root}/a"),
        lambda: ours.BcpSaveStrategy().async_save(state(), f"{root}/a", "nvrx"),
    ):
        with pytest.raises(CheckpointError, match=r"separation_hint|async_strategy='mcore'"):
            call()
    check(ours.BcpLoadStrategy().load(state(is_filled=False), f"{root}/a"))
    dist.barrier()
    if rank == 0:
        (data,) = Path(root, "a").glob("__1_*.distcp")
        content = bytearray(data.read_bytes())
        content[content.index(WHOLE[0, 3].numpy().tobytes())] ^= 1
        data.write_bytes(content)
    dist.barrier()
    with pytest.raises(CorruptCheckpointError, match=r"__1_.*\.distcp"):
        ours.BcpLoadStrategy().load(state(is_filled=False), f"{root}/a")


def test_what_fails_on_one_rank_fails_on_all(tmp_path: Path) -> None:
    run_ranks(2, failing, str(tmp_path))
