# SPDX-License-Identifier: Apache-2.0
"""Saves and loads under way on this machine, as their processes tell in pages of memory (csrc/io/live_page.h).

A page belongs to another process, which may end at any moment, be of another version, or of a user who means harm. So
nothing in it is trusted: what does not fit is left out, and text is as its owner wrote it.
"""

from __future__ import annotations

import json
import os
import stat
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bytecheckpoint.native import _core

__all__ = ["LiveCall", "Pages", "ranks_here", "read_live_pages"]

_PROC = Path("/proc")
_LINK = "/memfd:bytecheckpoint-call"
_PAGE_BYTES = 4096
_HEAD = struct.Struct("<8sqqqqI")  # magic, phase, since_ns, bytes_done, bytes_expected, length of the header
_MAGIC = b"BCPLIVE1"
_MOST_RANKS = 1 << 31
_MOST_SECONDS = 1 << 40


@dataclass(frozen=True, kw_only=True)
class LiveCall:
    """A save or a load under way in one process.

    Attributes:
        pid: Process, as this process sees it.
        kind: ``save`` or ``load``.
        path: Path of the checkpoint.
        rank: Number of the rank in the call.
        world_size: Number of ranks; 0 if it is not known.
        began_at: Unix time at which the call began.
        phase: Phase in which it is.
        phase_s: Seconds since that phase began.
        bytes_done: Bytes written, or read.
        bytes_expected: Bytes that the rank is going to write or wants to read; 0 if they are not known yet.
        state: State of the process, as ``ps`` shows it: ``T`` is stopped by a signal, ``D`` waits for a device.
    """

    pid: int
    kind: str
    path: str
    rank: int
    world_size: int
    began_at: float
    phase: str
    phase_s: float
    bytes_done: int
    bytes_expected: int
    state: str

    @property
    def state_text(self) -> str:
        """The state of the process in words; "" if it is none that keeps the call from going on."""
        words = {"T": "stopped by a signal", "t": "stopped by a debugger", "D": "waits for a device"}
        return words.get(self.state, "")

    @property
    def is_stopped(self) -> bool:
        """Whether a signal or a debugger has stopped the process."""
        return self.state in ("T", "t")


@dataclass(frozen=True)
class Pages:
    """What was found on this machine.

    Attributes:
        calls: Calls under way, sorted by kind, path and rank.
        num_closed: Number of processes of other users, which this user may not look into.
        num_unknown: Number of pages that are not of this version.
    """

    calls: tuple[LiveCall, ...]
    num_closed: int
    num_unknown: int


def read_live_pages() -> Pages:
    """Returns the saves and loads under way in all processes that this user may look into."""
    calls: dict[tuple[int, int], LiveCall] = {}
    num_closed, unknown = 0, set()
    for pid in _pids():
        try:
            pages = list(_pages_of(pid))
        except PermissionError:
            num_closed += 1
            continue
        for place, page in pages:
            try:
                call = _call_of(pid, page)
            except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
                unknown.add(place)
                continue
            if call is not None:
                calls[place] = call
    ordered = sorted(calls.values(), key=lambda call: (call.kind, call.path, call.began_at, call.rank, call.pid))
    return Pages(tuple(ordered), num_closed, len(unknown))


def ranks_here(kind: str, path: str) -> list[LiveCall]:
    """Returns what the ranks of one call that run on this machine are doing, this process included."""
    return [call for call in read_live_pages().calls if (call.kind, call.path) == (kind, path)]


def _pids() -> list[int]:
    try:
        return [int(entry.name) for entry in _PROC.iterdir() if entry.name.isdecimal()]
    except OSError:
        return []


def _pages_of(pid: int) -> Iterator[tuple[tuple[int, int], bytes]]:
    """Returns the pages that a process holds, each with its device and inode.

    Raises:
        PermissionError: It is a process of another user.
    """
    try:
        entries = list((_PROC / str(pid) / "fd").iterdir())
    except PermissionError:
        raise
    except OSError:  # it has ended
        return
    for entry in entries:
        try:
            if not str(entry.readlink()).startswith(_LINK):
                continue
            # The descriptor may be another one by now: nothing is opened that waits for somebody.
            page = os.open(entry, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            found = os.fstat(page)
            if stat.S_ISREG(found.st_mode) and str(Path(f"/proc/self/fd/{page}").readlink()).startswith(_LINK):
                yield (found.st_dev, found.st_ino), os.pread(page, _PAGE_BYTES, 0)
        except OSError:
            continue
        finally:
            os.close(page)


def _call_of(pid: int, page: bytes) -> LiveCall | None:
    """Returns the call of a page; None if it has ended, or belongs to another process from which this one was forked.

    Raises:
        ValueError: It is not a page of this version.
    """
    if len(page) < _HEAD.size:
        raise ValueError("too short")
    magic, phase, since_ns, done, expected, length = _HEAD.unpack_from(page)
    if magic != _MAGIC:
        raise ValueError("another version")
    if not 0 <= phase < len(_core.PHASES):
        return None
    header: dict[str, Any] = json.loads(page[_HEAD.size : _HEAD.size + length])
    if int(header["pid"]) not in _own_pids(pid):
        return None
    numbers = [int(header["rank"]), int(header["world_size"])]
    began_at = float(header["at"])
    if not (all(0 <= number < _MOST_RANKS for number in numbers) and 0 <= began_at < _MOST_SECONDS):
        raise ValueError("no such ranks, or no such time")
    return LiveCall(
        pid=pid,
        kind=str(header["kind"]),
        path=str(header["path"]),
        rank=numbers[0],
        world_size=numbers[1],
        began_at=began_at,
        phase=_core.PHASES[phase],
        phase_s=max((time.monotonic_ns() - since_ns) / 1e9, 0.0),
        bytes_done=max(done, 0),
        bytes_expected=max(expected, 0),
        state=_state_of(pid),
    )


def _own_pids(pid: int) -> set[int]:
    """Returns the numbers of a process: in a container it has another one than outside."""
    numbers = {pid}
    with suppress(OSError):  # it has ended
        for line in (_PROC / str(pid) / "status").read_text().splitlines():
            if line.startswith("NSpid:"):
                numbers |= {int(word) for word in line.split()[1:]}
    return numbers


def _state_of(pid: int) -> str:
    try:
        # The name of the program is in parentheses, and may contain anything.
        return (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError, ValueError):
        return "?"
