# SPDX-License-Identifier: Apache-2.0
"""Fair conditions for a timed call: an idle machine, warm memory, durable files, a cold page cache."""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# A machine counts as idle if less than this share of one core is in use. Daemons and the benchmark's terminal use less.
_IDLE_CORES = 0.3
_IDLE_WINDOW_S = 0.25

# The memory is private, because Python's default is shared memory, which on most systems never gets huge pages. Every 4
# KiB is touched, because there may be too few huge pages left.
_KEEPER = """
import mmap, sys
size = int(sys.argv[1])
for _ in sys.stdin:
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        memory[::4096] = bytes(size // 4096)
        print("held", flush=True)
        sys.stdin.readline()
    print("free", flush=True)
"""


class WarmMemory:
    """A child process that holds the machine's memory between timed calls, and frees it just before each.

    A virtual machine returns unused memory to its host within seconds, and then the next process that needs memory
    pays: 0.3 to 0.6 GB/s were measured, against 15 and more for memory that the machine still has.
    """

    def __init__(self, size: int) -> None:
        command = [sys.executable, "-S", "-c", _KEEPER, str(size)]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.hold()

    def hold(self) -> None:
        """Allocates the memory and touches all of it."""
        self._ask("hold", "held")

    def free(self) -> None:
        """Frees the memory for any process, so the timed call must begin at once."""
        self._ask("free", "free")

    def close(self) -> None:
        self._child.communicate()

    def _ask(self, word: str, wanted: str) -> None:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(word + "\n")
        self._child.stdin.flush()
        answer = self._child.stdout.readline().strip()
        if answer != wanted:
            raise RuntimeError(f"the child that keeps memory warm: wanted '{wanted}', got '{answer}'")


class Stopwatch:
    """Times calls that all begin under the same conditions. A context manager.

    Args:
        warm_gib: Memory, in GiB, to keep warm for the calls. 0 for none.
        idle_limit_s: Seconds to wait for an idle machine before each call. After that the call begins anyway and counts
            in ``busy_starts``.

    Attributes:
        num_calls: Calls started so far.
        busy_starts: Number of calls that started on a machine that was not idle.
    """

    def __init__(self, warm_gib: float, idle_limit_s: float) -> None:
        self._idle_limit_s = idle_limit_s
        self._memory = WarmMemory(int(warm_gib * (1 << 30))) if warm_gib > 0 else None
        self.num_calls = 0
        self.busy_starts = 0

    def __enter__(self) -> Stopwatch:
        return self

    def __exit__(self, *_: object) -> None:
        if self._memory is not None:
            self._memory.close()

    @contextmanager
    def conditions(self) -> Iterator[None]:
        """Surrounds a timed call, which begins on an idle machine with warm memory available."""
        gc.collect()
        self.num_calls += 1
        if not wait_until_idle(self._idle_limit_s):
            self.busy_starts += 1
        if self._memory is not None:
            self._memory.free()
        try:
            yield
        finally:
            if self._memory is not None:
                self._memory.hold()

    def time(self, call: Callable[[], Any]) -> float:
        """Returns the wall-clock seconds of ``call``."""
        with self.conditions():
            begin = time.perf_counter()
            call()
            return time.perf_counter() - begin


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that all timing scripts share."""
    parser.add_argument("--repetitions", type=int, default=5, help="counted rounds, after one that is not (default 5)")
    parser.add_argument("--warm-gib", type=float, default=4.0, help="memory kept warm for the calls (default 4)")
    parser.add_argument("--idle-limit-s", type=float, default=20.0, help="longest wait for idleness (default 20)")
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="where to write (default: here)")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")


def wait_until_idle(limit_s: float) -> bool:
    """Waits until a quarter of a second passes with hardly any work on any core.

    A core that waits for the disk is not idle, because some process is writing.

    Returns:
        False if the machine was still busy after ``limit_s`` seconds. With a limit of 0 it is True without a check.
    """
    if limit_s <= 0:
        return True
    give_up = time.monotonic() + limit_s
    while True:
        busy_before, all_before = _ticks()
        time.sleep(_IDLE_WINDOW_S)
        busy_after, all_after = _ticks()
        share = (busy_after - busy_before) / max(1, all_after - all_before)
        if share * (os.cpu_count() or 1) < _IDLE_CORES:
            return True
        if time.monotonic() >= give_up:
            return False


def _ticks() -> tuple[int, int]:
    """Returns the clock ticks since boot in which cores were busy, and all ticks."""
    first_line = Path("/proc/stat").read_text().partition("\n")[0]
    # user, nice, system, idle, iowait, irq, softirq, steal. The later fields are already counted in user.
    fields = [int(field) for field in first_line.split()[1:9]]
    return sum(fields) - fields[3], sum(fields)


def sync_tree(path: Path) -> None:
    """Makes a checkpoint durable whose writer syncs nothing: files, directories, and the entry in the parent."""
    for file in _files(path):
        _sync(file)
    sync_directories(path)


def sync_directories(path: Path) -> None:
    """Makes a checkpoint durable whose writer syncs its files."""
    for directory, _, _ in os.walk(path):
        _sync(Path(directory))
    _sync(path.parent)


def sync_files(path: Path) -> None:
    """Makes a checkpoint durable whose writer syncs nothing."""
    for file in _files(path):
        _sync(file)
    sync_directories(path)


def drop_page_cache(path: Path) -> None:
    """Makes the next read of these files come from disk. Does not touch anything else in the page cache."""
    for file in _files(path):
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fsync(fd)  # dirty pages would stay
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def _files(path: Path) -> Iterator[Path]:
    for directory, _, names in os.walk(path):
        yield from (Path(directory) / name for name in names)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
