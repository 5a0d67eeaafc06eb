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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

__all__ = ["REQUEST_BYTES", "Disk", "has_direct_io", "nameless_file", "use_direct_io"]

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
        progress: Function that is called with the bytes of each request that is done, by one thread at a time.
    """

    def __init__(
        self, num_threads: int, huge_pages: bool = True, progress: Callable[[int], object] | None = None
    ) -> None:
        self._num_threads = num_threads
        self._progress = progress
        self._telling = Lock()
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
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC)
        try:
            self.write_to(fd, num_bytes, direct_io=True)
        finally:
            os.close(fd)
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def read(self, path: Path, num_bytes: int) -> None:
        """Reads what ``write`` wrote."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            self.read_from(fd, num_bytes)
        finally:
            os.close(fd)

    def write_to(self, fd: int, num_bytes: int, *, direct_io: bool) -> None:
        """Reserves space in an open file, writes ``num_bytes``, rounded up to 4 KiB, and syncs the file.

        Raises:
            OSError: The file system refused.
        """
        size = _aligned(num_bytes)
        # Not posix_fallocate: where the file system cannot reserve, that writes to each block.
        ctypes.CDLL(None).fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size))
        if direct_io:
            use_direct_io(fd)
        self._each_request(size, lambda buffer, offset: os.pwrite(fd, buffer, offset))
        os.fsync(fd)

    def read_from(self, fd: int, num_bytes: int) -> None:
        """Reads what ``write_to`` wrote.

        Raises:
            OSError: The file system refused, or the file is shorter.
        """
        self._each_request(_aligned(num_bytes), lambda buffer, offset: os.preadv(fd, [buffer], offset))

    def write_block(self, fd: int) -> None:
        """Writes 4 KiB at the beginning of a file, and syncs it.

        Raises:
            OSError: The file system refused.
        """
        os.pwrite(fd, self._buffers[0][:ALIGNMENT], 0)
        os.fsync(fd)

    def stop(self) -> None:
        """Makes what runs now end after the requests that are in progress. Nothing more can be done with this disk."""
        self._is_stopped = True

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
                if self._progress is not None:
                    with self._telling:
                        self._progress(got)

        if self._num_threads == 1:
            work(0)
            return
        with ThreadPoolExecutor(self._num_threads) as pool:
            try:
                list(pool.map(work, range(self._num_threads)))
            except BaseException:
                self.stop()  # the end of the pool waits for its threads
                raise


@contextmanager
def nameless_file(directory: Path) -> Iterator[int]:
    """Yields the descriptor of a new file without a name, which is gone with this process, however that ends.

    Raises:
        OSError: The file system refused.
    """
    with tempfile.TemporaryFile(dir=directory, prefix=".bcp-bench-", buffering=0) as file:
        yield file.fileno()


def use_direct_io(fd: int) -> None:
    """Makes reads and writes of an open file bypass the page cache.

    Raises:
        OSError: The file system refused; EINVAL if it has no O_DIRECT.
    """
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)


def has_direct_io(directory: Path) -> bool:
    """Whether the file system of ``directory`` supports O_DIRECT."""
    with nameless_file(directory) as fd:
        try:
            use_direct_io(fd)
        except OSError as error:
            if error.errno == errno.EINVAL:
                return False
            raise
    return True


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
