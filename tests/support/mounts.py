# SPDX-License-Identifier: Apache-2.0
"""Mounts file systems for tests, and cuts the power of a disk that a test has to itself."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.fork_server import LIMIT_S
from support.saves import Attempt, SaveRequest, save

__all__ = [
    "DISKS",
    "Disk",
    "complaint_of",
    "cut_power",
    "file_system_in_file",
    "fill",
    "free_blocks",
    "fuse_mounted",
    "mount_for_this_process",
    "mounted",
    "save_then_cut",
]

_CLONE_NEWNS = 0x00020000
_MNT_DETACH = 2
# _IOR('X', 125, __u32): the number of FS_IOC_SHUTDOWN, EXT4_IOC_SHUTDOWN and XFS_IOC_GOINGDOWN.
_SHUTDOWN = 0x8004587D
# The kernel flushes neither data nor the log first, so what is not durable yet is lost.
_NO_LOG_FLUSH = 2

# The command that makes each kind, its size in bytes (the files are sparse), and its mount options. ext4 commits its
# journal rarely: a journal that is written every few seconds could save what was not synced, and the control of the
# tests would see no loss.
DISKS = {
    "ext4": (["mkfs.ext4", "-q"], 64 << 20, "loop,commit=300"),
    "xfs": (["mkfs.xfs", "-q"], 320 << 20, "loop"),
}


def complaint_of(*command: str) -> str:
    """Runs ``command``. Returns in one line what went wrong, or an empty string."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    return "" if done.returncode == 0 else f"{' '.join(command)}: {done.stderr.strip().partition(chr(10))[0]}"


def _need(program: str, untested: str) -> None:
    if shutil.which(program) is None:
        # CI could install it.
        give_up = pytest.fail if os.environ.get("CI") else pytest.skip
        give_up(f"{untested} NOT TESTED: {program} is not installed")


def file_system_in_file(image: Path, num_bytes: int, *command: str, untested: str) -> None:
    """Makes a file system with ``command`` in a sparse file. Skips ``untested`` if it is not installed; CI fails."""
    _need(command[0], untested)
    with image.open("wb") as file:
        file.truncate(num_bytes)
    assert not (failed := complaint_of(*command, str(image))), failed


@contextlib.contextmanager
def mounted(path: Path, *arguments: str, untested: str) -> Iterator[Path]:
    """Mounts at ``path``, a new directory, while the context lasts. Skips ``untested`` if it may not mount."""
    path.mkdir()
    if failed := complaint_of("mount", *arguments, str(path)):
        pytest.skip(f"{untested} NOT TESTED: {failed}")
    try:
        yield path
    finally:
        # A process of a failed test may still use the mount. The failed unmount must not hide why the test failed.
        assert not complaint_of("umount", str(path)) or not complaint_of("umount", "--lazy", str(path))


@contextlib.contextmanager
def fuse_mounted(path: Path, *command: str, untested: str, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Runs the program of a FUSE file system, which mounts at ``path``, a new directory, while the context lasts.

    Args:
        command: The program and its arguments; it stays in the foreground.
        untested: What is skipped, with the reason, if the program may not mount or is missing, which fails in CI.
        options: More arguments of ``Popen``.
    """
    _need(command[0], untested)
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip(f"{untested} NOT TESTED: /dev/fuse is not to be had")
    path.mkdir(parents=True)
    with subprocess.Popen(command, **options) as running:
        try:
            if not _is_mounted(path, running):
                pytest.skip(f"{untested} NOT TESTED: this user may not mount")
            yield running
        finally:
            if running.poll() is None:
                running.send_signal(signal.SIGCONT)
            # Unmounts lazily: the program lives on until the last open file is closed.
            unmount = ["umount", "-l"] if os.geteuid() == 0 else ["fusermount", "-u", "-z"]
            subprocess.run([*unmount, str(path)], check=False, stderr=subprocess.DEVNULL)
            try:
                running.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                running.kill()


def mount_for_this_process(*arguments: str) -> None:
    """Runs ``mount`` with ``arguments`` so that only this process, and those that it starts from now on, see it.

    Of all other mounts it keeps none below the folder of temporary files: it would hold disks that tests beside this
    one unmount.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(_CLONE_NEWNS) == 0, os.strerror(ctypes.get_errno())
    subprocess.run(["mount", "--make-rprivate", "/"], timeout=LIMIT_S, check=True)
    wanted = [Path(argument) for argument in arguments if argument.startswith("/")]
    for line in Path("/proc/self/mounts").read_text().splitlines():
        at = Path(line.split(" ")[1])
        is_wanted = any(path.is_relative_to(at) or at.is_relative_to(path) for path in wanted)
        if not is_wanted and at.is_relative_to(os.environ.get("TMPDIR", "/tmp")):
            libc.umount2(os.fsencode(at), _MNT_DETACH)
    subprocess.run(["mount", *arguments], timeout=LIMIT_S, check=True)


def _is_mounted(path: Path, program: subprocess.Popen[bytes]) -> bool:
    """Waits until ``path`` is mounted; False if it never is. The kernel notifies whoever polls the list of mounts."""
    with Path("/proc/self/mounts").open() as mounts:
        changed = select.poll()
        changed.register(mounts, select.POLLPRI | select.POLLERR)
        until = time.monotonic() + LIMIT_S
        while f" {path} " not in mounts.read():
            if program.poll() is not None or time.monotonic() > until:
                return False
            changed.poll(200)
            mounts.seek(0)
    return True


def free_blocks(directory: Path) -> int:
    return os.statvfs(directory).f_bavail


def fill(directory: Path, leave_blocks: int) -> Callable[[], None]:
    """Fills the disk until ``leave_blocks`` are free. Returns a function that undoes it."""
    filler = directory / "filler"
    with filler.open("wb") as file:
        size = (free_blocks(directory) - leave_blocks) * os.statvfs(directory).f_frsize
        os.posix_fallocate(file.fileno(), 0, size)
    assert free_blocks(directory) == leave_blocks
    return filler.unlink


def cut_power(path: Path) -> None:
    """Makes the file system of ``path`` forget what is not durable, and refuse every call from now on."""
    directory = os.open(path, os.O_RDONLY)
    try:
        fcntl.ioctl(directory, _SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
    finally:
        os.close(directory)


class Disk:
    """A mounted file system that lives in a file.

    Attributes:
        path: The mount point. Nothing may be open there when the power comes back.
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
        """Mounts the disk again after a cut, which replays its journal. Nobody may use it any more."""
        assert not (failed := complaint_of("umount", str(self.path))), failed
        options = self._options
        if subprocess.run(["losetup", "-j", self._image], capture_output=True, check=True).stdout:
            # A mount namespace that another test has made meanwhile keeps the file system that has lost its power.
            again = self._image.with_name(f"again-{self._image.name}")
            subprocess.run(["cp", "--sparse=always", self._image, again], check=True)
            self._image = again
            options += ",nouuid" if self.path.name == "xfs" else ""
        assert not (failed := complaint_of("mount", "-o", options, str(self._image), str(self.path))), failed

    def close(self) -> None:
        self._mount.close()


def save_then_cut(disk: Path, request: SaveRequest) -> Attempt:
    """Saves, and cuts the power as soon as the save has returned on one rank."""
    outcome = save(request)
    with contextlib.suppress(OSError):  # another rank was faster
        cut_power(disk)
    return outcome
