# SPDX-License-Identifier: Apache-2.0
"""Tests with strace that ``bcp verify`` makes no system call that changes anything, from its start to its end."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.fork_server import LIMIT_S
from support.saves import data_files

from faults.strace import strace_or_skip

ROOT = Path(__file__).parents[2]

_CALL = re.compile(r"(?:\d+ +)?(\w+)\((.*)")
_FOR_WRITING = re.compile(r"\bO_(WRONLY|RDWR|CREAT|TRUNC|APPEND|TMPFILE)\b")
_CHANGING = re.compile(
    r"creat|f?truncate|fallocate|copy_file_range|sendfile|splice|f?sync|fdatasync|flock|mk|rmdir|rename|u?n?link"
    r"|symlink|[fl]?chmod|[fl]?chown|f?utime|[fl]?setxattr|[fl]?removexattr|u?mount"
)
_WRITING = re.compile(r"p?writev?(64|2)?$")
# Writes to the caller's streams, and to what has no name: pipes, events, memory.
_OURS = re.compile(r"[12]<|\d+<(pipe|socket|anon_inode|/memfd)|\d+</dev/(null|tty|pts/\d+)>")
_LOCKING = re.compile(r"F_(OFD_)?SETLKW?\b")


def changes_in(log: Path) -> list[str]:
    """Returns the calls that change a file or a directory, or would if they did not fail, or that take a lock."""
    found = []
    for line in log.read_text().splitlines():
        match = _CALL.match(line)
        if match is None:
            continue
        name, arguments = match[1], match[2]
        if name.startswith("open"):
            is_change = bool(_FOR_WRITING.search(arguments)) and '"/dev/' not in arguments
        elif _WRITING.match(name):
            is_change = not _OURS.match(arguments)
        elif name == "fcntl":
            is_change = bool(_LOCKING.search(arguments))
        else:
            is_change = bool(_CHANGING.match(name))
        if is_change:
            found.append(line)
    return found


def watched(log: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Runs a command, and all that it starts, under strace from the beginning."""
    return subprocess.run(
        [strace_or_skip(), "-f", "-y", "-s", "0", "-e", "trace=%file,%desc", "-o", str(log), *command],
        # Otherwise Python writes compiled modules beside its sources.
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )


def damaged(path: Path) -> None:
    file = path / data_files(path)[0]
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)


def half(path: Path) -> None:
    """Leaves what a save leaves that dies: a tmp, and files that no commit mark names, one of them cut off."""
    (path / ".metadata").rename(path / ".metadata.0123456789abcdef0123456789abcdef.tmp")
    file = next(path.glob("*.distcp"))
    os.truncate(file, file.stat().st_size // 2)


def remains(path: Path) -> None:
    """Adds the remains of another save beside a whole checkpoint."""
    (path / ".metadata.0123456789abcdef0123456789abcdef.tmp").touch()
    (path / "__0_0.0123456789abcdef.distcp").write_bytes(bytes(5000))


STATES: dict[str, tuple[Callable[[Path], object], int]] = {
    "sound": (lambda path: None, 0),
    "damaged": (damaged, 1),
    "half": (half, 2),
    "file is missing": (lambda path: (path / data_files(path)[0]).unlink(), 1),
    "remains of another save": (remains, 0),
}


@pytest.mark.parametrize("state", STATES)
def test_verify(state: str, small_checkpoint: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(small_checkpoint, tmp_path / "ckpt"))
    spoil, code = STATES[state]
    spoil(path)
    before = {file.name: (file.read_bytes(), file.stat()) for file in path.iterdir() if file.is_file()}
    log = tmp_path / "strace.log"
    ran = watched(log, sys.executable, "-m", "bytecheckpoint", "verify", str(path))
    assert ran.returncode == code, ran.stdout + ran.stderr
    assert changes_in(log) == []
    assert str(path) in log.read_text(), "it did not look at the checkpoint"
    after = {file.name: (file.read_bytes(), file.stat()) for file in path.iterdir() if file.is_file()}
    assert {name: (content, stat.st_mtime_ns) for name, (content, stat) in before.items()} == {
        name: (content, stat.st_mtime_ns) for name, (content, stat) in after.items()
    }


CHANGES = (
    *("echo >f", "mkdir d", "rmdir d", "rm f", "mv f g", "ln f h", "ln -s f i", "chmod 1 f", "chown 1 f", "touch f"),
    *("truncate -s1 f", "mkfifo j", "sync f", "flock f true"),
)


def test_changes_are_seen(tmp_path: Path) -> None:
    log = tmp_path / "strace.log"
    for change in ("cat f", *CHANGES):
        (tmp_path / "f").write_text("content")
        assert watched(log, "sh", "-c", f"cd {tmp_path}; {change}").returncode == 0
        assert bool(changes_in(log)) == (change in CHANGES), log.read_text()
