# SPDX-License-Identifier: Apache-2.0
"""Sequential writes and reads of one file in requests of 8 MiB, as the engine makes them, and nothing else.

Buffers lie on pages of 2 MiB, with which a request reaches the device in few pieces, or on pages of 4 KiB. Nothing is
copied, and no checksum is computed.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

__all__ = ["Disk", "has_direct_io"]

ALIGNMENT = 4096
REQUEST_BYTES = 8 << 20
HUGE_PAGE_BYTES = 2 << 20
# Each thread uses a few buffers in turn, like an engine's ring: one buffer alone would be unrealistically warm in
# caches.
BUFFERS_PER_THREAD = 4


class Disk:
    """Moves bytes between the disk and existing buffers.

    Args:
        num_threads: Threads. Each has one request in progress.
        huge_pages: Whether buffers lie on pages of 2 MiB instead of 4 KiB.
    """

    def __init__(self, num_threads: int, huge_pages: bool = True) -> None:
        self._num_threads = num_threads
        self._is_stopped = False
        num_buffers = num_threads * BUFFERS_PER_THREAD
        size = num_buffers * REQUEST_BYTES + HUGE_PAGE_BYTES
        # Private, because Python's default is shared memory, which on most systems never gets huge pages.
        self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory.madvise(mmap.MADV_HUGEPAGE if huge_pages else mmap.MADV_NOHUGEPAGE)
        first = -ctypes.addressof(ctypes.c_char.from_buffer(self._memory)) % HUGE_PAGE_BYTES
        view = memoryview(self._memory)
        self._buffers = [view[first + i * REQUEST_BYTES :][:REQUEST_BYTES] for i in range(num_buffers)]
        for buffer in self._buffers:  # touches every page; random, because a disk may be fast with zeros
            buffer[:] = os.urandom(REQUEST_BYTES)

    def write(self, path: Path, num_bytes: int) -> None:
        """Writes and syncs a new file of ``num_bytes``, rounded up to 4 KiB, and syncs its directory."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_DIRECT)
        try:
            size = _aligned(num_bytes)
            # Not posix_fallocate: where the file system cannot reserve, that writes to each block.
            ctypes.CDLL(None).fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size))
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
        """Reads what ``write`` wrote.

        Raises:
            OSError: The file system refused, or the file is shorter.
        """
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            self._each_request(_aligned(num_bytes), lambda buffer, offset: os.preadv(fd, [buffer], offset))
        finally:
            os.close(fd)

    def _each_request(self, size: int, transfer: Callable[[memoryview, int], int]) -> None:
        offsets = iter(range(0, size, REQUEST_BYTES))  # shared, so each request goes to the first free thread

        def work(thread: int) -> None:
            mine = self._buffers[thread * BUFFERS_PER_THREAD :][:BUFFERS_PER_THREAD]
            for count, offset in enumerate(offsets):
                if self._is_stopped:
                    return
                wanted = min(REQUEST_BYTES, size - offset)
                got = transfer(mine[count % BUFFERS_PER_THREAD][:wanted], offset)
                if got != wanted:
                    raise OSError(errno.EIO, f"request at {offset}: wanted {wanted} bytes, got {got}")

        if self._num_threads == 1:
            work(0)
            return
        with ThreadPoolExecutor(self._num_threads) as pool:
            try:
                list(pool.map(work, range(self._num_threads)))
            except BaseException:
                self._is_stopped = True  # the end of the pool waits for its threads
                raise


def has_direct_io(directory: Path) -> bool:
    """Whether the file system of ``directory`` supports O_DIRECT."""
    with tempfile.TemporaryFile(dir=directory) as file:
        try:
            fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_DIRECT)
        except OSError as error:
            if error.errno == errno.EINVAL:
                return False
            raise
    return True


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
