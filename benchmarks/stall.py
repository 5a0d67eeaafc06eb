# SPDX-License-Identifier: Apache-2.0
"""Measures what asynchronous saves cost training beside them: bytecheckpoint's and DCP's, in turn, in one process.

Each contender saves a state of host tensors four times a round, each time to a fresh path:

  alone      the main thread waits: seconds until async_save returns, until the state is staged, until it is committed
  loop       beside a thread that counts in Python and never yields: seconds until committed, how much slower it counts
  training   beside forward, backward and step of a small model on --training-threads: how many fewer steps a second
  ticks      beside a thread that sleeps 0.5 ms again and again: how late it wakes, from the call to the commit

Loop and training are compared with their own speed just before and after, from the return of async_save to the commit.
In the row "no save", half a second of nothing replaces the save, which shows what the machine itself does. A late tick
waited for the GIL or for a core. The last column subtracts the time for a core, as Linux counts it. Python threads that
both compute hand over the GIL every 5 ms, so a native call is not to blame for gaps up to 5.5 ms. The paced contender
writes at most 0.5 GB/s, and the nice ones have that niceness instead of the default. The first save of each contender
does not count, because it touches memory and starts DCP's process.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from measurement import machine, states
from measurement.beside import TICK_S, Loop, Ticker, Training
from measurement.conditions import Stopwatch, add_arguments
from measurement.states import Kind, State
from measurement.stock_dcp import stock_dcp
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import bytecheckpoint

BASELINE, OURS, NO_SAVE = "dcp-thread", "bytecheckpoint", "no save"
NO_SAVE_S = 0.5
PACED, PACE = "bytecheckpoint-paced", 500_000_000
FILES_OF_OTHERS = 1024
# Goals for our saves. The table marks a cell that misses its goal.
RETURN_S_A_GB, BESIDE_LOOP, SLOWDOWN, GAP_MS, RETURNS_FASTER = 0.05, 1.2, 0.05, 6.0, 12.0

Tree = dict[str, Any]
Begin = Callable[[Tree, Path], tuple[Any, Any]]
Figures = dict[str, dict[str, list[float]]]


# --- contenders: each starts a save, and returns the future of its staging, if it has one, and that of its commit


def _dcp(kind: AsyncCheckpointerType) -> Begin:
    def begin(tree: Tree, path: Path) -> tuple[Any, Any]:
        with stock_dcp():
            return None, dcp.async_save(tree, checkpoint_id=path, async_checkpointer_type=kind, no_dist=True)

    return begin


def _ours(kind: AsyncCheckpointerType) -> Begin:
    def begin(tree: Tree, path: Path) -> tuple[Any, Any]:
        return None, dcp.async_save(
            tree,
            storage_writer=bytecheckpoint.BcpWriter(path),
            async_checkpointer_type=kind,
            no_dist=True,
        )

    return begin


def _registered(tree: Tree, path: Path) -> tuple[Any, Any]:
    with bytecheckpoint.registered():
        return None, dcp.async_save(tree, checkpoint_id=path, no_dist=True)


def _own(config: bytecheckpoint.Config | None = None) -> Begin:
    def begin(tree: Tree, path: Path) -> tuple[Any, Any]:
        handle = bytecheckpoint.async_save_state_dict(path, tree, no_dist=True, config=config)
        return handle.staged, handle.committed

    return begin


def _no_save(_: Tree, path: Path) -> tuple[Any, Any]:
    path.mkdir()
    future: Future[Any] = Future()
    threading.Timer(NO_SAVE_S, future.set_result, [None]).start()
    return None, future


CONTENDERS: dict[str, Begin] = {
    NO_SAVE: _no_save,
    BASELINE: _dcp(AsyncCheckpointerType.THREAD),
    "dcp-process": _dcp(AsyncCheckpointerType.PROCESS),
    OURS: _ours(AsyncCheckpointerType.THREAD),
    "bytecheckpoint-registered": _registered,
    "bytecheckpoint-own": _own(),
    PACED: _own(bytecheckpoint.Config(write_bytes_per_s=PACE)),
    "bytecheckpoint-nice-0": _own(bytecheckpoint.Config(niceness=0)),
    "bytecheckpoint-nice-19": _own(bytecheckpoint.Config(niceness=19)),
    "bytecheckpoint-process": _ours(AsyncCheckpointerType.PROCESS),
}


def _ten(gigabytes: float) -> State:
    elements = int(gigabytes * 1e9) // 40
    tree = {"model": {f"layers.{i}.weight": torch.empty(elements) for i in range(10)}}
    return State(f"{elements * 40 / 1e9:.2f} GB in 10 tensors", tree)


KINDS = {"large": Kind("10 float32 tensors below one key", 1.0, _ten), "small": states.KINDS["small"]}


# --- one save and what runs beside it


class Flight:
    """A save that has started.

    Attributes:
        returned_s, staged_s, committed_s: Seconds after the call.
        at_commit: What ``look`` returned in the thread that ended the save. A waiting thread would learn of it later.
    """

    def __init__(self, begin: Begin, tree: Tree, path: Path, look: Callable[[], Any] = lambda: None) -> None:
        self._over = threading.Event()
        self._path = path
        self._look = look
        self._start = time.perf_counter()
        staged, self._future = begin(tree, path)
        self.returned_s = self.staged_s = time.perf_counter() - self._start
        if staged is not None:
            staged.add_done_callback(self._note_staged)
        self._future.add_done_callback(self._note_commit)

    def _note_staged(self, _: Future[Any]) -> None:
        self.staged_s = time.perf_counter() - self._start

    def _note_commit(self, _: Future[Any]) -> None:
        self.at_commit = self._look()
        self.committed_s = time.perf_counter() - self._start
        self._over.set()

    def is_over(self) -> bool:
        return self._over.is_set()

    def wait_for_commit(self) -> None:
        self._over.wait()

    def wait(self) -> Flight:
        """Waits, and removes the checkpoint. Raises the save's error."""
        self.wait_for_commit()
        self._future.result()
        shutil.rmtree(self._path)
        return self


class Bench:
    """The four measurements of one state. Each adds to the ``figures`` of a contender."""

    def __init__(
        self, state: State, root: Path, stopwatch: Stopwatch, window_s: float, num_training_threads: int
    ) -> None:
        self._tree = state.tree
        self._root = root
        self._stopwatch = stopwatch
        self._window_s = window_s
        self._training = Training()
        self._num_training_threads = num_training_threads
        self._num_saves = 0

    def _path(self) -> Path:
        self._num_saves += 1
        return self._root / f"checkpoint-{self._num_saves}"

    def warm_up(self, begin: Begin) -> None:
        with _stderr_of_children_dropped():
            Flight(begin, self._tree, self._path()).wait()

    def alone(self, begin: Begin) -> dict[str, list[float]]:
        with self._stopwatch.conditions():
            flight = Flight(begin, self._tree, self._path()).wait()
        return {"return_s": [flight.returned_s], "staged_s": [flight.staged_s], "committed_s": [flight.committed_s]}

    def loop(self, begin: Begin) -> dict[str, list[float]]:
        with self._stopwatch.conditions(), Loop() as loop:
            looks = [loop.look()]
            time.sleep(self._window_s)
            looks.append(loop.look())
            flight = Flight(begin, self._tree, self._path(), loop.look)
            during = [loop.look()]
            flight.wait()
            during.append(flight.at_commit)
            looks.append(loop.look())
            time.sleep(self._window_s)
            looks.append(loop.look())
        before, after = (_difference(*looks[i : i + 2]) for i in (0, 2))
        slowdown = _slowdown(_difference(*during), before, after)
        return {
            "loop_return_s": [flight.returned_s],
            "loop_committed_s": [flight.committed_s],
            "loop_slowdown": [slowdown],
        }

    def train(self, begin: Begin) -> dict[str, list[float]]:
        num_threads = torch.get_num_threads()
        torch.set_num_threads(self._num_training_threads)
        try:
            with self._stopwatch.conditions():
                self._training.rate_for(self._window_s / 4)  # warms caches and clocks
                before = self._training.rate_for(self._window_s)
                flight = Flight(begin, self._tree, self._path())
                during = self._training.rate(flight.is_over)
                flight.wait()
                after = self._training.rate_for(self._window_s)
        finally:
            torch.set_num_threads(num_threads)
        return {
            "training_committed_s": [flight.committed_s],
            "training_slowdown": [_slowdown(during, before, after)],
        }

    def tick(self, begin: Begin) -> dict[str, list[float]]:
        with self._stopwatch.conditions(), Ticker() as ticker:
            time.sleep(20 * TICK_S)
            first = len(ticker.gaps)
            flight = Flight(begin, self._tree, self._path(), lambda: len(ticker.gaps))
            flight.wait_for_commit()
            time.sleep(4 * TICK_S)  # counts also the gap that the commit may have ended
            last = flight.at_commit + 1
            flight.wait()
        gaps = ticker.gaps[first:last]
        return {
            "gap_ms": [gap * 1e3 for gap, _ in gaps],
            "gap_without_core_ms": [(gap - wait) * 1e3 for gap, wait in gaps],
        }

    def all(self, begin: Begin, figures: dict[str, list[float]]) -> None:
        for measure in (self.alone, self.loop, self.train, self.tick):
            for name, values in measure(begin).items():
                figures.setdefault(name, []).extend(values)


@contextmanager
def _stderr_of_children_dropped() -> Iterator[None]:
    """Hides the request log of DCP's process, which the first save starts. Its errors are still raised here."""
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(null)


def _difference(earlier: tuple[float, int], later: tuple[float, int]) -> tuple[int, float]:
    """Returns the count, and the seconds that it took."""
    return later[1] - earlier[1], later[0] - earlier[0]


def _slowdown(during: tuple[int, float], before: tuple[int, float], after: tuple[int, float]) -> float:
    """Returns the share of its speed that is lost, negative if it was faster."""
    usual = (before[0] + after[0]) / (before[1] + after[1])
    return 1.0 - during[0] / max(during[1], 1e-9) / usual


# --- the run and its output


def run(state: State, names: list[str], root: Path, stopwatch: Stopwatch, arguments: argparse.Namespace) -> Figures:
    console = Console(stderr=True)
    figures: Figures = {name: {} for name in names}
    stock_repetitions = arguments.stock_repetitions or arguments.repetitions
    bench = Bench(state, root, stopwatch, arguments.window_s, arguments.training_threads)
    for name in names:
        bench.warm_up(CONTENDERS[name])
    # Drawn only between the calls, as in compare.py.
    with Progress(console=console, disable=not console.is_terminal, auto_refresh=False) as progress:
        task = progress.add_task("", total=arguments.repetitions * len(names))
        for repetition in range(arguments.repetitions):
            taking_part = [name for name in names if repetition < stock_repetitions or not name.startswith("dcp")]
            for name in random.Random(repetition).sample(taking_part, len(taking_part)):
                progress.update(task, description=f"round {repetition + 1}: {name}", refresh=True)
                bench.all(CONTENDERS[name], figures[name])
                progress.advance(task)
    return figures


def share_tensors(state: State) -> str:
    """Chooses how DCP's process gets tensors: by two open files each, torch's default, or else by names."""
    enough_files = 2 * state.num_tensors + FILES_OF_OTHERS
    most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    is_enough = most_files == resource.RLIM_INFINITY or most_files >= enough_files
    strategy = "file_descriptor" if is_enough else "file_system"
    if is_enough:
        resource.setrlimit(resource.RLIMIT_NOFILE, (enough_files, most_files))
    torch.multiprocessing.set_sharing_strategy(strategy)
    return strategy


def percentile(values: list[float], share: float) -> float:
    """Returns the smallest value that ``share`` of all values do not exceed."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, max(0, -int(-share * len(ranked) // 1) - 1))]


def print_table(state: State, figures: Figures, console: Console) -> None:
    gigabytes = state.num_bytes / 1e9
    table = Table(title=f"async_save of {state.description}")
    for column in ("", "returns", "x DCP", "staged", "committed", "beside loop", "loop", "training"):
        table.add_column(column, justify="right" if column else "left")
    for column in ("gap p99.9", "largest", "less core"):
        table.add_column(column, justify="right")
    base = figures[BASELINE]["return_s"] if BASELINE in figures else None
    for name, of in figures.items():
        middle = {figure: statistics.median(values) for figure, values in of.items()}
        is_save, is_ours = name != NO_SAVE, name.startswith(OURS)

        def cell(text: str, is_met: bool = True, is_shown: bool = is_save, is_ours: bool = is_ours) -> str:
            return (text + (" !" if is_ours and not is_met else "")) if is_shown else ""

        faster = None if base is None else statistics.median(base) / max(middle["return_s"], 1e-9)
        wants_faster = faster is not None and state.num_tensors >= 20_000
        beside = middle["loop_committed_s"] / middle["committed_s"]
        gap, gap_less_core = (percentile(of[kind], 0.999) for kind in ("gap_ms", "gap_without_core_ms"))
        table.add_row(
            name,
            cell(f"{middle['return_s']:.3f} s", middle["return_s"] <= RETURN_S_A_GB * gigabytes),
            cell(
                "" if faster is None else f"{faster:.1f}",
                faster is None or not wants_faster or faster >= RETURNS_FASTER,
            ),
            cell(f"{middle['staged_s']:.3f} s"),
            cell(f"{middle['committed_s']:.3f} s"),
            cell(f"{middle['loop_committed_s']:.3f} s x{beside:.2f}", beside <= BESIDE_LOOP),
            cell(f"{middle['loop_slowdown']:.1%}", middle["loop_slowdown"] <= SLOWDOWN, True),
            cell(f"{middle['training_slowdown']:.1%}", middle["training_slowdown"] <= SLOWDOWN, True),
            cell(f"{gap:.2f} ms", gap <= GAP_MS, True),
            cell(f"{max(of['gap_ms']):.1f} ms", True, True),
            cell(f"{gap_less_core:.2f} ms", True, True),
            style="bold" if name == OURS else "",
        )
    console.print(table)


def parse_arguments() -> tuple[argparse.Namespace, argparse.ArgumentParser]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = "; ".join(f"{name}: {kind.meaning} ({kind.gigabytes:.2g} GB)" for name, kind in KINDS.items())
    parser.add_argument("kind", nargs="*", help=f"{kinds} (default: all)")
    parser.add_argument("--gigabytes", type=float, help="size of the states, instead of the kind's own")
    parser.add_argument("--only", help=f"contenders, with commas between: {', '.join(CONTENDERS)}")
    parser.add_argument("--window-s", type=float, default=0.5, help="loop and training alone, before and after each")
    parser.add_argument("--training-threads", type=int, default=1, help="torch threads of the training (default 1)")
    parser.add_argument("--stock-repetitions", type=int, help="the same for DCP's own, which may take minutes each")
    add_arguments(parser)
    parser.set_defaults(repetitions=3)
    arguments = parser.parse_args()
    if arguments.repetitions < 1:
        parser.error("--repetitions must be at least 1")
    for option, chosen, known in (
        ("KIND", arguments.kind, KINDS),
        ("--only", arguments.only.split(",") if arguments.only else [], CONTENDERS),
    ):
        unknown = set(chosen) - known.keys()
        if unknown:
            parser.error(f"{option}: nothing is called {', '.join(sorted(unknown))}")
    return arguments, parser


def main() -> None:
    arguments, parser = parse_arguments()
    warnings.filterwarnings("ignore")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    console = Console(highlight=False, width=150)
    names = [name for name in CONTENDERS if not arguments.only or name in arguments.only.split(",")]
    facts = machine.facts(arguments.dir)
    as_typed = argparse.Namespace(**{**vars(arguments), "kind": " ".join(arguments.kind) or None})
    kept: dict[str, Any] = {"command": machine.command("stall.py", as_typed, parser), "machine": facts}
    kept |= {"versions": machine.versions(), "repetitions": arguments.repetitions, "states": {}}
    # Unwinds the stack, so that SIGTERM does not leave files behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory(dir=arguments.dir, prefix="stall-") as root:
        # DCP's process needs a group, even for one rank.
        dist.init_process_group("gloo", init_method=f"file://{Path(root).resolve()}/store", rank=0, world_size=1)
        with Stopwatch(arguments.warm_gib, arguments.idle_limit_s) as stopwatch:
            for kind in arguments.kind or KINDS:
                state = KINDS[kind].make(arguments.gigabytes or KINDS[kind].gigabytes)
                strategy = share_tensors(state)
                figures = run(state, names, Path(root), stopwatch, arguments)
                print_table(state, figures, console)
                kept["states"][kind] = {"state": state.description, "bytes": state.num_bytes, "figures": figures}
                kept["states"][kind]["sharing_strategy"] = strategy
        bytecheckpoint.shutdown()
        dist.destroy_process_group()
    console.print(
        f"medians of {arguments.repetitions}; gaps of all together; ! is beyond: return {RETURN_S_A_GB} s/GB and "
        f"{RETURNS_FASTER:.0f} x DCP (small), loop x{BESIDE_LOOP}, slowdown {SLOWDOWN:.0%}, p99.9 {GAP_MS:.0f} ms"
    )
    console.print(
        f"{machine.summary(facts)}; {stopwatch.busy_starts} of {stopwatch.num_calls} calls began on a busy machine"
    )
    if arguments.json:
        kept |= {"num_calls": stopwatch.num_calls, "busy_starts": stopwatch.busy_starts}
        arguments.json.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
