# SPDX-License-Identifier: Apache-2.0
"""Mounts ``late_fs.cpp``: two machines that see late, and in any order, what the other one does."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from support.mounts import fuse_mounted

__all__ = ["LATE", "late"]

SOURCE = Path(__file__).with_name("late_fs.cpp")
PROGRAM = SOURCE.parents[2] / "build" / "late_fs"
UNTESTED = "A FILE SYSTEM THAT SHOWS CHANGES LATE"


def _build() -> None:
    """Compiles the program, unless it is newer than its source. Skips without libfuse, which fails in CI."""
    if PROGRAM.exists() and PROGRAM.stat().st_mtime > SOURCE.stat().st_mtime:
        return
    found = subprocess.run(["pkg-config", "--cflags", "--libs", "fuse3"], capture_output=True, text=True, check=False)
    if found.returncode != 0:
        give_up = pytest.fail if os.environ.get("CI") else pytest.skip
        give_up(f"{UNTESTED} NOT TESTED: libfuse3-dev or pkg-config is not installed")
    PROGRAM.parent.mkdir(parents=True, exist_ok=True)
    made = PROGRAM.with_suffix(f".{os.getpid()}")  # workers may compile at once
    command = [os.environ.get("CXX", "g++"), "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", str(SOURCE)]
    subprocess.run([*command, "-o", str(made), *found.stdout.split(), "-pthread"], check=True)
    made.replace(PROGRAM)


def late(*options: str) -> Callable[[contextlib.ExitStack, Path], tuple[Path, Path]]:
    """Returns what mounts it with these options of the program in an empty directory, and returns both mounts."""

    def mount(stack: contextlib.ExitStack, root: Path) -> tuple[Path, Path]:
        _build()
        views = root / "a", root / "b"
        views[1].mkdir()
        # The program unmounts it, unless it had to be killed.
        stack.callback(subprocess.run, ["umount", "-l", str(views[1])], check=False, stderr=subprocess.DEVNULL)
        stack.enter_context(fuse_mounted(views[0], str(PROGRAM), *map(str, views), *options, untested=UNTESTED))
        return views

    return mount


# Half a minute is longer than any of the tests: what is late comes when a directory is listed, or not at all.
_ALONE = ("create=30", "rename=30", "unlink=30", "size=30")
LATE = {f"late: {option} {of}": late(option, of) for option in _ALONE for of in ("of=a", "of=b")} | {
    "late: at the flush": late("unflushed"),
    "late: in another order": late("create=30", "unlink=1", "size=1"),
    "late: all": late("unflushed", *_ALONE),
}
"""What mounts it by name: each kind of change late by itself, in either direction, and some together."""
