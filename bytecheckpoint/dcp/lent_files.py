# SPDX-License-Identifier: Apache-2.0
"""Files on the disk of a machine that its holder lends to others: it has their descriptors, and no memory of theirs.

So a step of which each machine has a part on a disk of its own is read like one in the memory of several machines.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from bytecheckpoint.checkpoint.commit_order import commit_order
from bytecheckpoint.config import Config
from bytecheckpoint.dcp.memory_machines import Machines
from bytecheckpoint.distributed.agreement import all_together
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.native import _core
from bytecheckpoint.storage.folders import folder_at, known
from bytecheckpoint.storage.memory.client import HolderClient
from bytecheckpoint.storage.olmo_steps import MODEL_AND_OPTIM
from bytecheckpoint.storage.parts import PARTS
from bytecheckpoint.storage.paths import below
from bytecheckpoint.storage.small_files import storage_errors
from bytecheckpoint.storage.step_folder import step_paths
from bytecheckpoint.storage.tiers import MemoryTier, Tiers, lend_near

__all__ = ["lend", "lend_committed"]

_MARK = ".metadata"

_logger = logging.getLogger("bytecheckpoint")


def lend_committed(tiers: Tiers, group: dist.ProcessGroup, what: str, acts: bool, config: Config) -> None:
    """Lends all steps that have a commit mark on the disk of this machine, and knows what others lend. Collective.

    Args:
        tiers: Places of the run.
        group: The ranks; more than one.
        what: What is being done, for errors.
        acts: Whether this rank lends what is on its disk.
        config: Settings.

    Raises:
        StorageError: A disk cannot be read, or machines cannot reach one another.
    """
    run = _run(tiers)
    call = what, str(tiers.near)
    all_together(group, *call, lambda: _return_all(run.in_memory) if acts else None)
    all_together(group, *call, lambda: _lend_steps(run.in_memory, Path(tiers.near)) if acts else None)
    Machines(run, group, call, config.stall_timeout_s, looks=True).adopt()
    lend_near(tiers, run.in_memory)


def lend(tiers: Tiers, group: dist.ProcessGroup, path: str, acts: bool, config: Config) -> None:
    """Lends what was just committed, and what is not lent yet, and returns what is gone from the disk. Collective.

    Args:
        tiers: Places of the run.
        group: The ranks; more than one.
        path: The checkpoint, below the near place.
        acts: Whether this rank lends what is on its disk.
        config: Settings.

    Raises:
        StorageError: Machines cannot reach one another.
    """
    run = _run(tiers)
    name = path.removeprefix(f"{tiers.near}/")

    def lend_here() -> list[tuple[str, int, int, str]]:
        if acts:
            _return_gone(run.in_memory, Path(tiers.near))
            lent = {*HolderClient(run.in_memory).folders()}
            _lend_steps(run.in_memory, Path(tiers.near), without=lent - {name.split("/")[0]})
        return _core.Checkpoint.open(path, max_whole_bytes=0).files()

    call = "save", path
    machines = Machines(run, group, call, config.stall_timeout_s)
    files = all_together(group, *call, lend_here)
    lend_near(tiers, run.in_memory)
    if machines.peers is not None:
        machine_of = {rank: at for at, machine in enumerate(machines.peers.machines) for rank in machine.ranks}
        key = HolderClient(str(below(run.in_memory, *name.split("/")))).key
        machines.peers.note(
            {key(of): machine_of[rank] for of, _, rank, _ in files},
            (tiers.most_waiting + 2) * len(PARTS),
        )


def _run(tiers: Tiers) -> Tiers:
    """Returns what stands for the files that are lent: a run in memory of another name than the memory tier has."""
    run = Tiers(memory=replace(tiers.memory or MemoryTier(), name=f"lent {tiers.near}", replicas=0))
    known(run.in_memory, tiers.config)
    return run


def _return_all(url: str) -> None:
    with storage_errors("delete", url):
        held = HolderClient(url)
        held.delete([each.name for each in held.everything("")])


def _return_gone(url: str, near: Path) -> None:
    """Gives up the files of steps that were removed, whose space is only free then."""
    there = {*folder_at(near).folders()}
    with storage_errors("delete", url):
        held = HolderClient(url)
        held.delete([each.name for each in held.everything("") if each.name.partition("/")[0] not in there])


def _lend_steps(url: str, near: Path, without: Collection[str] = ()) -> None:
    if folder_at(near).is_gone():
        return
    steps = [(step, path) for step, path in step_paths(near) if Path(path).name not in without]
    # The holder notes the order of commits, which is not that of marks where a clock was set back, or steps are copies.
    for _, path in reversed(commit_order(near, steps, "").by_time):
        name = Path(path).name
        marked = [
            (changed, folder)
            for folder in (name, *(f"{name}/{part}" for part in (*PARTS, MODEL_AND_OPTIM)))
            if (changed := folder_at(near / folder).changed(_MARK)) is not None
        ]
        for _, folder in sorted(marked):
            _lend_folder(url, near, folder)


def _lend_folder(url: str, near: Path, name: str) -> None:
    """Lends the data files that a commit mark names, and that are here, and last the mark."""
    folder = near / name
    try:
        named = [file for file, *_ in _core.Checkpoint.open(str(folder), max_whole_bytes=0).files()]
    except CheckpointError as error:
        _logger.warning("%s is not lent to other machines: %s", folder, str(error))
        return
    held = HolderClient(str(below(url, *name.split("/"))))
    with storage_errors("delete", held.url):  # of a save that this one has replaced
        held.delete([lent.name for lent in held.entries() if lent.name not in named])
    for file in (*named, _MARK):
        if (folder / file).exists():
            with storage_errors("lend", folder / file):
                _keep(held, folder / file)


def _keep(held: HolderClient, path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        held.keep(path.name, fd)
    finally:
        os.close(fd)
