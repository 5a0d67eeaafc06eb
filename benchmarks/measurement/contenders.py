# SPDX-License-Identifier: Apache-2.0
"""The contenders: each saves and loads a state, durably and into existing tensors.

A ``save`` returns when files, their directory and its entry are on the disk. A ``load`` leaves everything in the
state's own tensors, and a contender that returns new tensors pays for the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import bytecheckpoint
from measurement.conditions import sync_directories, sync_tree
from measurement.raw_disk import Disk, has_direct_io
from measurement.results import CEILING
from measurement.states import State, copy_into
from measurement.stock_dcp import stock_dcp


@dataclass(frozen=True)
class Contender:
    """One way to save and load a state.

    Attributes:
        label: Its name in tables and figures.
        save: Writes the state into a directory that does not exist yet.
        load: Reads that directory back into the state.
        holds_state: False for the disk itself, which moves the same number of bytes but not the state's.
    """

    label: str
    save: Callable[[State, Path], None]
    load: Callable[[State, Path], None]
    holds_state: bool = True


OURS = "bytecheckpoint"
OUR_PLANNERS = "bytecheckpoint-planners"
AS_GIVEN = "bytecheckpoint-as-given"
REGISTERED = "bytecheckpoint-registered"
BASELINE = "dcp-2"


def _dcp(label: str, thread_count: int) -> Contender:
    def save(state: State, path: Path) -> None:
        writer = dcp.FileSystemWriter(path, thread_count=thread_count)
        with stock_dcp():
            dcp.save(state.tree, storage_writer=writer, no_dist=True)
        sync_directories(path)

    def load(state: State, path: Path) -> None:
        with stock_dcp():
            dcp.load(state.tree, storage_reader=dcp.FileSystemReader(path), no_dist=True)

    return Contender(label, save, load)


def _torch_save() -> Contender:
    def save(state: State, path: Path) -> None:
        path.mkdir()
        torch.save(state.tree, path / "state.pt")
        sync_tree(path)

    def load(state: State, path: Path) -> None:
        copy_into(state.tree, torch.load(path / "state.pt", mmap=True, weights_only=True))

    return Contender("torch.save, torch.load(mmap)", save, load)


def _safetensors() -> Contender:
    from safetensors.torch import load_file, save_file

    def save(state: State, path: Path) -> None:
        path.mkdir()
        save_file(state.named_tensors(), path / "state.safetensors")
        sync_tree(path)

    def load(state: State, path: Path) -> None:
        loaded = load_file(path / "state.safetensors")
        for name, tensor in state.named_tensors().items():
            tensor.copy_(loaded[name])

    return Contender("safetensors", save, load)


def _torch_checkpointing() -> Contender:
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    def manager() -> Any:
        config = CheckpointManager.Config.with_sync_save()
        # Its default, an O_DIRECT stream, fails on ext4 with EINVAL.
        config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
        return CheckpointManager(config)

    def save(state: State, path: Path) -> None:
        saver = manager()
        saver.save(str(path), {"state": state.tree})
        saver.close()
        sync_tree(path)

    def load(state: State, path: Path) -> None:
        loader = manager()
        copy_into(state.tree, loader.load(str(path), into={"state": state.tree})["state"])
        loader.close()

    return Contender("torch_checkpointing", save, load)


def _bytecheckpoint(label: str, config: bytecheckpoint.Config) -> Contender:
    def save(state: State, path: Path) -> None:
        dcp.save(state.tree, storage_writer=bytecheckpoint.BcpWriter(path, config=config), no_dist=True)

    def load(state: State, path: Path) -> None:
        dcp.load(state.tree, storage_reader=bytecheckpoint.BcpReader(path, config=config), no_dist=True)

    return Contender(label, save, load)


def _bytecheckpoint_planners() -> Contender:
    def save(state: State, path: Path) -> None:
        planner = bytecheckpoint.BcpSavePlanner()
        dcp.save(state.tree, storage_writer=bytecheckpoint.BcpWriter(path), planner=planner, no_dist=True)

    def load(state: State, path: Path) -> None:
        planner = bytecheckpoint.BcpLoadPlanner()
        dcp.load(state.tree, storage_reader=bytecheckpoint.BcpReader(path), planner=planner, no_dist=True)

    return Contender("bytecheckpoint, its planners", save, load)


def _registered() -> Contender:
    """Returns a contender that calls DCP as a program does after ``bytecheckpoint.register()``."""

    def save(state: State, path: Path) -> None:
        with bytecheckpoint.registered():
            dcp.save(state.tree, checkpoint_id=path, no_dist=True)

    def load(state: State, path: Path) -> None:
        with bytecheckpoint.registered():
            dcp.load(state.tree, checkpoint_id=path, no_dist=True)

    return Contender("bytecheckpoint, registered", save, load)


def _disk(label: str, num_threads: int) -> Contender:
    disk = Disk(num_threads)

    def save(state: State, path: Path) -> None:
        path.mkdir()
        disk.write(path / "raw", state.num_bytes)

    def load(state: State, path: Path) -> None:
        disk.read(path / "raw", state.num_bytes)

    return Contender(label, save, load, holds_state=False)


_MAKERS: dict[str, Callable[[], Contender]] = {
    "dcp-1": lambda: _dcp("DCP, 1 thread", 1),
    BASELINE: lambda: _dcp("DCP, 2 threads", 2),
    "torch.save": _torch_save,
    "safetensors": _safetensors,
    "torch_checkpointing": _torch_checkpointing,
    OURS: lambda: _bytecheckpoint("bytecheckpoint, plain call", bytecheckpoint.Config()),
    OUR_PLANNERS: _bytecheckpoint_planners,
    AS_GIVEN: lambda: _bytecheckpoint("bytecheckpoint, DCP's planner", bytecheckpoint.Config(planning="as given")),
    REGISTERED: _registered,
    "disk-1": lambda: _disk("disk, 1 thread", 1),
    "disk-2": lambda: _disk("disk, 2 threads", 2),
}
NAMES = tuple(name for name in _MAKERS if name not in CEILING)


def reason_to_leave_out(name: str, state: State, directory: Path) -> str | None:
    """Returns why a contender cannot take part here, or None."""
    if name in ("safetensors", "torch_checkpointing") and find_spec(name) is None:
        return "not installed"
    if name == "safetensors" and state.has_plain_values:
        return "stores tensors only"
    if name in CEILING and not has_direct_io(directory):
        return "this file system has no O_DIRECT"
    return None


def make_contenders(names: Iterable[str]) -> dict[str, Contender]:
    return {name: _MAKERS[name]() for name in names}
