# SPDX-License-Identifier: Apache-2.0
"""Planners may return the same memory for every item, also on several ranks that share their reading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.equality import assert_equal
from support.ranks import run_ranks
from support.reusing_planners import LOAD_HOOKS, SAVE_HOOKS, reusing
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from bytecheckpoint import BcpLoadPlanner, BcpReader, BcpSavePlanner, BcpWriter, Config, verify
from bytecheckpoint.dcp import rank_load


def state(*, filled: bool) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,))
    made: dict[str, Any] = {"words": ["a", 1] if filled else [], "more": [2, 3] if filled else []}
    for n in range(1, 5):
        tensor = (torch.arange(35.0) + 100 * n).reshape(5, 7) if filled else torch.zeros(5, 7)
        for name, placement in (("rows", Shard(0)), ("columns", Shard(1)), ("copies", Replicate())):
            made[f"{name}{n}"] = distribute_tensor(tensor.clone(), mesh, [placement], src_data_rank=None)
        made[f"plain{n}"] = tensor
    return made


def save(path: str, planner: Any, writer: Any = BcpWriter) -> None:
    dcp.save(state(filled=True), storage_writer=writer(path), planner=planner)


def load(path: str, planner: Any, reader: Any) -> dict[str, Any]:
    got = state(filled=False)
    dcp.load(got, storage_reader=reader, planner=planner)
    return got


def save_with_every_hook(path: str, base: Any, writer: Any) -> None:
    for hook in SAVE_HOOKS:
        folder = f"{path}/{hook}"
        save(folder, reusing(hook, base), writer)
        assert_equal(load(folder, DefaultLoadPlanner(), dcp.FileSystemReader(folder)), state(filled=True))


@pytest.mark.parametrize("writer", [dcp.FileSystemWriter, BcpWriter])
@pytest.mark.parametrize("base", [DefaultSavePlanner, BcpSavePlanner])
def test_every_item_is_written_before_the_next_is_resolved(tmp_path: Path, base: Any, writer: Any) -> None:
    run_ranks(2, save_with_every_hook, str(tmp_path), base, writer)
    assert writer is not BcpWriter or all(verify(tmp_path / hook).is_whole for hook in SAVE_HOOKS)


def load_with_every_hook(path: str, base: Any, reading: str | None, copy_bytes: int) -> None:
    save(path, DefaultSavePlanner())
    rank_load._COPY_BYTES = copy_bytes
    for hook in LOAD_HOOKS:
        reader: Any = dcp.FileSystemReader(path)
        if reading is not None:
            reader = BcpReader(path, config=Config(shared_reading=reading))
        assert_equal(load(path, reusing(hook, base), reader), state(filled=True))
        assert reading is None or reader.last_report.reading == reading


# A tensor that fits into no host copy is read in place. A whole tensor has 140 bytes, a shard fewer.
@pytest.mark.parametrize("copy_bytes", [1, 80, 1 << 20])
@pytest.mark.parametrize("reading", [None, "independent", "cooperative"])
@pytest.mark.parametrize("base", [DefaultLoadPlanner, BcpLoadPlanner])
def test_every_item_is_committed_before_the_next_is_resolved(
    tmp_path: Path, base: Any, reading: str | None, copy_bytes: int
) -> None:
    run_ranks(2, load_with_every_hook, str(tmp_path), base, reading, copy_bytes)
