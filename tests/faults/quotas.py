# SPDX-License-Identifier: Apache-2.0
"""Directories with a quota, each on a disk of its own."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.fork_server import LIMIT_S
from support.mounts import complaint_of, file_system_in_file, mounted

from faults.unprivileged import NOBODY

__all__ = ["KINDS", "Quota"]

_PROJECT = 7


@dataclass(frozen=True)
class Kind:
    """A file system, and what its quota limits.

    Attributes:
        make: The command that makes it.
        limits: Option of setquota: "-u" limits a user, "-P" a project; empty for a subvolume of btrfs.
        errnos: Errors of a call that would exceed the quota.
        tools: The other program that is needed, and the package to install for it.
    """

    make: tuple[str, ...]
    num_bytes: int
    options: str
    limits: str = ""
    errnos: tuple[int, ...] = (errno.EDQUOT,)
    tools: tuple[str, str] = ("setquota", "quota")


KINDS = {
    "btrfs subvolume": Kind(("mkfs.btrfs", "-q"), 128 << 20, "loop", tools=("btrfs", "btrfs-progs")),
    "ext4 user": Kind(("mkfs.ext4", "-q", "-O", "quota"), 64 << 20, "loop,usrquota", "-u"),
    "ext4 project": Kind(
        ("mkfs.ext4", "-q", "-O", "quota,project", "-E", "quotatype=prjquota"),
        64 << 20,
        "loop,prjquota",
        "-P",
        # Whoever checks for room before writing gets ENOSPC, because statvfs reports what the project has left.
        (errno.EDQUOT, errno.ENOSPC),
    ),
    "xfs user": Kind(("mkfs.xfs", "-q"), 320 << 20, "loop,usrquota", "-u"),
    # For a project, xfs reports that the disk is full.
    "xfs project": Kind(("mkfs.xfs", "-q"), 320 << 20, "loop,prjquota", "-P", (errno.ENOSPC,)),
}


def _must(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout


class Quota:
    """An active quota of one kind. Skips the test, with the reason, if the system cannot provide it.

    Attributes:
        path: A directory that anybody may write to. The quota limits a user without privileges.
    """

    def __init__(self, name: str, directory: Path) -> None:
        self.kind = KINDS[name]
        what = f"QUOTA OF {name}, WHICH NOT EVERY KERNEL HAS,"
        program, package = self.kind.tools
        if shutil.which(program) is None:
            give_up = pytest.fail if os.environ.get("CI") else pytest.skip
            give_up(f"{what} NOT TESTED: {program} is not installed (apt-get install {package})")
        image = directory / "quota.img"
        file_system_in_file(image, self.kind.num_bytes, *self.kind.make, untested=what)
        self._disk = directory / "disk"
        self._mount = contextlib.ExitStack()
        # A kernel may support the file system, but not its quotas.
        options = ("-t", name.split()[0], "-o", self.kind.options, str(image))
        self._mount.enter_context(mounted(self._disk, *options, untested=what))
        self.path = self._disk / "limited"
        try:
            self._begin(what)
        except BaseException:
            self._mount.close()
            raise

    def _begin(self, what: str) -> None:
        if not self.kind.limits:
            _must("btrfs", "quota", "enable", str(self._disk))
            _must("btrfs", "quota", "rescan", "-w", str(self._disk))
            _must("btrfs", "subvolume", "create", str(self.path))
            self._subvolume = f"0/{_must('btrfs', 'inspect-internal', 'rootid', str(self.path)).strip()}"
        else:
            self.path.mkdir()
            if failed := complaint_of("setquota", self.kind.limits, "0", "0", "0", "0", "0", str(self._disk)):
                pytest.skip(f"{what} NOT TESTED: {failed}")
        if self.kind.limits == "-P":
            _must("chattr", "-p", str(_PROJECT), "+P", str(self.path))
        self.path.chmod(0o777)

    def limit(self, num_bytes: int | None, num_files: int = 0) -> None:
        """Sets the limits on the total from now on. ``num_bytes`` None and ``num_files`` 0 mean no limit."""
        if self.kind.limits:
            who, blocks = self._who(), -(-(num_bytes or 0) // 1024)
            _must("setquota", self.kind.limits, who, "0", str(blocks), "0", str(num_files), str(self._disk))
        else:
            assert not num_files, "btrfs does not limit them"
            limit = "none" if num_bytes is None else str(num_bytes)
            # Addressed through the disk: a change through the subvolume would count there, and might exceed its limit.
            _must("btrfs", "qgroup", "limit", limit, self._subvolume, str(self._disk))

    def used_bytes(self) -> int:
        """Returns how many bytes count against the limit."""
        return self._used()[0]

    def num_files(self) -> int:
        return self._used()[1]

    def _used(self) -> tuple[int, int]:
        # Data that are only in memory count too late: when the file system allocates their space on disk.
        _must("sync", "-f", str(self.path))
        if not self.kind.limits:
            last = _must("btrfs", "qgroup", "show", "--raw", "-f", str(self.path)).splitlines()[-1]
            return int(last.split()[1]), 0
        user = f"#{self._who()}"
        table = _must("repquota", self.kind.limits, "-n", "-v", str(self._disk)).splitlines()
        fields = next((line.split() for line in table if line.split()[:1] == [user]), [])
        if not fields:
            return 0, 0  # repquota does not list who has nothing
        # The fields: name, two signs for exceeded limits; used, soft, hard and grace for blocks; the same for files.
        return int(fields[2]) * 1024, int(next(field for field in fields[5:] if field.isdigit()))

    def _who(self) -> str:
        return str(NOBODY if self.kind.limits == "-u" else _PROJECT)

    def close(self) -> None:
        self._mount.close()
