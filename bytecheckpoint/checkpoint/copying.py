# SPDX-License-Identifier: Apache-2.0
"""Copies a checkpoint to another place as it is, and commits it there."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bytecheckpoint.config import Config
from bytecheckpoint.contents.wrong_path import explaining
from bytecheckpoint.errors import (
    CheckpointChangedError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    UnsupportedError,
)
from bytecheckpoint.native import _core
from bytecheckpoint.report.text import size_text
from bytecheckpoint.storage.folder import Commit, Folder
from bytecheckpoint.storage.folders import folder_at, known
from bytecheckpoint.storage.in_use import reading
from bytecheckpoint.storage.parts import parts_in
from bytecheckpoint.storage.paths import Place, below, location, location_to_read

__all__ = ["CopyReport", "copy_checkpoint", "is_copied"]

_MARK = ".metadata"
# A slow copy may take longer than a save. A store's sweep takes what no commit names once it is a day old.
_MOST_SECONDS = 12 * 3600.0


@dataclass(frozen=True, kw_only=True)
class CopyReport:
    """What a copy did.

    Attributes:
        source: The checkpoint.
        target: Where the copy is.
        save_ids: Ids of what was copied: one, or one for each part of ``bytecheckpoint.save``.
        num_files: Number of data files that were copied.
        num_bytes: Bytes of these.
        is_new: False if the target had all of it already.
        seconds: Seconds that it took.
        warnings: What failed behind the commit.
    """

    source: str
    target: str
    save_ids: tuple[str, ...]
    num_files: int = 0
    num_bytes: int = 0
    is_new: bool = False
    seconds: float = 0.0
    warnings: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.summary()

    def summary(self) -> str:
        """Returns one line for people."""
        if not self.is_new:
            return f"{self.target}: is there already"
        rate = f", {size_text(int(self.num_bytes / self.seconds))}/s" if self.seconds else ""
        files = f"{self.num_files} file{'s' if self.num_files != 1 else ''}"
        return f"{self.target}: {size_text(self.num_bytes)} in {files} in {self.seconds:.2f} s{rate}; all compared"


def copy_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    bytes_per_s: int = 0,
    config: Config | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> CopyReport:
    """Copies a checkpoint of ours as it is: between directories and object stores, in any direction.

    Local. Every byte is compared with its checksum on its way, and the target commits by the protocol of its place, so
    that it has all of the checkpoint or nothing of it. Files and metadata are the same bytes, with the same save id.
    Memory is that of one ring. The parts of ``bytecheckpoint.save`` are committed when all of them are copied, the
    model last. What else is in the folder (pins, journals, files of yours) is not copied.

    A copy that was interrupted is begun anew by the next call, which replaces what it finds of it.

    Args:
        source: Path or URL of a checkpoint of ours.
        target: Path or URL. If it has this very save, with all data files by their sizes and ends, nothing is done;
            ``verify`` compares every byte.
        overwrite: Whether another checkpoint there is replaced; otherwise that is an error.
        bytes_per_s: Most bytes that are written in a second; 0 is no limit.
        config: Settings; None reads ``BYTECHECKPOINT_*`` variables.
        progress: Called with the bytes that were copied of the part under way, and all bytes of it.

    Raises:
        CheckpointChangedError: A newer save replaced the source meanwhile.
        CheckpointExistsError: There is another checkpoint at ``target``.
        CheckpointNotFoundError: There is none at ``source``.
        ConfigError: ``bytes_per_s`` is below 0, source and target are one folder, or a URL is of an unknown kind.
        CorruptCheckpointError: The source is damaged; nothing was committed.
        StorageError: The storage refused, or has no room.
        UnsupportedError: The source is of another writer, or each rank committed a part of its own: ``convert`` writes
            such a one anew.
    """
    begin = time.monotonic()
    config = config or Config.from_env()
    if bytes_per_s < 0:
        raise ConfigError(f"bytes_per_s={bytes_per_s}: must be 0 or more")
    config = replace(config, commit_deadline_s=max(config.commit_deadline_s, _MOST_SECONDS), journal="off")
    from_, to = known(location_to_read(source), config), known(location(target), config)
    parts, copies = _copies(from_, to, config, overwrite)
    if folder_at(to).is_same(from_):
        raise ConfigError(f"copy({from_}): source and target are one folder")
    if not folder_at(to).has_listing:
        raise UnsupportedError(f"copy({to}): over HTTP a checkpoint can only be read", str(to))
    for each in copies:
        each.open()
    if any(not each.is_there for each in copies):
        _refuse_others(to, parts, copies, overwrite)
    with ExitStack() as undone:
        for each in copies:
            undone.enter_context(each)
            each.copy(bytes_per_s, progress)
        for each in copies:  # only now, so that a fault in one part leaves the others as they were
            each.commit()
    reports = [each.report for each in copies]
    return CopyReport(
        source=str(from_),
        target=str(to),
        save_ids=tuple(save_id for each in reports for save_id in each.save_ids),
        num_files=sum(each.num_files for each in reports),
        num_bytes=sum(each.num_bytes for each in reports),
        is_new=any(each.is_new for each in reports),
        seconds=time.monotonic() - begin,
        warnings=tuple(warning for each in reports for warning in each.warnings),
    )


def is_copied(source: Place, target: Place, config: Config) -> bool:
    """Whether a target has the very save of a source, with all of its data files, by their sizes and ends.

    A commit mark alone does not say so: other tools copy it before its data.
    """
    with contextlib.suppress(CheckpointError):
        _, copies = _copies(source, target, config, overwrite=False)
        for each in copies:
            each.open()
        return all(each.is_there for each in copies)
    return False


def _copies(source: Place, target: Place, config: Config, overwrite: bool) -> tuple[Sequence[str], list[_Copy]]:
    """Returns the parts of a step, none of a checkpoint that has no parts, and the copies to make, the model last."""
    folder = folder_at(source)
    parts = parts_in(source) if folder.has_listing and not folder.has(_MARK) and folder.is_there() else ()
    return parts, [
        _Copy(below(source, part) if part else source, below(target, part) if part else target, config, overwrite)
        for part in parts or ("",)
    ]


def _refuse_others(target: Place, parts: Sequence[str], copies: Sequence[_Copy], overwrite: bool) -> None:
    """Refuses a target where a checkpoint of another kind is, or one that may not be replaced. Nothing is written yet.

    Raises:
        CheckpointExistsError: There is one.
    """
    folder = folder_at(target)
    if isinstance(target, Path) and not folder.is_there():  # a URL has nothing below it then
        return
    there = set(parts_in(target))
    others = (
        [part for part in there if folder_at(below(target, part)).has(_MARK)] if not parts else sorted(there - {*parts})
    )
    if (parts and folder.has(_MARK)) or others:
        what = "a checkpoint without parts" if parts and folder.has(_MARK) else f"the part '{others[0]}'"
        raise CheckpointExistsError(
            f"copy({target}): {what} is there, and would stand beside the copy: remove it, or copy to another folder",
            str(target),
        )
    if not overwrite and any(each.has_another for each in copies):
        raise CheckpointExistsError(
            f"copy({target}): a checkpoint of another save already exists, and overwrite=False", str(target)
        )


class _Copy:
    """The copy of one checkpoint: ``open``, ``copy`` and ``commit``. As a context it undoes a copy that fails.

    Attributes:
        report: What it did so far.
        is_there: Whether the target has this very save, with all of its files.
        has_another: Whether another save is there.
    """

    def __init__(self, source: Place, target: Place, config: Config, overwrite: bool) -> None:
        self._source, self._target = str(source), str(target)
        self._config, self._overwrite = config, overwrite
        self._folder: Folder = folder_at(target)
        self._commit: Commit | None = None
        self._held = ExitStack()

    def open(self) -> None:
        """Opens the source, and looks at the target."""
        from bytecheckpoint.native import _C

        folder_at(self._source).use(self._config, _C)
        self._folder.use(self._config, _C)
        with explaining(self._source):
            self._checkpoint: Any = _C.Checkpoint.open(self._source)
        self.report = CopyReport(source=self._source, target=self._target, save_ids=(self._checkpoint.save_id,))
        if self._checkpoint.foreign is not None:
            raise UnsupportedError(
                f"copy({self._source}): it is a checkpoint of another writer, without our checksums: write it anew "
                "with bcp convert --to bcp",
                self._source,
            )
        id_there = self._id_there()
        self.has_another = id_there not in (None, self._checkpoint.save_id)
        # What other tools copied may be a commit mark whose files are missing or cut: that is replaced.
        self._is_this = id_there == self._checkpoint.save_id
        self.is_there = self._is_this and self._has_all_files()

    def _id_there(self) -> str | None:
        """Returns the id of the save that is at the target; None if there is none that can be read."""
        with contextlib.suppress(CheckpointError):
            return _core.Checkpoint.open(self._target).save_id
        return None

    def _has_all_files(self) -> bool:
        """Whether all data files are at the target, by their sizes and ends."""
        try:
            self._checkpoint.check_files(self._target)
        except CheckpointError:
            return False
        return True

    def __enter__(self) -> None:
        self._held.enter_context(reading(self._source))

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._held.close()
        commit, self._commit = self._commit, None
        if commit is not None and not self.report.is_new:
            with contextlib.suppress(CheckpointError):  # the first error is the one to tell
                commit.abort([], False, [name for name, *_ in self._checkpoint.files()])
        del commit  # whoever keeps the error would keep its thread, too
        if isinstance(error, CheckpointError):
            self._explain(error, self.report.save_ids[0])

    def copy(self, bytes_per_s: int, progress: Callable[[int, int], object] | None) -> None:
        """Copies the data files."""
        if self.is_there:
            return
        from bytecheckpoint.native import _C

        names = [name for name, *_ in self._checkpoint.files()]
        self._commit = self._folder.begin_commit(
            self._config,
            save_id=_C.draw_save_id(),
            rank=None,
            overwrite=self._overwrite or self._is_this,
            sync=True,
            reserve_bytes=0,
        )
        for name in {*names} & {*self._folder.names()}:  # of a copy that was interrupted: the right is ours now
            self._folder.remove_file(name)
        num_bytes = self._copy_files(bytes_per_s, progress)
        self._commit.check_files(self._checkpoint)
        self.report = replace(self.report, num_files=len(names), num_bytes=num_bytes)

    def commit(self) -> None:
        """Commits the copy."""
        if self._commit is not None:
            outcome = self._commit.commit(self._checkpoint)
            self.report = replace(self.report, is_new=True, warnings=tuple(outcome["warnings"]))

    def _copy_files(self, bytes_per_s: int, progress: Callable[[int, int], object] | None) -> int:
        config = self._folder.tuned(folder_at(self._source).tuned(self._config))
        return _core.copy_files(
            _core.Checkpoint.open(self._source),
            source=self._source,
            target=self._target,
            direct_io=config.direct_io,
            num_threads=config.io_threads,
            ring_bytes=config.ring_bytes,
            niceness=config.niceness,
            bytes_per_s=bytes_per_s,
            io_timeout_s=config.io_timeout_s,
            progress=progress,
        )

    def _explain(self, error: BaseException, save_id: str) -> None:
        """Raises what is behind an error, if a newer save has replaced the source, or a prune has removed it."""
        try:
            now = _core.Checkpoint.open(self._source).save_id
        except CheckpointNotFoundError:
            now = ""
        except CheckpointError:
            return
        if now != save_id:
            what = "a newer save replaced it" if now else "it was removed"
            raise CheckpointChangedError(
                f"copy({self._source}): {what} while it was copied; nothing was committed at {self._target}",
                self._source,
            ) from error
