# SPDX-License-Identifier: Apache-2.0
"""``ArrivingFile``: a file in memory, which the body of a frame is received into."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import zlib
from collections.abc import Callable
from types import TracebackType

from bytecheckpoint.storage.memory.peer_frames import receive_into

__all__ = ["ArrivingFile"]

_PIECE_BYTES = 8 << 20


class ArrivingFile:
    """A file in memory of exactly the bytes that arrive. A context manager: what is not given away is freed at its end.

    Args:
        spare: Descriptor of a file to write over, which belongs to this object now; None for a new file.
        num_bytes: Bytes that arrive.

    Raises:
        OSError: There is no descriptor for it, or no memory.
    """

    def __init__(self, spare: int | None, num_bytes: int) -> None:
        self.fd = os.memfd_create("bytecheckpoint", os.MFD_CLOEXEC) if spare is None else spare
        self._num_bytes = num_bytes
        self._mapped: mmap.mmap | None = None
        try:
            os.ftruncate(self.fd, num_bytes)
            if num_bytes:  # nothing cannot be mapped
                self._mapped = mmap.mmap(self.fd, num_bytes)
                with contextlib.suppress(OSError):  # advice: of a kernel without it there are more pages
                    self._mapped.madvise(mmap.MADV_HUGEPAGE)
        except BaseException:
            self._close()
            raise

    def __enter__(self) -> ArrivingFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def receive(self, peer: socket.socket, arrived: Callable[[int, int], None]) -> None:
        """Receives the bytes.

        Args:
            peer: The connection.
            arrived: Called with the begin and the end of each piece that has arrived.

        Raises:
            OSError: The connection failed, or ended.
        """
        if self._mapped is None:
            return
        with memoryview(self._mapped) as view:
            for begin in range(0, self._num_bytes, _PIECE_BYTES):
                end = min(begin + _PIECE_BYTES, self._num_bytes)
                with view[begin:end] as piece:
                    receive_into(peer, piece)
                arrived(begin, end)

    def crc32(self) -> int:
        """Returns the CRC-32 of what has arrived."""
        return zlib.crc32(self._mapped if self._mapped is not None else b"")

    def given(self) -> int:
        """Returns the descriptor, which is the caller's from now on."""
        fd, self.fd = self.fd, -1
        return fd

    def _close(self) -> None:
        if self._mapped is not None:
            self._mapped.close()
        if self.fd >= 0:
            os.close(self.given())
