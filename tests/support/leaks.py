# SPDX-License-Identifier: Apache-2.0
"""Finds what a test leaves behind: threads of Python and of our C++, open files, processes, temporary files."""

from __future__ import annotations

import gc
import re
import tempfile
import threading
import time
from pathlib import Path

__all__ = ["Holdings", "holdings", "leaks_since", "wait_for_watch"]

# Threads and sockets may need a moment to end.
_PATIENCE_S = 5.0
# It looks again and again whether a call still runs, and ends behind the last one. A test does not wait for that.
_WATCH = "bytecheckpoint-calls"
# These stay once they exist: the thread and the memory of background saves, and what other libraries keep.
_STAYS = re.compile(
    rf"thread '({_WATCH}|bytecheckpoint-background|tqdm_monitor|.*\(_serve\))"
    r"|/memfd:bytecheckpoint"
    r"|temporary file (pymp-|torchinductor_)"
)
# Descriptors of gloo's event loop, which torch keeps forever once there was a group, and of the thread that serves
# multiprocessing.
_OF_LOOPS = re.compile(r"descriptor \d+: (pipe|socket|anon_inode):")

# Descriptions, by a key that stays the same as long as the thing exists.
Holdings = dict[tuple[str, int, str], str]


def holdings() -> Holdings:
    """Returns what the process holds now. Memory that it shares with other processes is listed with its open files."""
    held = {("thread", thread.native_id or 0, ""): f"thread '{thread.name}'" for thread in threading.enumerate()}
    for task in Path("/proc/self/task").iterdir():
        # csrc/base/named_thread.h gives all our threads such names.
        if (name := _text(task / "comm")).startswith("bcp-"):
            held["thread", int(task.name), name] = f"thread '{name}'"
        for pid in _text(task / "children").split():
            held["process", int(pid), ""] = f"process {pid}: {_text(Path('/proc') / pid / 'comm')}"
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except OSError:
            continue  # the descriptor of the listing itself
        held["file", int(entry.name), target] = f"descriptor {entry.name}: {target}"
    for entry in Path(tempfile.gettempdir()).iterdir():
        held["temporary", 0, entry.name] = f"temporary file {entry.name}"
    return held


def leaks_since(before: Holdings) -> list[str]:
    """Returns what exists now, did not exist ``before``, and does not go away within the deadline."""
    give_up = time.monotonic() + _PATIENCE_S
    while True:
        now = holdings()
        leaks = [what for key, what in now.items() if key not in before]
        has_loop = any("[eventpoll]" in what or "(_serve)" in what for what in leaks)
        leaks = [what for what in leaks if not _STAYS.search(what) and not (has_loop and _OF_LOOPS.search(what))]
        if not leaks or time.monotonic() >= give_up:
            return leaks
        gc.collect()  # with all of torch it takes longer than most tests, so it runs only where it may help
        time.sleep(0.02)


def wait_for_watch() -> bool:
    """Waits until no call of this process is watched any more. Returns whether that came within the deadline."""
    give_up = time.monotonic() + _PATIENCE_S
    while any(thread.name == _WATCH for thread in threading.enumerate()):
        if time.monotonic() >= give_up:
            return False
        gc.collect()
        time.sleep(0.1)
    return True


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
