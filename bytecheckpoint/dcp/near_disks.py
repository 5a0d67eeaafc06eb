# SPDX-License-Identifier: Apache-2.0
"""Near places that are not shared: each machine has a disk of its own at the path, and the part of its ranks on it.

Each disk has its data files, and the same commit mark, which names those of all. Its lowest rank commits there, by the
commit protocol, once all ranks have said that theirs is written; a step counts when the mark on every disk carries one
save id. So a crash between the marks leaves a step that does not count, and the one before it, which is removed later.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Collection
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from bytecheckpoint.checkpoint.keeping import WAITS, drains_of, note_drain, pins_of
from bytecheckpoint.checkpoint.steps import look_at_step
from bytecheckpoint.checkpoint.tier_drains import note_tier_commit
from bytecheckpoint.config import Config
from bytecheckpoint.dcp.lent_files import lend, lend_committed
from bytecheckpoint.dcp.writer import BcpWriter
from bytecheckpoint.distributed.agreement import all_together, of_each, of_first
from bytecheckpoint.errors import CheckpointError, CheckpointNotFoundError, ConfigError, StorageError, UnsupportedError
from bytecheckpoint.native import _C, _core
from bytecheckpoint.runtime.boot_id import boot_id
from bytecheckpoint.runtime.per_process import PerProcess
from bytecheckpoint.storage.folder import Commit
from bytecheckpoint.storage.folders import folder_at
from bytecheckpoint.storage.memory.peers import is_data_file
from bytecheckpoint.storage.own_parts import note_own_part
from bytecheckpoint.storage.paths import as_place
from bytecheckpoint.storage.removals import removal_in
from bytecheckpoint.storage.small_files import storage_errors
from bytecheckpoint.storage.step_folder import step_paths
from bytecheckpoint.storage.tiers import Tiers, lend_near

__all__ = ["NearDisks", "lend_to_load", "save_near"]

T = TypeVar("T")

_logger = logging.getLogger("bytecheckpoint")

_MARK = ".metadata"
_LOOK_S = 5.0  # for a file system to say what it is


class NearDisks:
    """The disks that ranks have at the near place of a run, in one call. Making it is collective over their group.

    Args:
        tiers: Places of the run, with a near one.
        group: The ranks; more than one.
        call: What is being done, and its path, for errors.
        makes: Whether to make the folder of the run: while it is not there, ranks may disagree about where it would be.

    Attributes:
        is_one: Whether all ranks have one.
        ranks_here: The ranks that have that of this rank.
        acts: Whether this rank commits on it: it is the lowest of these.

    Raises:
        StorageError: A rank cannot look at its disk; or some share storage, and others have a disk of their own.
    """

    def __init__(self, tiers: Tiers, group: dist.ProcessGroup, call: tuple[str, str], *, makes: bool = False) -> None:
        self._tiers, self._group, self._call = tiers, group, call
        self._disk = own = all_together(group, *call, lambda: _disk_at(Path(tiers.near), makes))
        said: list[str] = of_each(group, *call, own)
        self.is_one = len({*said}) == 1
        if "" in said and not self.is_one:
            shared, own_disk = said.index(""), next(rank for rank, disk in enumerate(said) if disk)
            raise StorageError(
                f"{call[0]}({call[1]}): {tiers.near} is storage that machines share on rank {shared}, and a disk of "
                f"one machine on rank {own_disk}: it may not be mounted there",
                str(tiers.near),
            )
        self.ranks_here = frozenset(rank for rank, disk in enumerate(said) if disk == own)
        self.acts = min(self.ranks_here) == group.rank()
        self._coordinates = group.rank() == 0
        self._commit: Commit | None = None
        self._path = ""

    def save(self, writer: BcpWriter, save: Callable[[BcpWriter], T]) -> T:
        """Saves, by ``save``, with what the coordinator commits on its disk; then commits on the others. Collective.

        Raises:
            CheckpointError: The save failed, on any disk.
            UnsupportedError: What was asked for needs one disk.
        """
        if writer.config.digest:
            raise UnsupportedError(
                f"save({writer.checkpoint_id}): digest=True reads all that is saved, and no machine has all of it: "
                "each has a disk of its own there",
                str(writer.checkpoint_id),
            )
        self._path = str(writer.checkpoint_id)
        overwrites = writer.overwrite
        # What a job left that died between the marks is no checkpoint.
        writer.overwrite = overwrites or not self._has_checkpoint()
        writer.same_save_as = self._said_by_the_first(writer.same_save_as or _C.draw_save_id())
        save_id = writer.same_save_as
        writer.ranks_here = self.ranks_here
        try:
            self._together(lambda: self._begin(writer, save_id))
            saved = save(writer)
            self._commit_too()
        except BaseException:
            self._undo()
            raise
        finally:
            writer.ranks_here, writer.same_save_as, writer.overwrite = None, "", overwrites
            self._commit = None
        self._go_on(writer.config)
        return saved

    def take_over_waiting(self) -> None:
        """Notes on the first disk what waits on any to be copied: it was another machine's before. Collective."""
        near = str(self._tiers.near)
        waiting = _waiting_in(near) if self.acts else []
        names = {*chain(*of_each(self._group, *self._call, waiting))}
        if not names:
            return
        taken = self._said_by_the_first(_note_waiting(near, names) if self._coordinates else [])
        if not self._coordinates:
            _note_waiting(near, {*taken} & {*waiting}, "")

    def _has_checkpoint(self) -> bool:
        """Returns whether the marks on all disks are of one save. Collective."""
        save_id = self._together(lambda: _save_id_at(Path(self._path)))
        said = {*of_each(self._group, *self._call, save_id)}
        return len(said) == 1 and "" not in said

    def _begin(self, writer: BcpWriter, save_id: str) -> None:
        if not self.acts or self._coordinates:
            return
        folder = folder_at(as_place(self._path))
        folder.use(writer.config, _C)
        self._commit = folder.begin_commit(
            writer.config,
            save_id=save_id,
            rank=None,
            overwrite=writer.overwrite,
            sync=writer.sync_files,
            reserve_bytes=0,
        )

    def _commit_too(self) -> None:
        mark = self._together(self._read_mark)
        checkpoint = _C.Checkpoint.of_metadata_file(self._said_by_the_first(mark))
        commit = self._commit
        self._together(lambda: None if commit is None else commit.check_files(checkpoint, self.ranks_here))
        self._together(lambda: None if commit is None else commit.commit(checkpoint))
        if self.acts:
            try:
                note_own_part(Path(self._path), checkpoint.save_id, self.ranks_here)
            except StorageError as error:  # it is committed; a prune keeps an older one, too
                _logger.warning("%s", error)

    def _read_mark(self) -> bytes:
        if not self._coordinates:
            return b""
        with storage_errors("read", f"{self._path}/{_MARK}"):
            return Path(self._path, _MARK).read_bytes()

    def _undo(self) -> None:
        """Removes what ranks have written to this disk of a save that failed: this rank has the right to commit."""
        commit, self._commit = self._commit, None
        if commit is None:
            return
        with suppress(CheckpointError):
            folder = folder_at(as_place(self._path))
            named = {name for name, *_ in _core.Checkpoint.open(self._path).files()} if folder.has(_MARK) else {}
            commit.abort([], False, [name for name in folder.names() if is_data_file(name) and name not in named])

    def _go_on(self, config: Config) -> None:
        """Removes the steps that are gone from the first disk, and lends this one to who copies it to the next tier."""
        gone: list[str] = self._said_by_the_first(_gone_since(self._tiers, self._disk) if self._coordinates else [])
        if gone and self.acts and not self._coordinates:
            _remove(Path(self._tiers.near), gone)
        try:
            lend(self._tiers, self._group, self._path, self.acts, config)
        except (ConfigError, StorageError) as error:  # on all ranks; the save is committed
            _logger.warning("Tiers(%s): other machines cannot read what is there: %s", self._tiers.near, error)
            lend_near(self._tiers, "")  # what was lent before is older
        if self._coordinates:
            note_tier_commit(self._path)

    def _together(self, step: Callable[[], T]) -> T:
        return all_together(self._group, *self._call, step)

    def _said_by_the_first(self, value: T) -> T:
        return of_first(self._group, *self._call, value)


def save_near(writer: BcpWriter, save: Callable[[BcpWriter], T], tiers: Tiers, group: dist.ProcessGroup | None) -> T:
    """Saves to the nearest disk of tiers. Collective.

    Args:
        writer: Writer of the save.
        save: Saves with a writer.
        tiers: Places of the run.
        group: A group of our own of the ranks that save; None for this one alone.
    """
    if not tiers.near or group is None or group.size() == 1:
        return save(writer)
    disks = NearDisks(tiers, group, ("save", str(writer.checkpoint_id)), makes=True)
    return save(writer) if disks.is_one else disks.save(writer, save)


def lend_to_load(tiers: Tiers, group: dist.ProcessGroup, what: str, config: Config) -> None:
    """Has each machine lend what is committed on its disk at the near place, if they have disks of their own there.

    Collective over ``group``.

    Args:
        tiers: Places of the run, with a near one.
        group: A group of our own, of more than one rank.
        what: What is being done, for errors.
        config: Settings of the load.

    Raises:
        StorageError: A disk cannot be read, or machines cannot reach one another.
        CheckpointError: A rank was lost.
    """
    disks = NearDisks(tiers, group, (what, str(tiers.near)))
    if disks.is_one:
        lend_near(tiers, "")
        return
    if tiers.durable:
        disks.take_over_waiting()
    lend_committed(tiers, group, what, disks.acts, config)


def _save_id_at(path: Path) -> str:
    """Returns the id of the save that is committed at a path; "" for none."""
    return _core.Checkpoint.open(str(path), max_whole_bytes=0).save_id if (path / _MARK).exists() else ""


def _waiting_in(near: str) -> list[str]:
    """Returns the steps on this disk that wait to be copied, by name."""
    try:
        paths = [] if folder_at(near).is_gone() else [path for _, path in step_paths(Path(near))]
        return sorted(Path(path).name for path in drains_of(paths))
    except StorageError as error:  # a load does not fail for it
        _logger.warning("Tiers(%s): %s", near, error)
        return []


def _note_waiting(near: str, names: Collection[str], state: str = WAITS) -> list[str]:
    """Notes of steps on this disk that they wait, or ``""``; returns those of which that worked."""
    noted = []
    for name in names:
        try:
            note_drain(f"{near}/{name}", state)
            noted.append(name)
        except (CheckpointNotFoundError, StorageError) as error:
            _logger.warning("Tiers(%s): %s waits on another disk, and is not copied: %s", near, name, error)
    return noted


def _disk_at(near: Path, makes: bool) -> str:
    """Returns what tells the disk at a path from those of other machines; "" for storage that they share."""
    there = near
    with storage_errors("look", near):
        if makes:
            near.mkdir(parents=True, exist_ok=True)
        while not there.exists() and there != there.parent:
            there = there.parent
        if not _core.is_local(str(there), _LOOK_S):
            return ""
        status = there.stat()
    with suppress(OSError):
        return f"{boot_id()} {status.st_dev} {status.st_ino}"
    return f"{socket.gethostname()} {status.st_dev} {status.st_ino}"


_steps_seen: PerProcess[dict[str, tuple[str, set[str]]]] = PerProcess(dict)  # on which disk, and which


def _gone_since(tiers: Tiers, disk: str) -> list[str]:
    """Returns the steps that the first disk had when this was last called, and has no more.

    None if none of these is left, since a prune leaves one: the disk may not be mounted.
    """
    try:
        now = {*folder_at(as_place(str(tiers.near))).folders()}
    except StorageError as error:
        _logger.warning("Tiers(%s): %s", tiers.near, error)
        return []
    of_disk, before = _steps_seen.get().get(str(tiers.near), (disk, set[str]()))
    _steps_seen.get()[str(tiers.near)] = disk, now
    if before and (of_disk != disk or not before & now):
        _logger.warning("Tiers(%s): this is another disk than that of the save before: is it mounted?", tiers.near)
        return []
    return sorted(before - now)


def _remove(near: Path, names: list[str]) -> None:
    """Removes steps, unless they are pinned here. What fails is said: the save is committed."""
    try:
        _remove_unpinned(near, names)
    except CheckpointError as error:
        _logger.warning("Tiers(%s): %s", near, error)


def _remove_unpinned(near: Path, names: list[str]) -> None:
    paths = [(step, path) for step, path in step_paths(near) if Path(path).name in names]
    pinned = pins_of([path for _, path in paths])
    removal = removal_in(near, remove_others=False, remove_foreign=False, grace_s=0.0, config=None)
    for step, path in paths:
        folder = None if path in pinned else look_at_step(step, path)
        if folder is not None:
            for failure in removal.remove(folder).failures:
                _logger.warning("%s is not removed: %s", path, failure)
