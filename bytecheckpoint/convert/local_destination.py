# SPDX-License-Identifier: Apache-2.0
"""A path as the target of a conversion: files are written into a folder beside it, which then gets its name."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bytecheckpoint.convert.destination import Conversion, bytes_of
from bytecheckpoint.convert.file_piece import compare_checksums, remove_unverified
from bytecheckpoint.convert.source import identity_of
from bytecheckpoint.errors import (
    CheckpointBusyError,
    CheckpointError,
    CheckpointExistsError,
    ConfigError,
    StorageError,
)
from bytecheckpoint.report.text import size_text
from bytecheckpoint.storage.small_files import made_folder

__all__ = ["LocalDestination", "whole_folder"]

_NOTE = "conversion.json"


class LocalDestination:
    """A directory, or a file, that does not exist yet; see ``Destination``.

    Files are written into a folder beside it, which gets its name at the end.

    Args:
        target: Its path.
    """

    def __init__(self, target: Path) -> None:
        self._target = target

    def check(self, to: str, *, resume: bool, is_shared: bool) -> None:
        """See ``Destination``. An empty folder may be there."""
        target = self._target
        if target.is_symlink() or (target.exists() and not (target.is_dir() and not any(target.iterdir()))):
            raise CheckpointExistsError(f"convert({target}): it exists, and nothing is changed in place", str(target))

    def write(self, work: Conversion, *, resume: bool) -> int:
        """See ``Destination``."""
        made, ranks = work.made, work.ranks
        with ExitStack() as held:

            def begun() -> Path:
                if not ranks.is_first:
                    return _staging_of(self._target)
                staging = held.enter_context(_staging_folder(self._target, resume, _plan_of(work)))
                if resume and work.verify:
                    remove_unverified(staging / piece.name for piece in made.pieces if piece.is_verified_alone)
                _check_room(staging, bytes_of([piece for piece in made.pieces if not piece.is_done(staging)]))
                return staging

            staging = ranks.together(begun)
            left = ranks.shared([piece.name for piece in made.pieces if not piece.is_done(staging)])
            mine = ranks.own_of([piece for piece in made.pieces if piece.name in left])
            ranks.together(lambda: work.run(mine, staging, verify=work.verify))

            def finished() -> None:
                if ranks.is_first:
                    compare_checksums(work.job, work.opened, staging)
                    made.finish(work.opened, staging, self._target, work.verify)
                    _publish(staging, self._target, made.pieces[0].name if made.is_file else None)

            ranks.together(finished)
        return len(left)


@contextmanager
def whole_folder(target: Path, plan: str) -> Iterator[Path]:
    """Makes a folder that appears whole, at the end of the ``with`` block, or not at all.

    Args:
        target: Its path. An empty folder may be there.
        plan: What is written into it, for whoever finds what a killed process has left.

    Raises:
        CheckpointBusyError: Another process makes it.
        CheckpointExistsError: Something is there, or was left by a process that was killed.
        StorageError: The file system refused.
    """
    LocalDestination(target).check("torch", resume=False, is_shared=False)
    with _staging_folder(target, False, plan) as staging:
        try:
            yield staging
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        _publish(staging, target, None)


def _plan_of(work: Conversion) -> str:
    """Returns a digest of what is converted: a conversion goes on only with what it began with.

    A spec is in it by what it comes to: where each element of each tensor is taken from. So nothing in a spec is
    forgotten, not even what a transform of the user's own does.
    """
    digest = hashlib.sha256(json.dumps([work.job.place, identity_of(work.opened)]).encode())
    digest.update(work.made.identity())
    if work.job.change is not None:
        digest.update(work.job.change.identity())
    work.opened.wanted.describe(digest.update)
    return digest.hexdigest()


def _staging_of(target: Path) -> Path:
    """Returns the folder beside ``target`` in which files are written."""
    return target.parent / f".{target.name}.converting"


@contextmanager
def _staging_folder(target: Path, resume: bool, plan: str) -> Iterator[Path]:
    """Makes the folder beside ``target`` in which files are written, and holds its lock.

    Args:
        target: The path that it will have.
        resume: Whether it may have files already.
        plan: A digest of what is converted: files of another plan are not mixed with these.

    Raises:
        CheckpointBusyError: Another process has the lock.
        CheckpointError: What the ``with`` block raises.
        CheckpointExistsError: There are files already, and ``resume`` is False.
        ConfigError: They are of another conversion.
        StorageError: The file system refused.
    """
    staging = _staging_of(target)
    note = staging / _NOTE
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staging.mkdir(exist_ok=True)
        with note.open("a+", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise CheckpointBusyError(
                    f"convert({target}): another process converts to this target", str(target)
                ) from None
            file.seek(0)
            before = file.read()
            if before and not resume:
                raise CheckpointExistsError(
                    f"convert({target}): an earlier conversion was interrupted: go on with resume (--resume), or "
                    f"remove {staging}",
                    str(staging),
                )
            if before != plan and (before or any(each != note for each in staging.iterdir())):
                raise ConfigError(
                    f"convert({target}): the interrupted conversion had another source or other arguments: remove "
                    f"{staging} to begin anew"
                )
            if not before:
                file.write(plan)
                file.flush()
                os.fsync(file.fileno())
            yield staging
    except CheckpointError:
        raise  # some are OSErrors, too
    except OSError as error:
        raise StorageError(f"convert({target}): {error}", str(target), error.errno or 0) from error


def _check_room(staging: Path, num_bytes: int) -> None:
    """Refuses what does not fit on the disk.

    Raises:
        StorageError: There is no room.
    """
    free = shutil.disk_usage(staging).free
    if num_bytes > free:
        raise StorageError(
            f"convert({staging}): {size_text(num_bytes)} needed, but only {size_text(free)} are free", str(staging), 28
        )


def _publish(staging: Path, target: Path, file: str | None) -> None:
    """Gives what is finished its name.

    Args:
        staging: Folder in which everything is.
        target: Name of the folder, or of the file.
        file: The one file that is the target; None if the folder is.
    """
    made_folder(staging).sync()
    if file is not None:
        os.link(staging / file, target)  # refuses a target that has appeared meanwhile
        made_folder(target.parent).sync()
        shutil.rmtree(staging)
        return
    staging.rename(target)
    # Only now: files without the note of what they are would be taken for those of any later conversion.
    (target / _NOTE).unlink()
    made_folder(target).sync()
    made_folder(target.parent).sync()
