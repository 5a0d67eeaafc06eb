# SPDX-License-Identifier: Apache-2.0
"""Ranks that link what is unchanged: frozen shards, copies that one of them writes, and other shards than before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import bytecheckpoint
from bytecheckpoint import BcpWriter, Config

LINKS = Config(link_unchanged=True)
ROWS, WIDTH = 600, 500


def state(step: int, dim: int = 0) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(float(ROWS * WIDTH)).reshape(ROWS, WIDTH)
    return {
        "frozen": distribute_tensor(whole, mesh, [Shard(dim)]),
        "trained": distribute_tensor(torch.full((ROWS, 4), float(step)), mesh, [Shard(0)]),
        "everywhere": torch.arange(150_000),
        "step": step,
    }


def check(path: Path, step: int) -> None:
    into = {name: torch.zeros_like(value) for name, value in state(0).items() if name != "step"}
    bytecheckpoint.load_state_dict(path, into)
    for name, value in into.items():
        wanted = state(step)[name]
        if isinstance(value, DTensor):
            value, wanted = value.to_local(), wanted.to_local()
        assert torch.equal(value, wanted), name


def save_and_link(run: Path) -> None:
    linked = []
    for step in range(1, 6):
        dim = 1 if step == 4 else 0
        path = run / f"step-{step}"
        if step % 2:
            report = bytecheckpoint.async_save_state_dict(path, state(step, dim), config=LINKS).committed.result()
        else:
            writer = BcpWriter(path, config=LINKS)
            dcp.save(state(step, dim), storage_writer=writer)
            assert writer.last_report is not None
            report = writer.last_report
        linked.append(report.total_linked_bytes if dist.get_rank() == 0 else report.bytes_linked)
        dist.barrier()
        check(path, step)
    frozen = ROWS * WIDTH * 4
    if dist.get_rank() == 0:
        assert linked[0] == 0
        assert min(linked[1:3]) > frozen + 150_000 * 8  # of all ranks, and each copy once
        assert linked[3] < frozen  # cut the other way
        assert bytecheckpoint.verify(run / "step-3").is_whole
    dist.barrier()


def test_ranks_link_their_parts(tmp_path: Path) -> None:
    run_ranks(2, save_and_link, tmp_path)
