# SPDX-License-Identifier: Apache-2.0
"""Splits the time of one ``dcp.save`` or ``dcp.load`` into planner, storage plug-in, and DCP itself."""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp

import bytecheckpoint
from measurement.conditions import Stopwatch, drop_page_cache
from measurement.states import State

_SAVE_PLANNER = ("set_up_planner", "create_local_plan", "create_global_plan", "finish_plan", "resolve_data")
_LOAD_PLANNER = (
    "set_up_planner",
    "create_local_plan",
    "create_global_plan",
    "finish_plan",
    "load_bytes",
    "resolve_tensor",
    "commit_tensor",
)
_WRITER = (
    "storage_meta",
    "set_up_storage_writer",
    "prepare_local_plan",
    "prepare_global_plan",
    "write_data",
    "finish",
)
_READER = ("read_metadata", "set_up_storage_reader", "prepare_local_plan", "prepare_global_plan", "read_data")


class CallClock:
    """Sums up the time spent in methods of the objects it watches.

    A watched method that calls another watched method is charged only for its own time, so the sums of all labels add
    up to the time since the clock was started. For one thread.
    """

    def __init__(self, rest: str) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._charged = rest
        self._since = time.perf_counter()

    def watch(self, watched: Any, label: str, methods: tuple[str, ...]) -> None:
        """Puts a timing wrapper around each of ``methods``. ``{}`` in the label stands for the method's name."""
        for name in methods:
            setattr(watched, name, self._timing(getattr(watched, name), label.format(name)))

    def charge(self, label: str) -> str:
        """Charges the time from now on to ``label``. Returns the label charged until now."""
        now = time.perf_counter()
        before, self._charged = self._charged, label
        self.seconds[before] += now - self._since
        self._since = now
        return before

    def _timing(self, method: Callable[..., Any], label: str) -> Callable[..., Any]:
        @functools.wraps(method)  # DCP inspects the signatures of hooks
        def timed(*args: Any, **kwargs: Any) -> Any:
            before = self.charge(label)
            try:
                return method(*args, **kwargs)
            finally:
                self.charge(before)

        return timed


def split_of_save(state: State, path: Path) -> dict[str, float]:
    """Returns the seconds of one save by our writer and the stock planner, split by component."""
    writer, planner = bytecheckpoint.BcpWriter(path), dcp.DefaultSavePlanner()
    clock = CallClock("dcp")
    clock.watch(planner, "planner: {}", _SAVE_PLANNER)
    clock.watch(writer, "writer", _WRITER)
    dcp.save(state.tree, storage_writer=writer, planner=planner, no_dist=True)
    clock.charge("")
    return dict(clock.seconds)


def split_of_load(state: State, path: Path) -> dict[str, float]:
    """Returns the seconds of one load by our reader and the stock planner, split by component."""
    reader, planner = bytecheckpoint.BcpReader(path), dcp.DefaultLoadPlanner()
    clock = CallClock("dcp")
    clock.watch(planner, "planner: {}", _LOAD_PLANNER)
    clock.watch(reader, "reader", _READER)
    dcp.load(state.tree, storage_reader=reader, planner=planner, no_dist=True)
    clock.charge("")
    return dict(clock.seconds)


def measure_split(state: State, path: Path, stopwatch: Stopwatch) -> dict[str, dict[str, float]]:
    """Splits a separate save and load, because watching costs a microsecond a call.

    Leaves the checkpoint at ``path``.
    """
    with stopwatch.conditions():
        save = split_of_save(state, path)
    drop_page_cache(path)
    state.blank()
    with stopwatch.conditions():
        load = split_of_load(state, path)
    state.check()
    return {"save": save, "load": load}
