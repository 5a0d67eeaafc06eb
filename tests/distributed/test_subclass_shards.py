# SPDX-License-Identifier: Apache-2.0
"""Shards of quantized tensors: saved by their parts on some ranks, loaded on others, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.ranks import run_ranks
from support.subclasses import Int8Rows, PerTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

import bytecheckpoint
from bytecheckpoint import Config, async_save_state_dict, load_state_dict, save_state_dict, shutdown
from bytecheckpoint.errors import CheckpointError, InvalidPlanError
from bytecheckpoint.tensors.equality import bits
from bytecheckpoint.tensors.subclass_parts import parts_of

ROWS, COLUMNS = 10, 6


class Quantized(torch.nn.Module):
    """A frozen quantized weight beside a parameter that is trained."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(Int8Rows.make(ROWS, COLUMNS, seed), requires_grad=False)
        self.bias = torch.nn.Parameter(torch.full((ROWS,), float(seed)))


def box_of(whole: Any, value: DTensor) -> list[torch.Tensor]:
    """The parts of this rank's shard, cut from the whole tensor."""
    (chunk,) = value.__create_chunk_list__()
    for dim, (begin, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
        whole = whole.narrow(dim, begin, size)
    return [*whole.parts()]


def assert_shard(value: Any, wanted: Any) -> None:
    if not isinstance(value, DTensor):
        local, parts = value, wanted.parts()
    else:
        local, parts = value.to_local(), box_of(wanted, value)
    if local.numel() == 0:
        return
    for a, b in zip(local.parts(), parts, strict=True):
        assert a.shape == b.shape
        assert torch.equal(bits(a.contiguous()), bits(b.contiguous()))


def sharded(seed: int, placements: list[Any] | None = None) -> DTensor:
    """A quantized tensor over all ranks, on a 1-D or a 2-D mesh."""
    whole = Int8Rows.make(ROWS, COLUMNS, seed)
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,) if placements is None or len(placements) == 1 else (2, size // 2))
    placements = placements or [Shard(0)]
    like = torch.distributed.tensor.zeros(ROWS, COLUMNS, device_mesh=mesh, placements=placements)
    (chunk,) = like.__create_chunk_list__()
    for dim, (begin, length) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
        whole = whole.narrow(dim, begin, length)
    parts = [part.contiguous() for part in whole.parts()]
    local = Int8Rows(*parts)
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size([ROWS, COLUMNS]), stride=(COLUMNS, 1)
    )


LAYOUTS: dict[str, list[Any]] = {
    "rows": [Shard(0)],
    "columns": [Shard(1)],
    "replicated": [Replicate()],
    "rows and columns": [Shard(0), Shard(1)],
    "copies of rows": [Replicate(), Shard(0)],
}


def save_shards(root: Path) -> None:
    for name, placements in LAYOUTS.items():
        if len(placements) > 1 and dist.get_world_size() == 2:
            continue
        state = {"model": {"w": sharded(1, placements)}}
        save_state_dict(root / name, state)
        handle = async_save_state_dict(root / f"{name}, later", state)
        for part in state["model"]["w"].to_local().parts():  # type: ignore[attr-defined]
            part.zero_()
        handle.committed.result(60)
    shutdown(60)


def load_shards(root: Path, names: list[str]) -> None:
    wanted = Int8Rows.make(ROWS, COLUMNS, 1)
    for name in names:
        for placements in LAYOUTS.values():
            if len(placements) > 1 and dist.get_world_size() in (1, 2, 3):
                continue
            got = {"model": {"w": sharded(2, placements)}}
            load_state_dict(root / name, got)
            assert_shard(got["model"]["w"], wanted)
        whole = {"model": {"w": Int8Rows.make(ROWS, COLUMNS, 2)}}
        load_state_dict(root / name, whole)
        assert_shard(whole["model"]["w"], wanted)


@pytest.mark.parametrize("num_savers", [2, 4])
def test_shards_reshard(tmp_path: Path, num_savers: int) -> None:
    run_ranks(num_savers, save_shards, tmp_path)
    names = [path.name for path in tmp_path.iterdir()]
    assert len(names) == (6 if num_savers == 2 else 10)
    for name in names:
        metadata = dcp.FileSystemReader(tmp_path / name).read_metadata().state_dict_metadata
        assert {*metadata} == {f"model.w.{part}" for part in ("qdata", "scale", "table", "__subclass__")}
        sizes = [[*metadata[f"model.w.{part}"].size] for part in ("qdata", "scale", "table")]
        assert sizes == [[ROWS, COLUMNS], [ROWS, 1], [64]], name
        # Stock DCP, without this package's planner, loads the parts whole.
        wanted = Int8Rows.make(ROWS, COLUMNS, 1)
        got = {"model": {"w": {part: torch.zeros_like(getattr(wanted, part)) for part in wanted.names}}}
        dcp.load(got, checkpoint_id=tmp_path / name, no_dist=True)
        for part in wanted.names:
            assert torch.equal(bits(got["model"]["w"][part]), bits(getattr(wanted, part)))
    for num_ranks in (4, 1):
        run_ranks(num_ranks, load_shards, tmp_path, names)


def save_fsdp(root: Path) -> None:
    model = fully_shard(Quantized(1))
    assert type(model.weight.to_local()) is Int8Rows  # type: ignore[operator, union-attr]
    bytecheckpoint.save(root / "live", {"model": model}, "fsdp2")
    bytecheckpoint.save(root / "fast", {"model": model}, "fsdp2", fast_saving=True).committed.result(60)
    save_state_dict(root / "state", model.state_dict())
    shutdown(60)


def load_fsdp(root: Path) -> None:
    wanted = Int8Rows.make(ROWS, COLUMNS, 1)
    for name in ("live", "fast", "state"):
        model = fully_shard(Quantized(2))
        if name == "state":
            load_state_dict(root / name, model.state_dict())
        else:
            result = bytecheckpoint.load(root / name, {"model": model}, "fsdp2")
            assert not result.missing_keys
            assert not result.unexpected_keys
        assert_shard(model.weight, wanted)
        assert torch.equal(model.bias.full_tensor(), torch.ones(ROWS))  # type: ignore[operator, union-attr]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_fsdp2(tmp_path: Path, num_ranks: int) -> None:
    run_ranks(2, save_fsdp, tmp_path)
    run_ranks(num_ranks, load_fsdp, tmp_path)


def scaled(scale: float) -> DTensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return DTensor.from_local(PerTensor.make(4, 6, scale), mesh, [Shard(0)], run_check=False)


def save_scales(root: Path) -> None:
    save_state_dict(root / "same", {"w": scaled(0.5)})
    got = {"w": scaled(0.25)}
    load_state_dict(root / "same", got)
    assert got["w"].to_local().scale == 0.5  # type: ignore[attr-defined]
    own = 0.5 + dist.get_rank()
    for _ in range(2):  # the second plan may come from the cache
        with pytest.raises(InvalidPlanError, match=r"'w\.scale': rank 0 and rank 1 hold different values"):
            save_state_dict(root / "other", {"w": scaled(own)})
        with pytest.raises(CheckpointError, match=r"'w\.scale'"):
            async_save_state_dict(root / "other", {"w": scaled(own)}).committed.result(60)
    dist.barrier()
    assert not (root / "other").exists()
    opaque = Config(tensor_subclasses="opaque")
    save_state_dict(root / "opaque", {"w": scaled(own)}, config=opaque)
    got = {"w": scaled(0.25)}
    load_state_dict(root / "opaque", got, config=Config(allow_pickle=True))
    assert got["w"].to_local().scale == own  # type: ignore[attr-defined]
    shutdown(60)


def test_scales_of_shards_are_not_lost(tmp_path: Path) -> None:
    """A scale that does not follow the shards is saved once if it is the same on all ranks, and refused if not."""
    run_ranks(2, save_scales, tmp_path)


class Halves(Int8Rows):
    """A scale for each two rows."""

    def with_dim(self, function: Any, args: Any, dim: int) -> list[Any]:
        qdata, scale, table = self.parts()
        qdata = function(qdata, *args)
        return [qdata, scale[: (qdata.shape[0] + 1) // 2], table]


def save_halves(root: Path) -> None:
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))

    def halves(rows: tuple[int, int], seed: int) -> DTensor:
        own = rows[rank]
        scale = torch.rand((own + 1) // 2, 1, generator=torch.Generator().manual_seed(seed + rank))
        local = Halves(torch.full((own, 4), seed + rank, dtype=torch.int8), scale, torch.ones(3))
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=(sum(rows), 4), stride=(4, 1))

    save_state_dict(root / "even", {"w": halves((4, 4), 1)})
    got = {"w": halves((4, 4), 7)}
    load_state_dict(root / "even", got)
    for a, b in zip(got["w"].to_local().parts(), halves((4, 4), 1).to_local().parts(), strict=True):  # type: ignore[attr-defined]
        assert torch.equal(a, b)
    with pytest.raises(CheckpointError, match=r"'w': a Halves of \[5, 4\].*'scale': the shard ends within a block"):
        save_state_dict(root / "odd", {"w": halves((3, 2), 1)})
    dist.barrier()
    assert not (root / "odd").exists()
    shutdown(60)


def test_a_shard_that_ends_within_a_block_is_refused(tmp_path: Path) -> None:
    run_ranks(2, save_halves, tmp_path)


class Blocks(Int8Rows):
    """It cannot be sliced at all."""

    def has_dim(self, name: str, dim: int) -> bool:
        raise NotImplementedError


def save_blocks(root: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    blocks = Blocks(torch.ones(3, 6, dtype=torch.int8), torch.ones(2, 1), torch.ones(64))
    value = DTensor.from_local(blocks, mesh, [Shard(0)], run_check=False)
    assert parts_of(value, "w") is None  # nothing says whether the table follows the rows
    shutdown(60)


def test_shards_that_say_nothing_of_their_parts(tmp_path: Path) -> None:
    run_ranks(2, save_blocks, tmp_path)
