# SPDX-License-Identifier: Apache-2.0
"""ShardedTensors of every layout, saved and loaded in every way, give bit for bit what stock DCP gives."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.equality import assert_equal
from support.ranks import run_ranks
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata, ShardMetadata
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import bytecheckpoint
from bytecheckpoint import BcpLoadPlanner, BcpReader, BcpSavePlanner, BcpStager, BcpWriter
from bytecheckpoint.errors import InvalidPlanError, ShapeMismatchError

LIMIT_S = 60.0

# One shard: the rank that has it, its offsets, its sizes.
Cut = tuple[int, Sequence[int], Sequence[int]]


def values(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns values that differ from element to element, so that any mix-up shows."""
    count = torch.arange(torch.Size(shape).numel()).reshape(shape) % 50 + 1
    if dtype is torch.bool:
        return count % 3 == 0
    return torch.complex(count.float(), -count.float()).to(dtype) if dtype.is_complex else count.to(dtype)


def sharded_by(
    value: torch.Tensor, cuts: Sequence[Cut], group: dist.ProcessGroup | None = None, requires_grad: bool = False
) -> ShardedTensor:
    """Returns a ShardedTensor with these shards. The shards of this rank have memory of their own."""
    metadata = [ShardMetadata([*offsets], [*sizes], f"rank:{rank}/cpu") for rank, offsets, sizes in cuts]
    shards = []
    for (rank, offsets, sizes), of_shard in zip(cuts, metadata, strict=True):
        if rank == dist.get_rank():
            box = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
            shards.append(Shard(value[box].clone().contiguous().requires_grad_(requires_grad), of_shard))
    properties = TensorProperties(value.dtype, torch.strided, requires_grad)
    of_all = ShardedTensorMetadata(metadata, value.size(), properties)
    return ShardedTensor._init_from_local_shards_and_global_metadata(shards, of_all, process_group=group)


def in_rows(
    value: torch.Tensor, ranks: Sequence[int], group: dist.ProcessGroup | None = None, requires_grad: bool = False
) -> ShardedTensor:
    cuts, begin = [], 0
    for rank, rows in zip(ranks, torch.arange(value.size(0)).tensor_split(len(ranks)), strict=True):
        cuts.append((rank, (begin, 0), (len(rows), value.size(1))))
        begin += len(rows)
    return sharded_by(value, cuts, group, requires_grad)


def by_chunks(value: torch.Tensor, dim: int, order: Sequence[int]) -> ShardedTensor:
    """Returns a ShardedTensor as its users make it. With more ranks than rows, the last shards begin outside."""
    spec = ChunkShardingSpec(dim, [f"rank:{rank}/cpu" for rank in order])
    sharded = sharded_tensor.empty(spec, *value.shape, dtype=value.dtype)
    for shard in sharded.local_shards():
        begin, size = shard.metadata.shard_offsets[dim], shard.metadata.shard_sizes[dim]
        if size:
            shard.tensor.copy_(value.narrow(dim, begin, size))
    return sharded


def with_strides(sharded: ShardedTensor) -> ShardedTensor:
    for shard in sharded.local_shards():
        wide = torch.zeros([2 * size for size in shard.tensor.shape])[::2, ::2]
        shard.tensor = wide.copy_(shard.tensor)
    return sharded


def within_sharded(value: torch.Tensor) -> ShardedTensor:
    """Returns rows of columns, as FSDP over tensor parallelism makes them on 2 x 2 ranks."""
    row, column = divmod(dist.get_rank(), 2)
    half = value[4 * row : 4 * row + 4]
    inner = sharded_by(half, [(2 * row + i, (0, 2 * i), (4, 2)) for i in range(2)])
    metadata = [ShardMetadata([4 * i, 0], [4, 4], f"rank:{2 * i + column}/cpu") for i in range(2)]
    of_all = ShardedTensorMetadata(metadata, value.size(), TensorProperties(value.dtype, torch.strided))
    return ShardedTensor._init_from_local_shards_and_global_metadata([Shard(inner, metadata[row])], of_all)


DTYPES = ("bool", "uint8", "int64", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64", "complex128")


def plain_layouts(fill: Callable[..., torch.Tensor]) -> dict[str, Any]:
    """Returns layouts that torch's checks accept and stock DCP saves and loads, on any number of ranks from 2 on."""
    size = dist.get_world_size()
    ranks = range(size)
    state: dict[str, Any] = {
        "even": by_chunks(fill(8, 3), 0, ranks),
        "columns": by_chunks(fill(3, 8), 1, ranks),
        "backwards": by_chunks(fill(9, 3), 0, ranks[::-1]),
        "twice": by_chunks(fill(24, 3), 0, [rank for rank in ranks for _ in range(2)]),
        "several": sharded_by(fill(4 * size, 3), [(i % size, (2 * i, 0), (2, 3)) for i in range(2 * size)]),
        "grid": sharded_by(
            fill(4, 6), [((3 * i + j) % size, (2 * i, 2 * j), (2, 2)) for i in range(2) for j in range(3)]
        ),
        "not on rank 1": in_rows(fill(6, 3), [rank for rank in ranks if rank != 1]),
        "not on rank 0": in_rows(fill(6, 3), ranks[1:]),
        "uneven": in_rows(fill(5, 3), ranks),
        "grad": in_rows(fill(8, 3), ranks, requires_grad=True),
        "no elements": sharded_by(fill(0, 3), [(0, (0, 0), (0, 3)), (1, (0, 0), (0, 3))]),
        "nested": OrderedDict(in_dict=in_rows(fill(6, 3), ranks), number=int(fill(1)[0])),
        "list": [in_rows(fill(6, 3), ranks), fill(3), int(fill(1)[0])],
    }
    state["tied"] = state["even"]
    state |= {name: in_rows(fill(8, 3, dtype=getattr(torch, name)), ranks) for name in DTYPES}
    return state


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, ShardedTensor):
        return [tensor for shard in value.local_shards() for tensor in tensors_of(shard.tensor)]
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [tensor for part in parts for tensor in tensors_of(part)]


def overwrite(state: dict[str, Any]) -> None:
    """Sets all tensors to zero, as training changes them after a save was staged."""
    for tensor in tensors_of(state):
        tensor.detach().zero_()


def save_async(state: dict[str, Any], **kwargs: Any) -> None:
    response: Any = dcp.async_save(state, **kwargs)
    overwrite(state)
    getattr(response, "upload_completion", response).result(LIMIT_S)


def save_in_background(state: dict[str, Any], path: Path) -> None:
    handle = bytecheckpoint.async_save_state_dict(path, state)
    overwrite(state)
    handle.committed.result(LIMIT_S)


def save_registered(state: dict[str, Any], path: Path, **kwargs: Any) -> None:
    with bytecheckpoint.registered():
        save_async(state, checkpoint_id=path, **kwargs)


Save = Callable[[dict[str, Any], Path], None]
SAVES: dict[str, Save] = {
    "stock": lambda state, path: dcp.save(state, storage_writer=dcp.FileSystemWriter(path)),
    "writer": lambda state, path: dcp.save(state, storage_writer=BcpWriter(path)),
    "planner": lambda state, path: dcp.save(state, storage_writer=dcp.FileSystemWriter(path), planner=BcpSavePlanner()),
    "both": lambda state, path: dcp.save(state, storage_writer=BcpWriter(path), planner=BcpSavePlanner()),
    "own": lambda state, path: bytecheckpoint.save_state_dict(path, state),
    "stager": lambda state, path: save_async(
        state, storage_writer=dcp.FileSystemWriter(path), async_stager=BcpStager()
    ),
    "staging writer": lambda state, path: save_async(state, storage_writer=BcpWriter(path)),
    "background": save_in_background,
    "registered": save_registered,
}
# These use our planner, which accepts layouts that stock DCP refuses.
OUR_SAVES = [name for name in SAVES if name not in ("stock", "writer", "stager", "staging writer")]

Load = Callable[[dict[str, Any], Path], None]
LOADS: dict[str, Load] = {
    "stock": lambda state, path: dcp.load(state, storage_reader=dcp.FileSystemReader(path)),
    "reader": lambda state, path: dcp.load(state, storage_reader=BcpReader(path)),
    "planner": lambda state, path: dcp.load(state, storage_reader=dcp.FileSystemReader(path), planner=BcpLoadPlanner()),
    "both": lambda state, path: dcp.load(state, storage_reader=BcpReader(path), planner=BcpLoadPlanner()),
    "own": lambda state, path: bytecheckpoint.load_state_dict(path, state),
}
OUR_LOADS = ["planner", "both", "own"]


def loaded(load: str, path: Path, state: dict[str, Any]) -> dict[str, Any]:
    LOADS[load](state, path)
    return state


def save_every_way(root: Path) -> None:
    for name, save in SAVES.items():
        save(plain_layouts(values), root / name)
        assert_equal(loaded("stock", root / name, plain_layouts(zeros)), plain_layouts(values), name)
    for name in LOADS:
        for saved in ("stock", "both"):
            assert_equal(loaded(name, root / saved, plain_layouts(zeros)), plain_layouts(values), f"{name} of {saved}")


def load_elsewhere(root: Path) -> None:
    for saved in ("stock", "both"):
        for name in LOADS:
            got, wanted = plain_layouts(zeros), plain_layouts(values)
            for of_all in (got, wanted):
                del of_all["several"]  # its shape depends on the number of ranks
            assert_equal(loaded(name, root / saved, got), wanted, f"{name} of {saved}")


@pytest.mark.parametrize(("num_ranks", "others"), [(3, 2), (2, 4)])
def test_what_stock_dcp_stores_we_do(tmp_path: Path, num_ranks: int, others: int) -> None:
    run_ranks(num_ranks, save_every_way, tmp_path, limit_s=LIMIT_S)
    run_ranks(others, load_elsewhere, tmp_path, limit_s=LIMIT_S)


def our_layouts(fill: Callable[..., torch.Tensor]) -> dict[str, Any]:
    """Returns layouts of 4 ranks that stock DCP refuses, or stores so that nobody can load them."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half = dist.get_rank() // 2
    missing = [0, 2, 3]
    return {
        "more ranks than rows": by_chunks(fill(2, 3), 0, range(4)),
        "last begins outside": by_chunks(fill(5, 3), 0, range(4)),
        "empty before": sharded_by(fill(4, 3), [(0, (0, 0), (2, 3)), (1, (2, 0), (0, 3)), (1, (2, 0), (2, 3))]),
        "empty behind": sharded_by(fill(4, 3), [(0, (0, 0), (2, 3)), (1, (2, 0), (2, 3)), (1, (2, 0), (0, 3))]),
        "empty elsewhere": sharded_by(fill(4, 3), [(0, (2, 0), (0, 3)), (0, (0, 0), (2, 3)), (1, (2, 0), (2, 3))]),
        "strides": with_strides(in_rows(fill(8, 8), range(4))),
        "list": [{"here and there": in_rows(fill(6, 3), missing)}, {"number": int(fill(1)[0])}],
        "of half": in_rows(fill(8, 3), [2 * half, 2 * half + 1], groups[half]),
        "within": within_sharded(fill(8, 4)),
    }


def save_ours_every_way(root: Path) -> None:
    wanted = our_layouts(values)
    for saved in OUR_SAVES:
        SAVES[saved](our_layouts(values), root / saved)
        for name in OUR_LOADS:
            assert_equal(loaded(name, root / saved, our_layouts(zeros)), wanted, f"{name} of {saved}")
    plain = {name: values(*shape) for name, shape in {"last begins outside": (5, 3), "empty before": (4, 3)}.items()}
    got = {name: torch.zeros_like(value) for name, value in plain.items()}
    assert_equal(loaded("stock", root / "both", got), plain, "plain")


def test_empty_strided_and_nested_shards_are_stored_too(tmp_path: Path) -> None:
    run_ranks(4, save_ours_every_way, tmp_path, limit_s=LIMIT_S)


def load_beside_what_dcp_does_not_know(root: Path) -> None:
    def state(fill: Callable[..., torch.Tensor], **others: Any) -> dict[str, Any]:
        return {"sharded": in_rows(fill(6, 3), [0]), **others}

    path = root / "ckpt"
    bytecheckpoint.save_state_dict(path, state(values, list=[values(3)]))
    # Rank 1 has no shards. Beside them are a tensor that this load makes, and values that DCP's own planner makes None.
    inner = [torch.empty(3, device="meta"), {"of": {1, 2}}]
    got = state(zeros, list=inner, dtype=torch.bfloat16, odd={"deep": (1, {2})})
    dcp.load(got, storage_reader=BcpReader(path), planner=BcpLoadPlanner(allow_partial_load=True))
    assert got["list"] is inner
    assert torch.equal(inner[0], values(3))
    assert [inner[1], got["dtype"], got["odd"]] == [{"of": {1, 2}}, torch.bfloat16, {"deep": (1, {2})}]
    assert_equal(got["sharded"], state(values)["sharded"], "sharded")


def test_other_values_of_the_state_stay_what_they_are(tmp_path: Path) -> None:
    run_ranks(2, load_beside_what_dcp_does_not_know, tmp_path, limit_s=LIMIT_S)


def load_without_flattening(root: Path) -> None:
    def state(fill: Callable[..., torch.Tensor]) -> dict[str, Any]:
        return {"sharded": in_rows(fill(6, 3), [0]), "number": int(fill(1)[0])}

    planner = BcpSavePlanner(flatten_state_dict=False)
    dcp.save(state(values), storage_writer=BcpWriter(root / "ckpt"), planner=planner)
    for reader in (BcpReader, dcp.FileSystemReader):
        got = state(zeros)
        dcp.load(got, storage_reader=reader(root / "ckpt"), planner=BcpLoadPlanner(flatten_state_dict=False))
        assert_equal(got, state(values), reader.__name__)


def test_objects_of_a_state_that_is_not_flattened_reach_the_caller(tmp_path: Path) -> None:
    run_ranks(2, load_without_flattening, tmp_path, limit_s=LIMIT_S)


def load_what_does_not_fit(root: Path) -> None:
    ranks = range(dist.get_world_size())
    bytecheckpoint.save_state_dict(root / "ckpt", {"key": in_rows(values(8, 3, dtype=torch.complex64), ranks)})
    wrong = {
        "imaginary": in_rows(zeros(8, 3), ranks),
        r"stored is a tensor of \[8, 3\]": in_rows(zeros(10, 3, dtype=torch.complex64), ranks),
    }
    for why, sharded in wrong.items():
        with pytest.raises(ShapeMismatchError, match=why):
            bytecheckpoint.load_state_dict(root / "ckpt", {"key": sharded})
        assert not any(tensor.any() for tensor in tensors_of(sharded))
    without_memory = in_rows(zeros(8, 3, dtype=torch.complex64), ranks)
    for shard in without_memory.local_shards():
        shard.tensor = shard.tensor.to("meta")
    with pytest.raises(InvalidPlanError, match=r"meta device.*'key'"):
        bytecheckpoint.load_state_dict(root / "ckpt", {"key": without_memory})
    mixed = in_rows(values(8, 3), ranks) if dist.get_rank() == 0 else values(8, 3)
    with pytest.raises(InvalidPlanError, match=r"rank 0 has shards of a tensor.* rank 1 has a plain tensor"):
        bytecheckpoint.save_state_dict(root / "mixed", {"key": mixed})


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    run_ranks(2, load_what_does_not_fit, tmp_path, limit_s=LIMIT_S)


def save_and_leave(root: Path) -> None:
    handle = bytecheckpoint.async_save_state_dict(root / "ckpt", our_layouts(values))
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    handle.committed.result(LIMIT_S)
    dist.init_process_group("gloo", init_method=f"file://{root}/again", rank=rank, world_size=size)
    assert_equal(loaded("own", root / "ckpt", our_layouts(zeros)), our_layouts(values), "")


def test_a_background_save_needs_no_group_of_the_shards(tmp_path: Path) -> None:
    run_ranks(4, save_and_leave, tmp_path, limit_s=LIMIT_S)


def save_in_a_process(root: Path) -> None:
    kind = AsyncCheckpointerType.PROCESS
    for name in ("first", "second"):
        save_registered(our_layouts(values), root / name, async_checkpointer_type=kind)
        assert_equal(loaded("own", root / name, our_layouts(zeros)), our_layouts(values), name)


def test_another_process_needs_no_group_of_the_shards(tmp_path: Path) -> None:
    run_ranks(4, save_in_a_process, tmp_path, limit_s=2 * LIMIT_S)
