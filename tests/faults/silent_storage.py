# SPDX-License-Identifier: Apache-2.0
"""Storage that does not answer: a directory behind a FUSE mount, whose program a test can stop."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.fork_server import LIMIT_S
from support.mounts import fuse_mounted

__all__ = ["SilentStorage", "silent_storage"]


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
    (root / "real").mkdir(parents=True)
    command = ("bindfs", "-f", *options, str(root / "real"), str(root / "mount"))
    with fuse_mounted(root / "mount", *command, untested="STORAGE THAT DOES NOT ANSWER") as running:
        yield SilentStorage(root, running)
