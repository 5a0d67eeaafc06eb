# SPDX-License-Identifier: Apache-2.0
"""How fast the disk of a folder is: sequential writes, reads, both at once, and syncs. Leaves nothing behind."""

from __future__ import annotations

import json
import os
import socket
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from bytecheckpoint.checkpoint.journal_files import DISK, FOLDER
from bytecheckpoint.checkpoint.small_files import made_folder, replacing, storage_errors
from bytecheckpoint.cli.raw_disk import REQUEST_BYTES, Disk, has_direct_io, nameless_file
from bytecheckpoint.config import Config
from bytecheckpoint.errors import ConfigError
from bytecheckpoint.report.text import size_text

__all__ = ["DEFAULT_BYTES", "DiskSpeed", "measure_disk", "save_disk_speed", "size_to_measure"]

DEFAULT_BYTES = 1 << 30
_FORMAT = 1
_SYNCS = 32
# There are two files at a time, and half of what is free is left to others.
_SHARE_OF_FREE = 4


@dataclass(frozen=True, kw_only=True)
class DiskSpeed:
    """What was measured: medians of several rounds.

    Attributes:
        at: When it began, in seconds since 1970.
        host: Name of this host, unless names are turned off.
        write_gb_per_s: GB (1e9 bytes) in a second of a sequential write, with the sync at its end.
        read_gb_per_s: The same of a sequential read.
        both_gb_per_s: Bytes written and read together, in a second, if a write and a read run at once.
        fsync_s: Seconds of a write of 4 KiB and its sync.
        num_bytes: Bytes of the file.
        direct_io: Whether the page cache was bypassed, which some file systems refuse.
        num_threads: Requests in progress of a write, and of a read.
        rounds: Number of rounds.
    """

    at: float
    host: str
    write_gb_per_s: float
    read_gb_per_s: float
    both_gb_per_s: float
    fsync_s: float
    num_bytes: int
    direct_io: bool
    num_threads: int
    rounds: int

    def to_dict(self) -> dict[str, object]:
        """Returns all fields, and the version of their format, as plain data."""
        return {"format": _FORMAT, **asdict(self)}


def size_to_measure(folder: Path, wanted: int | None) -> int:
    """Returns how many bytes a file for the measurement of a folder has.

    Args:
        folder: The folder.
        wanted: Bytes that the user asks for; None takes 1 GiB, or less if little is free.

    Raises:
        ConfigError: Too little is free.
        StorageError: The file system refused to say.
    """
    with storage_errors("statvfs", folder):
        about = os.statvfs(folder)
    free = about.f_bavail * about.f_frsize
    most = free // _SHARE_OF_FREE // REQUEST_BYTES * REQUEST_BYTES
    size = min(DEFAULT_BYTES, most) if wanted is None else -(-wanted // REQUEST_BYTES) * REQUEST_BYTES
    if size > most or not most:
        raise ConfigError(
            f"{folder}: {size_text(free)} are free, and two files of {size_text(size or REQUEST_BYTES)} must leave "
            "half of that to others: make room, or measure with a smaller size"
        )
    return size


def measure_disk(
    folder: Path, num_bytes: int, *, config: Config, rounds: int, progress: Callable[[int, int], object]
) -> DiskSpeed:
    """Measures the file system of a folder. The files have no names, so nothing stays, however the process ends.

    Args:
        folder: The folder.
        num_bytes: Bytes of a file; a multiple of 8 MiB.
        config: ``io_threads`` is the number of requests in progress; ``journal_hosts`` says whether the host is named.
        rounds: How often each is measured.
        progress: Function that is called with the bytes done and those to do.

    Raises:
        StorageError: The file system refused.
    """
    at, done, total = time.time(), 0, 4 * num_bytes * rounds

    def tell(of_request: int) -> None:
        nonlocal done
        done += of_request
        progress(done, total)

    seconds: dict[str, list[float]] = {"write": [], "read": [], "both": [], "sync": []}
    with storage_errors("bench", folder):
        direct_io = has_direct_io(folder)
        disks = Disk(config.io_threads, progress=tell), Disk(config.io_threads, progress=tell)  # each has own buffers
        for _ in range(rounds):
            _one_round(folder, num_bytes, disks, direct_io, seconds)
    of = {name: statistics.median(all_s) for name, all_s in seconds.items()}
    return DiskSpeed(
        at=at,
        host=socket.gethostname() if config.journal_hosts else "host 0",
        write_gb_per_s=num_bytes / of["write"] / 1e9,
        read_gb_per_s=num_bytes / of["read"] / 1e9,
        both_gb_per_s=2 * num_bytes / of["both"] / 1e9,
        fsync_s=of["sync"],
        num_bytes=num_bytes,
        direct_io=direct_io,
        num_threads=config.io_threads,
        rounds=rounds,
    )


def save_disk_speed(speed: DiskSpeed, folder: Path) -> Path:
    """Writes ``.bcp/disk.json`` of a run folder, or of a step, in place of an older one. Returns its path.

    Raises:
        StorageError: The file system refused.
    """
    made = made_folder(folder / FOLDER)
    with replacing(made, DISK, f".{DISK}.tmp") as file:
        file.write(json.dumps(speed.to_dict(), allow_nan=False, indent=1).encode() + b"\n")
    return folder / FOLDER / DISK


def _one_round(
    folder: Path, num_bytes: int, disks: tuple[Disk, Disk], direct_io: bool, seconds: dict[str, list[float]]
) -> None:
    writer, reader = disks

    def read(fd: int) -> None:
        if not direct_io:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # or the read would be of memory
        reader.read_from(fd, num_bytes)

    with nameless_file(folder) as first, nameless_file(folder) as second, nameless_file(folder) as small:
        seconds["write"].append(_timed(lambda: writer.write_to(first, num_bytes, direct_io=direct_io)))
        seconds["read"].append(_timed(lambda: read(first)))
        both = (lambda: writer.write_to(second, num_bytes, direct_io=direct_io)), (lambda: read(first))
        seconds["both"].append(_timed(lambda: _at_once(both, disks)))
        seconds["sync"] += [_timed(lambda: writer.write_block(small)) for _ in range(_SYNCS)]


def _at_once(calls: tuple[Callable[[], None], ...], disks: tuple[Disk, ...]) -> None:
    with ThreadPoolExecutor(len(calls)) as pool:
        try:
            for future in [pool.submit(call) for call in calls]:
                future.result()
        except BaseException:
            for disk in disks:  # the end of the pool waits for its threads
                disk.stop()
            raise


def _timed(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin
