# SPDX-License-Identifier: Apache-2.0
"""File systems that a test mounts; of those on a disk of their own the power can be cut."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from faults.fork_server import LIMIT_S
from faults.saves import Attempt, SaveRequest, save

__all__ = [
    "DISKS",
    "Disk",
    "complaint_of",
    "cut_power",
    "file_system_in_file",
    "fill",
    "free_blocks",
    "mounted",
    "save_then_cut",
]

# _IOR('X', 125, __u32): as FS_IOC_SHUTDOWN, EXT4_IOC_SHUTDOWN and XFS_IOC_GOINGDOWN have it.
_SHUTDOWN = 0x8004587D
# Neither data nor the log is flushed first: what is not durable yet is lost.
_NO_LOG_FLUSH = 2

# What makes them, how large they have to be (the files are sparse), and how they are mounted: a journal that is written
# every few seconds could save what was not synced, and the control of the tests would see no loss.
DISKS = {
    "ext4": (["mkfs.ext4", "-q"], 64 << 20, "loop,commit=300"),
    "xfs": (["mkfs.xfs", "-q"], 320 << 20, "loop"),
}


def complaint_of(*command: str) -> str:
    """In a line, what went wrong; or nothing."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    return "" if done.returncode == 0 else f"{' '.join(command)}: {done.stderr.strip().partition(chr(10))[0]}"


def file_system_in_file(image: Path, num_bytes: int, *command: str, untested: str) -> None:
    """Makes one by ``command``, in a sparse file. Where that is not installed it skips ``untested``; CI fails."""
    if shutil.which(command[0]) is None:
        # CI could install it.
        give_up = pytest.fail if os.environ.get("CI") else pytest.skip
        give_up(f"{untested} NOT TESTED: {command[0]} is not installed")
    with image.open("wb") as file:
        file.truncate(num_bytes)
    assert not (failed := complaint_of(*command, str(image))), failed


@contextlib.contextmanager
def mounted(path: Path, *arguments: str, untested: str) -> Iterator[Path]:
    """Mounts at ``path``, a new directory, while the context lasts. Where it may not, it skips ``untested``."""
    path.mkdir()
    if failed := complaint_of("mount", *arguments, str(path)):
        pytest.skip(f"{untested} NOT TESTED: {failed}")
    try:
        yield path
    finally:
        # Of a test that failed a process may still be there; it must not hide why.
        assert not complaint_of("umount", str(path)) or not complaint_of("umount", "--lazy", str(path))


def free_blocks(directory: Path) -> int:
    return os.statvfs(directory).f_bavail


def fill(directory: Path, leave_blocks: int) -> Callable[[], None]:
    """Leaves ``leave_blocks`` free; returns what undoes it."""
    filler = directory / "filler"
    with filler.open("wb") as file:
        size = (free_blocks(directory) - leave_blocks) * os.statvfs(directory).f_frsize
        os.posix_fallocate(file.fileno(), 0, size)
    assert free_blocks(directory) == leave_blocks
    return filler.unlink


def cut_power(path: Path) -> None:
    """The file system of ``path`` forgets what is not durable, and refuses everything from now on."""
    directory = os.open(path, os.O_RDONLY)
    try:
        fcntl.ioctl(directory, _SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
    finally:
        os.close(directory)


class Disk:
    """A file system in a file, mounted.

    Attributes:
        path: Where. Nothing may be open there when the power comes back.
    """

    def __init__(self, kind: str, directory: Path) -> None:
        command, num_bytes, self._options = DISKS[kind]
        what = f"POWER CUTS OF {kind}"
        self._image = directory / f"{kind}.img"
        file_system_in_file(self._image, num_bytes, *command, untested=what)
        self.path = directory / kind
        self._mount = contextlib.ExitStack()
        self._mount.enter_context(mounted(self.path, "-t", kind, "-o", self._options, str(self._image), untested=what))

    def power_returns(self) -> None:
        """After a cut, when nobody uses it any more: what is on the disk is read again, and its journal is replayed."""
        for command in (("umount", str(self.path)), ("mount", "-o", self._options, str(self._image), str(self.path))):
            assert not (failed := complaint_of(*command)), failed

    def close(self) -> None:
        self._mount.close()


def save_then_cut(disk: Path, request: SaveRequest) -> Attempt:
    """Makes a save, and cuts the power as soon as it has returned on one rank."""
    outcome = save(request)
    with contextlib.suppress(OSError):  # another rank was faster
        cut_power(disk)
    return outcome
