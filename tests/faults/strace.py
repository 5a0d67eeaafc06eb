# SPDX-License-Identifier: Apache-2.0
"""Watches the system calls of a running process, makes them fail, or kills the process at one of them."""

from __future__ import annotations

import os
import re
import select
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.fork_server import LIMIT_S

__all__ = [
    "Call",
    "calls_in",
    "injected",
    "reachable",
    "recorded",
    "strace_or_skip",
    "traced",
    "wait_until_stopped",
    "whole_lines",
    "without_ids",
]

_LINE = re.compile(r"(?:(\d+) +)?(\w+)\((.*)")
# A name in a directory that is open.
_IN_DIRECTORY = re.compile(r'\d+<([^>]*)>, "([^"/][^"]*)"')
_BEGUN = re.compile(r"(\d+) +(.*) <unfinished \.\.\.>")
_ENDED = re.compile(r"(\d+) +<\.\.\. \w+ resumed>(.*)")
_DRAWN = re.compile(r"[0-9a-f]{32}|[0-9a-f]{16}")


def without_ids(path: str) -> str:
    """Returns ``path`` with ``*`` for the ids in it, which every save draws anew."""
    return _DRAWN.sub("*", path)


@dataclass(frozen=True)
class Call:
    """A system call as strace saw it.

    Attributes:
        name: As strace takes and prints it.
        number: Counts the calls of this name in this thread from 1, whatever files they were about.
        thread: Id of the thread, 0 for the main thread.
        files: The paths below the directory of interest that the call was about, relative to it and without ids. "." is
            the directory itself. Empty if the call was about something else.
    """

    name: str
    number: int
    thread: int
    files: str

    def is_like(self, other: Call) -> bool:
        """Whether ``other`` is the same call in another run."""
        mine, theirs = ((c.name, c.number, c.thread == 0, c.files) for c in (self, other))
        return mine == theirs

    def __str__(self) -> str:
        return f"{self.name} {self.files} ({self.number})"


def strace_or_skip() -> str:
    """Returns the path of strace. If it is missing, skips the test, with the reason, or fails it in CI."""
    program = shutil.which("strace")
    if program is None:
        # CI could install it.
        give_up = pytest.fail if os.environ.get("CI") else pytest.skip
        give_up("SYSTEM CALLS NOT TESTED: strace is not installed (apt-get install strace)")
    return program


@contextmanager
def traced(pid: int, log: Path, *options: str, all_threads: bool = False) -> Iterator[None]:
    """Lets strace write the calls of a process to ``log`` while the context lasts, which begins once it is attached.

    Skips the test, with the reason, if strace may not trace, and like ``strace_or_skip``.

    Args:
        options: More options for strace.
        all_threads: True for all threads, also those that begin later; False for the main thread only.
    """
    program = strace_or_skip()
    follow = ["-f"] if all_threads else []
    # -s 0 hides the data of writes, because they may contain paths.
    command = [program, *follow, "-y", "-s", "0", "-o", str(log), *options, "-p", str(pid)]
    tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert tracer.stderr is not None
    with tracer, tracer.stderr as messages:
        try:
            readable, _, _ = select.select([messages], [], [], LIMIT_S)
            first = messages.readline() if readable else "it says nothing"
            if "attached" not in first:
                pytest.skip(f"SYSTEM CALLS NOT TESTED: {first.strip()}")
            yield
        finally:
            tracer.terminate()  # strace then detaches from the process
            tracer.wait(LIMIT_S)


@contextmanager
def injected(
    pid: int,
    log: Path,
    calls: str,
    what: str,
    when: int | str = 1,
    *,
    all_threads: bool = False,
    path: Path | None = None,
) -> Iterator[None]:
    """Does ``what`` at the ``when``-th of each of ``calls``, or from that call on ("2+"), while the context lasts.

    Skips like ``traced``.

    Args:
        calls: Names of system calls, with commas. strace counts each name separately in each thread.
        what: ``error=EIO`` returns that error without making the call; ``signal=KILL`` comes before the call is made.
        path: If set, only calls on this file count.
    """
    only = ["-P", str(path)] if path else []
    inject = ["-e", f"trace={calls}", "-e", f"inject={calls}:{what}:when={when}"]
    with traced(pid, log, *only, *inject, all_threads=all_threads):
        yield


def wait_until_stopped(log: Path) -> None:
    """Waits until strace has stopped the process. It is a child of the fork server, so only strace can tell us."""
    end = time.monotonic() + LIMIT_S
    while "stopped by SIGSTOP" not in log.read_text():
        assert time.monotonic() < end, "it does not stop"
        os.sched_yield()


def whole_lines(log: Path) -> list[str]:
    """Returns the lines of a log, one for each call.

    strace writes two lines for a call during which a call of another thread began or ended.
    """
    begun: dict[str, str] = {}
    lines = []
    for line in log.read_text().splitlines():
        if half := _BEGUN.fullmatch(line):
            begun[half[1]] = half[2]
        elif half := _ENDED.fullmatch(line):
            lines.append(f"{half[1]} {begun.pop(half[1], '')}{half[2]}")
        else:
            lines.append(line)
    return [*lines, *(f"{thread} {text}" for thread, text in begun.items())]


@contextmanager
def recorded(pid: int, log: Path) -> Iterator[None]:
    """Writes every call to ``log`` that has a file name or a descriptor as an argument. Skips like ``traced``."""
    with traced(pid, log, "-e", "trace=%file,%desc", all_threads=True):
        yield


def calls_in(log: Path, directory: Path, pid: int) -> list[Call]:
    """Returns the calls in a log of the process ``pid``, in the order in which they began."""
    below = re.compile(re.escape(str(directory)) + r'(?:/([^">]*))?(?=[">])')
    numbers: Counter[tuple[int, str]] = Counter()
    calls = []
    for line in log.read_text().splitlines():
        # Lines about signals and exits do not match, nor does the second line of a call that strace splits.
        match = _LINE.match(line)
        if match is None:
            continue
        # The last call of a killed process has no result.
        name, arguments = match[2], _IN_DIRECTORY.sub(r'"\1/\2"', match[3].rsplit(") = ", 1)[0])
        thread = int(match[1] or pid)
        thread = 0 if thread == pid else thread
        numbers[thread, name] += 1
        paths = dict.fromkeys(without_ids(path) or "." for path in below.findall(arguments))
        calls.append(Call(name, numbers[thread, name], thread, ", ".join(paths)))
    return calls


def reachable(calls: list[Call], *, several_files: bool) -> list[Call]:
    """Returns those calls of a recorded save, below the directory, at which a test can stop another save like it.

    strace counts the calls of each thread separately, and can select no thread other than the main one. So this leaves
    out a call of another thread if some thread makes the call of that name and number earlier. With ``several_files``
    several threads share the check of the files, and it is chance which thread reads what; so from there on this also
    leaves out the kinds of calls that the check makes.
    """
    seen: set[tuple[str, int]] = set()
    firsts = set()
    for call in calls:
        if (call.name, call.number) not in seen:
            firsts.add(call)
        seen.add((call.name, call.number))
    calls = [call for call in calls if call.files]
    begin = len(calls)
    shared: set[str] = set()
    if several_files:
        # Only the check opens data files with openat2: it opens the directory, then the file in it, and closes the
        # directory.
        opens = [at for at, call in enumerate(calls) if ".distcp" in call.files and call.name == "openat2"]
        begin = opens[0] - 1 if opens else len(calls)
        end = (
            next((at for at in range(opens[-1], len(calls)) if ".tmp" in calls[at].files), len(calls))
            if opens
            else begin
        )
        shared = {call.name for call in calls[begin:end]}
    return [
        call
        for at, call in enumerate(calls)
        if not (at >= begin and call.name in shared) and (not call.thread or call in firsts)
    ]
