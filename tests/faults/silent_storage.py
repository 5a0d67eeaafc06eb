# SPDX-License-Identifier: Apache-2.0
"""Storage that does not answer: a directory behind a FUSE mount, whose program a test can stop."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from faults.fork_server import LIMIT_S

__all__ = ["SilentStorage", "silent_storage"]

_MOUNTS = Path("/proc/self/mounts")


class SilentStorage:
    """A mount that answers until ``stop`` is called.

    Attributes:
        path: The directory through the mount.
        real: The directory itself, which always answers.
    """

    def __init__(self, root: Path, program: subprocess.Popen[bytes]) -> None:
        self.path = root / "mount"
        self.real = root / "real"
        self._program = program

    def stop(self) -> None:
        """Makes all calls hang from now on."""
        self._program.send_signal(signal.SIGSTOP)
        change = os.waitid(os.P_PID, self._program.pid, os.WSTOPPED | os.WEXITED)
        assert change is not None
        assert change.si_code == os.CLD_STOPPED, "the program of the mount has ended"

    def answer(self) -> None:
        """Answers the calls that hang, and all after them."""
        self._program.send_signal(signal.SIGCONT)

    def die(self) -> None:
        """Makes the calls that hang, and all after them, fail with ENOTCONN or ECONNABORTED."""
        self._program.kill()
        self._program.wait(LIMIT_S)


@contextmanager
def silent_storage(root: Path, *options: str) -> Iterator[SilentStorage]:
    """Mounts below ``root`` while the context lasts. Skips the test, with the reason, if that is not possible.

    Args:
        options: More options for bindfs.
    """
    program = shutil.which("bindfs")
    if program is None or not os.access("/dev/fuse", os.R_OK | os.W_OK):
        why = "bindfs is not installed (apt-get install bindfs)" if program is None else "/dev/fuse is not to be had"
        pytest.skip(f"STORAGE THAT DOES NOT ANSWER IS NOT TESTED: {why}")
    for name in ("real", "mount"):
        (root / name).mkdir(parents=True)
    with subprocess.Popen([program, "-f", *options, str(root / "real"), str(root / "mount")]) as running:
        storage = SilentStorage(root, running)
        try:
            if not _is_mounted(storage.path):
                pytest.skip("STORAGE THAT DOES NOT ANSWER IS NOT TESTED: this user may not mount")
            yield storage
        finally:
            if running.poll() is None:
                storage.answer()
            # Unmounts lazily: the program lives on until the last open file is closed.
            unmount = ["umount", "-l"] if os.geteuid() == 0 else ["fusermount", "-u", "-z"]
            subprocess.run([*unmount, str(storage.path)], check=False, stderr=subprocess.DEVNULL)
            try:
                running.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                running.kill()


def _is_mounted(path: Path) -> bool:
    """Waits until ``path`` is mounted; False if it never is. The kernel notifies whoever polls the list of mounts."""
    with _MOUNTS.open() as mounts:
        changed = select.poll()
        changed.register(mounts, select.POLLPRI | select.POLLERR)
        while f" {path} " not in mounts.read():
            if not changed.poll(LIMIT_S * 1000):
                return False
            mounts.seek(0)
    return True
