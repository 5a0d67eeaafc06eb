# SPDX-License-Identifier: Apache-2.0
"""The folder in which a conversion writes, and which gets the name of the target when all is there."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bytecheckpoint.checkpoint.small_files import made_folder
from bytecheckpoint.errors import (
    CheckpointBusyError,
    CheckpointError,
    CheckpointExistsError,
    ConfigError,
    StorageError,
)
from bytecheckpoint.report.text import size_text

__all__ = ["check_room", "publish", "refuse_existing", "staging_folder", "staging_of", "write_whole"]

_NOTE = "conversion.json"


def refuse_existing(target: Path) -> None:
    """Refuses a target that is there already, unless it is an empty folder.

    Raises:
        CheckpointExistsError: Something is there.
    """
    if target.is_symlink() or (target.exists() and not (target.is_dir() and not any(target.iterdir()))):
        raise CheckpointExistsError(f"convert({target}): it exists, and nothing is changed in place", str(target))


def staging_of(target: Path) -> Path:
    """Returns the folder beside ``target`` in which files are written."""
    return target.parent / f".{target.name}.converting"


@contextmanager
def staging_folder(target: Path, resume: bool, plan: str) -> Iterator[Path]:
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
    staging = staging_of(target)
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


def check_room(staging: Path, num_bytes: int) -> None:
    """Refuses what does not fit on the disk.

    Raises:
        StorageError: There is no room.
    """
    free = shutil.disk_usage(staging).free
    if num_bytes > free:
        raise StorageError(
            f"convert({staging}): {size_text(num_bytes)} needed, but only {size_text(free)} are free", str(staging), 28
        )


def write_whole(path: Path, content: bytes) -> None:
    """Writes a small file, which has its name only when it is whole and on disk."""
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    part.rename(path)


def publish(staging: Path, target: Path, file: str | None) -> None:
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
