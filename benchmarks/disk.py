# SPDX-License-Identifier: Apache-2.0
"""The disk's own ceiling: sequential O_DIRECT writes and reads of one file, in requests of 8 MiB.

Buffers lie on pages of 2 MiB, which let a request reach the device in few pieces; on pages of 4 KiB for reference. The
file is preallocated within the timed write, and synced at its end, as an engine does. Nothing is copied or summed.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import json
import mmap
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import machine
from measuring import Stopwatch, add_arguments
from rich.console import Console
from rich.table import Table

ALIGNMENT = 4096
REQUEST_BYTES = 8 << 20
HUGE_PAGE_BYTES = 2 << 20
# Each thread goes round a few buffers, like an engine's ring: one alone would be as warm in the caches as nothing real.
BUFFERS_PER_THREAD = 4


class Disk:
    """Moves bytes between the disk and buffers that exist already.

    Args:
        num_threads: Threads that each have one request under way.
        huge_pages: Buffers on pages of 2 MiB, else of 4 KiB.
    """

    def __init__(self, num_threads: int, huge_pages: bool = True) -> None:
        self._num_threads = num_threads
        num_buffers = num_threads * BUFFERS_PER_THREAD
        size = num_buffers * REQUEST_BYTES + HUGE_PAGE_BYTES
        # Private: Python's default is shared memory, which on most systems never gets huge pages.
        self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory.madvise(mmap.MADV_HUGEPAGE if huge_pages else mmap.MADV_NOHUGEPAGE)
        first = -ctypes.addressof(ctypes.c_char.from_buffer(self._memory)) % HUGE_PAGE_BYTES
        view = memoryview(self._memory)
        self._buffers = [view[first + i * REQUEST_BYTES :][:REQUEST_BYTES] for i in range(num_buffers)]
        for buffer in self._buffers:  # touches every page; random, because a disk may be fast at zeros
            buffer[:] = os.urandom(REQUEST_BYTES)

    def write(self, path: Path, num_bytes: int) -> None:
        """Writes and syncs a new file of ``num_bytes``, rounded up to 4 KiB, and syncs its directory."""
        size = _aligned(num_bytes)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT)
        try:
            os.posix_fallocate(fd, 0, size)
            self._each_request(size, lambda buffer, offset: os.pwrite(fd, buffer, offset))
            os.fsync(fd)
        finally:
            os.close(fd)
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def read(self, path: Path, num_bytes: int) -> None:
        """Reads back what ``write`` wrote."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            self._each_request(_aligned(num_bytes), lambda buffer, offset: os.preadv(fd, [buffer], offset))
        finally:
            os.close(fd)

    def _each_request(self, size: int, transfer: Callable[[memoryview, int], int]) -> None:
        offsets = iter(range(0, size, REQUEST_BYTES))  # shared: each request goes to the thread that is free first

        def work(thread: int) -> None:
            mine = self._buffers[thread * BUFFERS_PER_THREAD :][:BUFFERS_PER_THREAD]
            for count, offset in enumerate(offsets):
                wanted = min(REQUEST_BYTES, size - offset)
                got = transfer(mine[count % BUFFERS_PER_THREAD][:wanted], offset)
                if got != wanted:
                    raise OSError(errno.EIO, f"request at {offset}: wanted {wanted} bytes, got {got}")

        if self._num_threads == 1:
            work(0)
            return
        with ThreadPoolExecutor(self._num_threads) as pool:
            list(pool.map(work, range(self._num_threads)))


def has_direct_io(directory: Path) -> bool:
    """Does the file system of ``directory`` take O_DIRECT?"""
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        try:
            os.close(os.open(Path(folder) / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
        except OSError as error:
            if error.errno == errno.EINVAL:
                return False
            raise
    return True


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def measure(arguments: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Seconds of each configuration by round, configurations interleaved; the first round is not counted."""
    disks = {
        f"{pages}, {threads} thread{'s' * (threads > 1)}": Disk(threads, pages == "2 MiB pages")
        for pages in ("2 MiB pages", "4 KiB pages")
        for threads in (1, 2)
    }
    num_bytes = int(arguments.gigabytes * 1e9)
    seconds: dict[str, dict[str, list[float]]] = {name: {"save": [], "load": []} for name in disks}
    with (
        Stopwatch(arguments.warm_gib, arguments.idle_limit_s) as stopwatch,
        tempfile.TemporaryDirectory(dir=arguments.dir, prefix="disk-") as folder,
    ):
        path = Path(folder) / "raw"
        for repetition in range(arguments.repetitions + 1):
            for name, disk in disks.items():
                save_s = stopwatch.time(partial(disk.write, path, num_bytes))
                load_s = stopwatch.time(partial(disk.read, path, num_bytes))
                path.unlink()
                if repetition:
                    seconds[name]["save"].append(save_s)
                    seconds[name]["load"].append(load_s)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the file (default 1)")
    add_arguments(parser)
    arguments = parser.parse_args()
    if not has_direct_io(arguments.dir):
        sys.exit(f"{arguments.dir}: this file system has no O_DIRECT")

    seconds = measure(arguments)
    facts = machine.facts(arguments.dir)
    console = Console(highlight=False, width=100)
    console.print(f"{arguments.gigabytes:g} GB, {machine.summary(facts)}")
    table = Table()
    for column in ("", "write, s", "GB/s", "read, s", "GB/s"):
        table.add_column(column, justify="right" if column else "left")
    for name, by_action in seconds.items():
        medians = [statistics.median(by_action[action]) for action in ("save", "load")]
        table.add_row(name, *(text for s in medians for text in (f"{s:.3f}", f"{arguments.gigabytes / s:.2f}")))
    console.print(table)
    if arguments.json:
        command = machine.command("disk.py", arguments, parser)
        report = {"command": command, "machine": facts, "gigabytes": arguments.gigabytes, "seconds": seconds}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
