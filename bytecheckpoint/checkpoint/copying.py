# SPDX-License-Identifier: Apache-2.0
"""Copies a checkpoint to another place as it is, and commits it there."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from bytecheckpoint.config import Config
from bytecheckpoint.contents.wrong_path import explaining
from bytecheckpoint.errors import (
    CheckpointChangedError,
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    UnsupportedError,
)
from bytecheckpoint.native import _core
from bytecheckpoint.report.text import size_text
from bytecheckpoint.storage.folder import Folder
from bytecheckpoint.storage.folders import folder_at, known
from bytecheckpoint.storage.in_use import reading
from bytecheckpoint.storage.parts import parts_in
from bytecheckpoint.storage.paths import Place, below, location, location_to_read

__all__ = ["CopyReport", "copy_checkpoint"]

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
    Memory is that of one ring. The parts of ``bytecheckpoint.save`` are copied one by one, the model last. What else is
    in the folder (pins, journals, files of yours) is not copied.

    A copy that was interrupted is begun anew by the next call, which replaces what it finds of it.

    Args:
        source: Path or URL of a checkpoint of ours.
        target: Path or URL. If it has this very save, nothing is done.
        overwrite: Whether another checkpoint there is replaced; otherwise that is an error.
        bytes_per_s: Most bytes that are written in a second; 0 is no limit.
        config: Settings; None reads ``BYTECHECKPOINT_*`` variables.
        progress: Called with the bytes that were copied of the part under way, and all bytes of it.

    Raises:
        CheckpointChangedError: A newer save replaced the source meanwhile.
        CheckpointExistsError: There is another checkpoint at ``target``.
        CheckpointNotFoundError: There is none at ``source``.
        ConfigError: ``bytes_per_s`` is below 0, or a URL is of an unknown kind.
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
    places = [(from_, to)]
    folder = folder_at(from_)
    if folder.has_listing and not folder.has(_MARK) and folder.is_there():
        places = [(below(from_, part), below(to, part)) for part in parts_in(from_)] or places
    reports = [_Copy(*each, config, overwrite).run(bytes_per_s, progress) for each in places]
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


class _Copy:
    """The copy of one checkpoint."""

    def __init__(self, source: Place, target: Place, config: Config, overwrite: bool) -> None:
        self._source, self._target = str(source), str(target)
        self._config, self._overwrite = config, overwrite
        self._folder: Folder = folder_at(target)

    def run(self, bytes_per_s: int, progress: Callable[[int, int], object] | None) -> CopyReport:
        from bytecheckpoint.native import _C

        for place in (self._source, self._target):
            folder_at(place).use(self._config, _C)
        self._folder.use(self._config, _C)
        with explaining(self._source), reading(self._source):
            checkpoint = _C.Checkpoint.open(self._source)
            report = CopyReport(source=self._source, target=self._target, save_ids=(checkpoint.save_id,))
            if checkpoint.foreign is not None:
                raise UnsupportedError(
                    f"copy({self._source}): it is a checkpoint of another writer, without our checksums: write it anew "
                    "with bcp convert --to bcp",
                    self._source,
                )
            if self._id_there() == checkpoint.save_id:
                return report
            return self._copied(checkpoint, report, bytes_per_s, progress)

    def _id_there(self) -> str | None:
        """Returns the id of the save that is at the target; None if there is none that can be read."""
        with contextlib.suppress(CheckpointError):
            return _core.Checkpoint.open(self._target).save_id
        return None

    def _copied(
        self, checkpoint: Any, report: CopyReport, bytes_per_s: int, progress: Callable[[int, int], object] | None
    ) -> CopyReport:
        names = [name for name, *_ in checkpoint.files()]
        commit = self._folder.begin_commit(
            self._config,
            save_id=_core_id(),
            rank=None,
            overwrite=self._overwrite,
            sync=True,
            reserve_bytes=0,
        )
        try:
            for name in {*names} & {*self._folder.names()}:  # of a copy that was interrupted: the right is ours now
                self._folder.remove_file(name)
            num_bytes = self._copy_files(bytes_per_s, progress)
            commit.check_files(checkpoint)
            outcome = commit.commit(checkpoint)
        except BaseException as error:
            with contextlib.suppress(CheckpointError):  # the first error is the one to tell
                commit.abort(names, False)
            del commit  # whoever keeps the error would keep its thread, too
            self._explain(error, report.save_ids[0])
            raise
        return replace(
            report, num_files=len(names), num_bytes=num_bytes, is_new=True, warnings=tuple(outcome["warnings"])
        )

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
        if not isinstance(error, CheckpointError):
            return
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


def _core_id() -> str:
    from bytecheckpoint.native import _C

    return _C.draw_save_id()
