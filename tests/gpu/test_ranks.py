# SPDX-License-Identifier: Apache-2.0
"""Several ranks with tensors on a device, whose default group is one of NCCL.

NCCL refuses two ranks on one device when they first exchange something. So these tests also show that nothing of ours
is sent over NCCL: the ranks share a device, and a single message would fail.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.equality import assert_equal
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

import bytecheckpoint
from bytecheckpoint import (
    BcpReader,
    BcpWriter,
    Config,
    async_save_state_dict,
    load_state_dict,
    new_group,
    registered,
    save_state_dict,
)

pytestmark = pytest.mark.timeout(180)

RANKS = 4
LIMIT_S = 60.0
SHAPE = (64, 48)
CONFIG = Config(tree_topo_threshold=2, shared_reading="cooperative")  # as on many ranks


@contextmanager
def default_group(backend: str, store: str) -> Iterator[None]:
    """Makes another default group than that of gloo, which these ranks begin and end with."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group(backend, init_method=f"file://{store}.during", rank=rank, world_size=size)
    yield
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{store}.after", rank=rank, world_size=size)


def full(number: int) -> torch.Tensor:
    return torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float32).view(SHAPE) * (number + 1)


def made(turned: bool, filled: bool) -> dict[str, Any]:
    """Returns tensors of this rank on the device, laid out in one of two ways."""
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    rank = dist.get_rank()
    placements: list[Placement] = [Shard(0), Shard(1), Replicate()]
    state: dict[str, Any] = {}
    for number in range(6):
        placement = placements[(number + turned) % 3]
        value = full(number) if filled else torch.zeros(SHAPE)
        local = value.chunk(RANKS, placement.dim)[rank] if isinstance(placement, Shard) else value
        local = local.contiguous().cuda()
        state[f"d{number}"] = DTensor.from_local(
            local, mesh, [placement], run_check=False, shape=torch.Size(SHAPE), stride=(SHAPE[1], 1)
        )
    state["plain"] = torch.full((1000,), 7.0 * filled, device="cuda")
    return state


def locals_of(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {key: (value.to_local() if isinstance(value, DTensor) else value).cpu() for key, value in state.items()}


def check_loaded(path: str, how: str) -> None:
    for turned in (False, True):
        got = made(turned, filled=False)
        if how == "ours":
            load_state_dict(path, got, config=CONFIG)
        else:
            dcp.load(got, storage_reader=BcpReader(path, config=CONFIG))
        assert_equal(locals_of(got), locals_of(made(turned, filled=True)))


def with_our_functions(folder: str, backend: str) -> None:
    with default_group(backend, f"{folder}/store"):
        save_state_dict(f"{folder}/saved", made(False, filled=True), config=CONFIG)
        check_loaded(f"{folder}/saved", "ours")
        for number in range(3):
            handle = async_save_state_dict(f"{folder}/async{number}", made(True, filled=True), config=CONFIG)
            handle.staged.result(LIMIT_S)
            handle.committed.result(LIMIT_S)
        check_loaded(f"{folder}/async2", "ours")
        # The default group ends behind the last save.
        last = async_save_state_dict(f"{folder}/last", made(False, filled=True), config=CONFIG)
    last.committed.result(LIMIT_S)


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_our_functions(tmp_path: Path, backend: str) -> None:
    run_ranks(RANKS, with_our_functions, str(tmp_path), backend, limit_s=120)
    for name in ("saved", "async0", "last"):
        assert bytecheckpoint.verify(tmp_path / name).is_whole
        got = {f"d{number}": torch.zeros(SHAPE) for number in range(6)}
        dcp.load(got, checkpoint_id=tmp_path / name, no_dist=True)
        assert_equal(got, {f"d{number}": full(number) for number in range(6)})


def with_dcp(folder: str, backend: str) -> None:
    with default_group(backend, f"{folder}/store"):
        group = None if "gloo" in backend else new_group()
        state = made(False, filled=True)
        dcp.save(state, storage_writer=BcpWriter(f"{folder}/saved", config=CONFIG), process_group=group)
        overlap = Config(tree_topo_threshold=2, overlap_staging=True)
        writer = BcpWriter(f"{folder}/async", config=overlap)
        response: Any = dcp.async_save(state, storage_writer=writer, process_group=group)
        response.staging_completion.result(LIMIT_S)
        for value in state.values():
            (value.to_local() if isinstance(value, DTensor) else value).zero_()
        response.upload_completion.result(LIMIT_S)
        with registered(config=CONFIG):
            dcp.save(made(True, filled=True), checkpoint_id=f"{folder}/registered", process_group=group)
        for name in ("saved", "async", "registered"):
            got = made(True, filled=False)
            dcp.load(got, storage_reader=BcpReader(f"{folder}/{name}", config=CONFIG), process_group=group)
            assert_equal(locals_of(got), locals_of(made(True, filled=True)))


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_the_functions_of_dcp(tmp_path: Path, backend: str) -> None:
    run_ranks(RANKS, with_dcp, str(tmp_path), backend, limit_s=120)
    for name in ("saved", "async", "registered"):
        assert bytecheckpoint.verify(tmp_path / name).is_whole


def on_nccl_alone(folder: str) -> None:
    """One rank, whose only group is NCCL's, over which DCP sends its own objects."""
    with default_group("nccl", f"{folder}/store"):
        dist.all_reduce(torch.ones(10, device="cuda"))
        mesh = init_device_mesh("cuda", (1,))
        values = full(0).cuda()
        state = {"d": DTensor.from_local(values, mesh, [Shard(0)]), "step": 3}
        dcp.save(state, storage_writer=BcpWriter(f"{folder}/saved"))
        handle = async_save_state_dict(f"{folder}/async", state)
        handle.staged.result(LIMIT_S)
        dist.all_reduce(torch.ones(10, device="cuda"))
        handle.committed.result(LIMIT_S)
        with registered():
            dcp.save(state, checkpoint_id=f"{folder}/registered")
        for name in ("saved", "async", "registered"):
            got: Any = {"d": DTensor.from_local(torch.zeros_like(values), mesh, [Shard(0)]), "step": 0}
            dcp.load(got, storage_reader=BcpReader(f"{folder}/{name}"))
            assert got["step"] == 3
            assert torch.equal(got["d"].to_local(), values)
        bytecheckpoint.shutdown()


def test_a_group_of_nccl_alone(tmp_path: Path) -> None:
    run_ranks(1, on_nccl_alone, str(tmp_path))
