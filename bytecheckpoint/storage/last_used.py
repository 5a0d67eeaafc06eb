# SPDX-License-Identifier: Apache-2.0
"""Notes which checkpoints this process committed and loaded last, so that no retention of it removes them. No torch."""

from __future__ import annotations

import itertools
import os
from collections import OrderedDict
from collections.abc import Iterable

from bytecheckpoint.runtime.fork_locks import ForkSafeLock
from bytecheckpoint.runtime.per_process import PerProcess
from bytecheckpoint.storage.parts import PARTS
from bytecheckpoint.storage.paths import absolute, real

__all__ = ["last_used", "note_commit", "note_load"]

_MOST_NOTED = 4096


class _Uses:
    """When this process committed, and loaded, at which absolute path: numbers that ascend.

    Links are followed when somebody asks, and not before: a call that has committed must not wait for storage again.
    """

    def __init__(self) -> None:
        self.lock = ForkSafeLock()
        self.numbers = itertools.count(1)
        self.commits: OrderedDict[str, int] = OrderedDict()
        self.loads: OrderedDict[str, int] = OrderedDict()

    def note(self, uses: OrderedDict[str, int], path: str) -> None:
        with self.lock:
            uses.pop(path, None)
            uses[path] = next(self.numbers)
            if len(uses) > _MOST_NOTED:
                uses.popitem(last=False)


_uses = PerProcess(_Uses)


def note_commit(path: str | os.PathLike[str]) -> None:
    """Notes that this process has committed the checkpoint at ``path``."""
    uses = _uses.get()
    uses.note(uses.commits, absolute(path))


def note_load(path: str | os.PathLike[str]) -> None:
    """Notes that this process has loaded the checkpoint at ``path``, or a part of it."""
    uses = _uses.get()
    uses.note(uses.loads, absolute(path))


def last_used(paths: Iterable[str]) -> dict[str, str]:
    """Returns which of these step folders this process may still need, with the reason.

    They are the one that it has committed last and, if it has committed none of them since, the one that it has loaded
    last.
    """
    uses = _uses.if_made()
    if uses is None:
        return {}
    steps = {real(path): path for path in paths}
    with uses.lock:
        commits, loads = [*uses.commits.items()], [*uses.loads.items()]
    committed, commit = _last(steps, commits)
    loaded, load = _last(steps, loads)
    found = {}
    if committed is not None:
        found[committed] = "this process has committed it last"
    if loaded is not None and load > commit:
        found.setdefault(loaded, "this process has loaded it, and has committed none since")
    return found


def _last(steps: dict[str, str], uses: list[tuple[str, int]]) -> tuple[str | None, int]:
    """Returns the step folder with the last of ``uses``, which may be of a part of it, and the number of that use.

    Args:
        steps: Step folders by their real paths.
        uses: Absolute paths and numbers, in ascending order.
    """
    for path, number in reversed(uses):
        used = real(path)
        folder, _, name = used.rpartition("/")
        step = steps.get(used) or (steps.get(folder) if name in PARTS else None)
        if step is not None:
            return step, number
    return None, 0
