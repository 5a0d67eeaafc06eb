# SPDX-License-Identifier: Apache-2.0
"""DTensors of which a rank holds several pieces, or whose dims are not sharded from left to right, at random."""

from __future__ import annotations

import copy
import itertools
import math
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.ranks import run_ranks
from support.subclasses import PerTensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

import bytecheckpoint
from bytecheckpoint import BcpLoadPlanner, BcpReader, BcpSavePlanner, BcpWriter, Config
from bytecheckpoint.compat.private_names import new_dtensor
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.tensors.dtensor_pieces import pieces_of

_RANKS = 4
_CASES = 60
_MESHES = ((4,), (2, 2), (1, 4), (4, 1), (2, 1, 2))


def meshes() -> list[DeviceMesh]:
    """Returns meshes of all ranks, some axes of one, and one of two ranks of the four."""
    made = [init_device_mesh("cpu", shape, mesh_dim_names=tuple("abc"[: len(shape)])) for shape in _MESHES]
    return [*made, made[-1]["a", "c"], DeviceMesh("cpu", [1, 3])]


def numbered(shape: Sequence[int]) -> torch.Tensor:
    return torch.arange(float(math.prod(shape))).reshape(*shape)


def distributed(whole: torch.Tensor, mesh: DeviceMesh, placements: list[Placement]) -> DTensor:
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


def shard_order(whole: torch.Tensor, mesh: DeviceMesh, chance: random.Random) -> DTensor:
    return in_order(whole, mesh, chance.sample(range(mesh.ndim), mesh.ndim))


def in_order(whole: torch.Tensor, mesh: DeviceMesh, axes: list[int]) -> DTensor:
    """Returns a DTensor whose rows are sharded by the axes of the mesh in this order."""
    like: Any = distributed(whole, mesh, [Shard(0)] * mesh.ndim)
    local = whole
    for axis in axes:
        parts = local.chunk(mesh.size(axis))
        at = mesh.get_local_rank(axis)
        local = parts[at] if at < len(parts) else local[:0]
    order = (type(like._spec.shard_order[0])(0, tuple(axes)),)
    spec = type(like._spec)(mesh, like.placements, tensor_meta=like._spec.tensor_meta, shard_order=order)
    return new_dtensor(local.clone(), spec, requires_grad=False)


def strided(whole: torch.Tensor, mesh: DeviceMesh, chance: random.Random) -> DTensor:
    placements: list[Placement] = [
        chance.choice([_StridedShard(0, split_factor=chance.choice([2, 3, 4])), Shard(0), Replicate()])
        for _ in range(mesh.ndim)
    ]
    indices = torch.arange(whole.shape[0])
    for axis, placement in enumerate(placements):
        if placement.is_replicate():
            continue
        at = mesh.get_local_rank(axis)
        parts = [block.chunk(mesh.size(axis)) for block in indices.chunk(getattr(placement, "split_factor", 1))]
        indices = torch.cat([part[at] if at < len(part) else indices[:0] for part in parts])
    return DTensor.from_local(
        whole[indices], mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def reshaped(whole: torch.Tensor, mesh: DeviceMesh, chance: random.Random) -> DTensor:
    """Returns what torch makes of a sharded tensor by public calls."""
    del whole
    sizes = [chance.choice([2, 3, 4, 8]) for _ in range(chance.choice([2, 3]))]
    source = numbered(sizes)
    placements = [chance.choice([Shard(chance.randrange(len(sizes))), Replicate()]) for _ in range(mesh.ndim)]
    dtensor = distributed(source, mesh, placements)
    joined = chance.randrange(len(sizes) - 1)
    shape = [*sizes[:joined], sizes[joined] * sizes[joined + 1], *sizes[joined + 2 :]]
    how = chance.choice(["reshape", "view", "flatten"])
    if how == "flatten":
        return dtensor.flatten(joined, joined + 1)
    return dtensor.reshape(shape) if how == "reshape" else dtensor.view(shape)


def simple(whole: torch.Tensor, mesh: DeviceMesh, chance: random.Random) -> DTensor:
    options = [Replicate(), Shard(0), Shard(1), Shard(-1)]
    return distributed(whole, mesh, [chance.choice(options) for _ in range(mesh.ndim)])


def as_torch_sees_it(make: Any, *args: Any) -> tuple[DTensor | None, torch.Tensor | None]:
    """Returns a DTensor and the whole of it; None if torch refuses either."""
    try:
        made = make(*args)
        return made, made.full_tensor()
    except (RuntimeError, ValueError, AssertionError, NotImplementedError, IndexError):
        return None, None


def cases(seed: int) -> tuple[dict[str, DTensor], dict[str, torch.Tensor]]:
    """Returns DTensors of this rank, and what each is as a whole. What torch itself refuses or mixes up is left out."""
    of_ranks = meshes()
    sharded: dict[str, DTensor] = {}
    wholes: dict[str, torch.Tensor] = {}
    chance = random.Random(seed)
    for number in range(_CASES):
        make, mesh = chance.choice([shard_order, strided, reshaped, reshaped, simple]), chance.choice(of_ranks)
        whole = numbered((chance.choice([1, 5, 6, 8, 12, 24]), 3))
        own = random.Random(chance.randrange(1 << 30))
        made = full = None
        if mesh.get_coordinate() is not None:
            made, full = as_torch_sees_it(make, whole, mesh, own)
        of_all: list[Any] = [None] * _RANKS
        dist.all_gather_object(of_all, (mesh.get_coordinate() is None, None if full is None else full.tolist()))
        seen = [None if full is None else torch.tensor(full) for is_outside, full in of_all if not is_outside]
        if not all(full is not None and torch.equal(full, numbered(full.shape)) for full in seen):
            continue
        key = f"{number} {make.__name__}"
        wholes[key] = numbered(seen[0].shape)
        if made is not None:
            sharded[key] = made
    return sharded, wholes


def emptied(sharded: dict[str, DTensor], dtype: torch.dtype) -> dict[str, DTensor]:
    targets = {}
    for key, dtensor in sharded.items():
        spec = copy.copy(dtensor._spec)
        spec.tensor_meta = spec.tensor_meta._replace(dtype=dtype)
        local = torch.full_like(dtensor.to_local(), -1.0, dtype=dtype)
        targets[key] = new_dtensor(local, spec, requires_grad=False)
    return targets


def save_and_load(path: str, seed: int) -> tuple[int, int]:
    sharded, wholes = cases(seed)
    bytecheckpoint.save_state_dict(f"{path}/ours", dict(sharded))
    bytecheckpoint.async_save_state_dict(f"{path}/background", dict(sharded)).committed.result()
    dcp.save(dict(sharded), storage_writer=dcp.FileSystemWriter(f"{path}/stock"), planner=BcpSavePlanner())
    for name in ("ours", "background", "stock"):
        got = {key: torch.full_like(whole, -1.0) for key, whole in wholes.items()}
        dcp.load(got, checkpoint_id=f"{path}/{name}")
        for key, whole in wholes.items():
            assert torch.equal(got[key], whole), (name, key, sharded.get(key), got[key])
    bytecheckpoint.save_state_dict(f"{path}/whole", dict(wholes))
    for name, how, dtype in itertools.product(
        ("whole", "ours"), (bytecheckpoint.load_state_dict, by_classes, by_stock_reader), (torch.float32, torch.float64)
    ):
        targets = emptied(sharded, dtype)
        how(f"{path}/{name}", dict(targets))
        for key, target in targets.items():
            assert torch.equal(target.to_local(), sharded[key].to_local().to(dtype)), (name, how, key, target)
    pieces = [pieces_of(dtensor) for dtensor in sharded.values()]
    return len(wholes), sum(of_one is not None and len(of_one) > 1 for of_one in pieces)


def by_classes(path: str, state: dict[str, Any]) -> None:
    dcp.load(state, storage_reader=BcpReader(path), planner=BcpLoadPlanner())


def by_stock_reader(path: str, state: dict[str, Any]) -> None:
    dcp.load(state, storage_reader=dcp.FileSystemReader(path), planner=BcpLoadPlanner())


@pytest.mark.parametrize("seed", range(3))
def test_random_dtensors_are_stored_and_filled_where_full_tensor_has_them(tmp_path: Path, seed: int) -> None:
    for num_cases, num_in_pieces in run_ranks(_RANKS, save_and_load, str(tmp_path), seed, limit_s=240):
        assert num_cases > _CASES // 2
        assert num_in_pieces > 3


class Ragged(Replicate):
    """A placement of another package, which DCP takes for a replica."""


# What the error says of DTensors that cannot be divided.
_REFUSALS = {
    "partial": "partial placements",
    "ragged": "not known which elements a placement of class Ragged gives a rank",
    "longer": r"give this rank \[2, 6\] of \[4, 6\], but its local tensor is of \[4, 6\]",
    "many": "in 131,072 pieces, more than 65,536",
    "subclass": "not a PerTensor",
}


def refused() -> dict[str, DTensor]:
    mesh = init_device_mesh("cpu", (2,))
    whole = numbered((4, 6))
    spec = copy.copy(distributed(whole, mesh, [Replicate()])._spec)
    spec.placements = (Ragged(),)
    columns = distributed(whole, mesh, [Shard(1)]).reshape(24)
    twice = distributed(whole, init_device_mesh("cpu", (2, 1)), [Shard(0), Shard(0)])
    quantized = PerTensor(columns.to_local(), torch.ones(1))
    return {
        "partial": DTensor.from_local(whole, mesh, [Partial()], run_check=False),
        "ragged": new_dtensor(whole, spec, requires_grad=False),
        "longer": new_dtensor(whole, twice._spec, requires_grad=False),
        "many": distributed(torch.zeros(1 << 17, 2), mesh, [Shard(1)]).reshape(1 << 18),
        "subclass": new_dtensor(quantized, columns._spec, requires_grad=False),
    }


def fail_to_save_and_load(path: str) -> dict[str, str]:
    whole = {"good": torch.ones(4)}
    errors: dict[str, str] = {}
    for key, dtensor in refused().items():
        bytecheckpoint.save_state_dict(f"{path}/{key}-whole", {**whole, key: torch.ones(dtensor.shape)})
        calls: dict[str, Any] = {
            "save": bytecheckpoint.save_state_dict,
            "async": lambda path, state: bytecheckpoint.async_save_state_dict(path, state).committed.result(),
            "load": lambda path, state: bytecheckpoint.load_state_dict(f"{path}-whole", state),
        }
        for name, call in calls.items():
            try:
                call(f"{path}/{key}", {**whole, key: dtensor})
                errors[f"{name} {key}"] = "no error"
            except CheckpointError as error:
                errors[f"{name} {key}"] = str(error)
        assert not Path(f"{path}/{key}/.metadata").exists()
    return errors


def test_what_nobody_knows_how_to_divide_is_refused_on_every_rank(tmp_path: Path) -> None:
    for errors in run_ranks(2, fail_to_save_and_load, str(tmp_path), limit_s=120):
        for call, message in errors.items():
            key = call.split()[1]
            assert re.search(f"'{key}': .*{_REFUSALS[key]}", message), (call, message)


AS_GIVEN = Config(planning="as given")


def use_dcps_planners(path: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    state = {
        "flattened": distributed(numbered((4, 4)), mesh, [Shard(1), Shard(0)]).reshape(16),
        "ordered": in_order(numbered((8, 3)), mesh, [1, 0]),
    }
    bytecheckpoint.save_state_dict(f"{path}/whole", {key: numbered(dtensor.shape) for key, dtensor in state.items()})
    for key, dtensor in state.items():
        before = dtensor.to_local().clone()
        pattern = f"'{key}': a DTensor of which this rank holds several pieces"
        with pytest.raises(CheckpointException, match=pattern):
            dcp.load({key: dtensor}, storage_reader=BcpReader(f"{path}/whole", config=AS_GIVEN))
        assert torch.equal(dtensor.to_local(), before)
        pattern = pattern if key == "ordered" else "key:flattened has overlapping chunks"  # DCP's planner sees that
        with pytest.raises(CheckpointException, match=pattern):
            dcp.save({key: dtensor}, storage_writer=BcpWriter(f"{path}/step", config=AS_GIVEN))
        assert not Path(f"{path}/step/.metadata").exists()


def test_dcps_planners_are_refused(tmp_path: Path) -> None:
    run_ranks(4, use_dcps_planners, str(tmp_path), limit_s=120)


def save_on_a_permuted_mesh(path: str) -> None:
    mesh, whole = DeviceMesh("cpu", [2, 0, 3, 1]), numbered((8, 3))
    state = {"w": distribute_tensor(whole, mesh, [Shard(0)])}
    assert torch.equal(state["w"].full_tensor(), whole)
    bytecheckpoint.save_state_dict(f"{path}/ours", state)
    dcp.save(dict(state), checkpoint_id=f"{path}/stock")
    got = {"w": torch.zeros(8, 3)}
    dcp.load(got, checkpoint_id=f"{path}/ours")
    assert torch.equal(got["w"], whole)
    replicas = DeviceMesh("cpu", [[0, 1], [3, 2]])
    other = {"w": distribute_tensor(torch.zeros(8, 3), replicas, [Replicate(), Shard(0)])}
    bytecheckpoint.load_state_dict(f"{path}/ours", other)
    assert torch.equal(other["w"].full_tensor(), whole)
    bytecheckpoint.save_state_dict(f"{path}/replicas", other)
    assert torch.equal(bytecheckpoint.read(f"{path}/replicas")["w"], whole)
    # Of a checkpoint of DCP's nobody knows whether its rows are in their places.
    with pytest.raises(CheckpointError, match=r"'w': its mesh .* DCP wrote the checkpoint"):
        bytecheckpoint.load_state_dict(f"{path}/stock", state)
    with pytest.raises(CheckpointException, match="in another order than that of their process groups"):
        dcp.save(state, storage_writer=BcpWriter(f"{path}/step", config=AS_GIVEN))


def test_meshes_in_another_order_than_their_groups(tmp_path: Path) -> None:
    """Rows are stored where ``full_tensor()`` has them, and not where DCP computes that they are."""
    run_ranks(4, save_on_a_permuted_mesh, str(tmp_path), limit_s=120)
