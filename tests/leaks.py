# SPDX-License-Identifier: Apache-2.0
"""What a test leaves behind in its process: threads, open files, processes."""

from __future__ import annotations

import gc
import re
import threading
import time
from pathlib import Path

import torch.distributed as dist

__all__ = ["Holdings", "holdings", "leaks_since"]

# Threads and sockets may take a moment to go.
_PATIENCE_S = 5.0
# Our C++ threads, as the kernel knows them. The pools of others stay for good once they are there.
_OURS = "bcp-"

# What stays once it is there: the thread and the memory of background saves, and what is others' own.
_STAYS = re.compile(r"thread '(bytecheckpoint-background|tqdm_monitor|.*\(_serve\))|/memfd:bytecheckpoint")
# Of the process group that a fixture keeps, some of which begin late; and of the thread that serves multiprocessing.
_OF_GROUPS = re.compile(r"descriptor \d+: (pipe|socket):|\[event(poll|fd)\]")

# In words, by a key that stays the same as long as it is there.
Holdings = dict[tuple[str, int, str], str]


def holdings() -> Holdings:
    """What the process has now. Memory for other processes is among its files: it has no names."""
    held = {("thread", thread.native_id or 0, ""): f"thread '{thread.name}'" for thread in threading.enumerate()}
    for task in Path("/proc/self/task").iterdir():
        name = _text(task / "comm")
        if name.startswith(_OURS):
            held["thread", int(task.name), ""] = f"thread '{name}'"
        for pid in _text(task / "children").split():
            held["process", int(pid), ""] = f"process {pid}: {_text(Path('/proc') / pid / 'comm')}"
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except OSError:
            continue  # the listing's own
        held["file", int(entry.name), target] = f"descriptor {entry.name}: {target}"
    return held


def leaks_since(before: Holdings) -> list[str]:
    """What is there that was not there ``before``, and does not go away."""
    give_up = time.monotonic() + _PATIENCE_S
    while True:
        gc.collect()
        now = holdings()
        stays = _OF_GROUPS if dist.is_initialized() or any("(_serve)" in what for what in now.values()) else _STAYS
        leaks = [what for key, what in now.items() if key not in before]
        leaks = [what for what in leaks if not _STAYS.search(what) and not stays.search(what)]
        if not leaks or time.monotonic() >= give_up:
            return leaks
        time.sleep(0.02)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
