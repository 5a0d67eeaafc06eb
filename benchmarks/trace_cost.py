# SPDX-License-Identifier: Apache-2.0
"""What recording costs: saves, loads and stalls with and without spans, and the journal's part after a call.

Each figure is a ratio: in one round, the same call runs with `Config(trace="off")`, "summary" and "full", in an order
that changes from round to round, and each is divided by the one that records nothing. The median of all rounds, and the
middle half of them, are printed. `large` is one state of 1 GB in 64 tensors, `small` is 20,000 tensors of 16 KiB. The
files are on a file system in memory (--dir), where nothing hides the cost; give a folder on a disk for the whole call.

`journal` is what a save does for its record: it makes it of the reports of all ranks, and appends it.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from measurement import machine
from measurement.conditions import wait_until_idle
from rich.console import Console
from rich.table import Table

from bytecheckpoint import BcpLoadPlanner, BcpReader, BcpSavePlanner, BcpStager, BcpWriter, Config
from bytecheckpoint.calls.trace import CallTrace
from bytecheckpoint.journal.lines import append
from bytecheckpoint.journal.records import record_of
from bytecheckpoint.observability import flush
from bytecheckpoint.report import RankSaveReport, SaveReport

MODES = ("off", "summary", "full")
STATES = {"large": (64, 1 << 22), "small": (20_000, 1 << 12)}


def state_of(name: str) -> dict[str, Any]:
    num_tensors, elements = STATES[name]
    memory = torch.rand(num_tensors, elements)
    return {f"t{number}": memory[number] for number in range(num_tensors)}


def calls(state: dict[str, Any], folder: Path, mode: str) -> dict[str, Callable[[], None]]:
    """Returns what is timed, by name. The planner keeps its plan, as in training."""
    config = Config(trace=mode, journal="off", slow_factor=0.0)
    planner, path = BcpSavePlanner(), folder / mode

    def save() -> None:
        dcp.save(state, storage_writer=BcpWriter(path, config=config), planner=planner, no_dist=True)

    def load() -> None:
        dcp.load(state, storage_reader=BcpReader(path, config=config), planner=BcpLoadPlanner(), no_dist=True)

    def stall() -> None:
        BcpStager(config=config).stage(state)

    return {"save": save, "load": load, "stall": stall}


def measure(name: str, folder: Path, rounds: int, idle_limit_s: float) -> dict[str, dict[str, list[float]]]:
    """Returns, for each call, the ratios of each mode to the one that records nothing."""
    state = state_of(name)
    by_mode = {mode: calls(state, folder, mode) for mode in MODES}
    ratios: dict[str, dict[str, list[float]]] = {call: {mode: [] for mode in MODES[1:]} for call in by_mode["off"]}
    draw = random.Random(1)
    for call in ratios:
        for of_mode in by_mode.values():
            of_mode[call]()  # files exist, plans are kept
        wait_until_idle(idle_limit_s)
        for _ in range(rounds):
            seconds = {}
            for mode in draw.sample(MODES, len(MODES)):
                begin = time.perf_counter()
                by_mode[mode][call]()
                seconds[mode] = time.perf_counter() - begin
            for mode in MODES[1:]:
                ratios[call][mode].append(seconds[mode] / seconds["off"])
    return ratios


def report_of(num_ranks: int) -> SaveReport:
    """Returns a report as a coordinator has it, with the trace of a real save for each rank."""
    with tempfile.TemporaryDirectory() as folder:
        writer = BcpWriter(Path(folder) / "step_1", config=Config(journal="off"))
        dcp.save(state_of("large"), storage_writer=writer, planner=BcpSavePlanner(), no_dist=True)
        own = writer.last_report
    assert own is not None
    of_ranks = [
        RankSaveReport(rank=rank, num_records=64, bytes_written=1 << 30, write_s=1.0, trace=own.trace)
        for rank in range(num_ranks)
    ]
    return SaveReport(path="/run/step_1", save_id="0" * 32, trace=own.trace, ranks=tuple(of_ranks))


def measure_journal(num_ranks: int, rounds: int) -> dict[str, float]:
    report = report_of(num_ranks)
    made, appended, size = [], [], 0
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            begin = time.perf_counter()
            record = record_of(report, Config(), "step_1", 1)
            middle = time.perf_counter()
            append(Path(folder) / ".bcp", record)
            made.append(middle - begin)
            appended.append(time.perf_counter() - middle)
        size = (Path(folder) / ".bcp" / "journal.jsonl").stat().st_size // rounds
    trace = report.trace
    assert trace is not None
    return {"record_s": min(made), "append_s": min(appended), "record_bytes": size, "trace_bytes": len(trace.spans)}


def begin_s(rounds: int) -> float:
    """Returns the least seconds that it takes to begin a trace and to encode it, which every call does."""
    found = []
    for _ in range(rounds):
        begin = time.perf_counter()
        CallTrace(Config(), "save", "/run/step_1").of_rank()
        found.append(time.perf_counter() - begin)
    return min(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="default 15")
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm"), help="where checkpoints go (default /dev/shm)")
    parser.add_argument("--states", choices=STATES, nargs="+", default=[*STATES], help="default both")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 1024, 10_000], help="of the journal's records")
    parser.add_argument("--idle-limit-s", type=float, default=20.0, help="longest wait for idleness (default 20)")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    arguments = parser.parse_args()
    console = Console(highlight=False, width=100)
    all_ratios, of_journal = {}, {}
    for name in arguments.states:
        folder = Path(tempfile.mkdtemp(prefix="trace-cost-", dir=arguments.dir))
        try:
            all_ratios[name] = measure(name, folder, arguments.rounds, arguments.idle_limit_s)
        finally:
            shutil.rmtree(folder)
    for num_ranks in arguments.ranks:
        of_journal[num_ranks] = measure_journal(num_ranks, 3)
    assert flush()

    facts = machine.facts(arguments.dir)
    console.print(machine.summary(facts))
    table = Table("state", "call", "trace", "median of off", "middle half")
    for name, ratios in all_ratios.items():
        for call, by_mode in ratios.items():
            for mode, values in by_mode.items():
                low, middle, high = statistics.quantiles(values, n=4)
                table.add_row(name, call, mode, f"{middle:.4f}", f"{low:.3f} to {high:.3f}")
    console.print(table)
    console.print(f"to begin a trace and to encode it: {begin_s(100) * 1e6:.0f} us")
    table = Table("ranks", "make the record", "append it", "line", "sent by a rank")
    for num_ranks, figures in of_journal.items():
        seconds = [f"{figures[field] * 1e3:.1f} ms" for field in ("record_s", "append_s")]
        sizes = [f"{figures[field] / 1e3:.1f} kB" for field in ("record_bytes", "trace_bytes")]
        table.add_row(f"{num_ranks:,}", *seconds, *sizes)
    console.print(table)
    if arguments.json:
        report = {"command": machine.command("trace_cost.py", arguments, parser), "machine": facts}
        report |= {"versions": machine.versions(), "ratios": all_ratios, "journal": of_journal}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
