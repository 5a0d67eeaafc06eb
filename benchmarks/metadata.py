# SPDX-License-Identifier: Apache-2.0
"""Measures metadata of a save by thousands of ranks: the coordinator's work for all of them, and one loading rank.

No rank runs and no data is written. C++ code makes up plan and results. The script times the offsets of all records,
joining plan and results, making `.metadata`, and finding the chunks of one rank in that file, which is opened anew each
time and is in the page cache: of a rank that loads what it has saved, and of one of a mesh with three quarters as many
shards. "fsdp" shards every tensor over all ranks, "3d" over groups of 80. Memory is the highest resident size of this
process during a step, minus the size before the first step.

Stock DCP gets the same metadata as Python objects, for --stock-ranks ranks, and pickles them.
"""

from __future__ import annotations

import argparse
import json
import pickle
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measurement import machine
from measurement.conditions import Stopwatch, add_arguments
from rich.console import Console
from rich.table import Table

from bytecheckpoint import _testing

MIB = 1 << 20
KINDS = ("fsdp", "3d")
STEPS = {
    "lay_out": "offsets of all records",
    "assemble": "plan and results joined",
    "encode": ".metadata made",
    "find": "chunks of one rank found",
    "reshard": "the same, another mesh",
}
GOALS_S = {"lay_out": 0.3, "encode": 1.0, "find": 0.05, "reshard": 0.05}
Figures = dict[str, dict[str, list[float]]]
Boxes = list[tuple[str, list[int], list[int]]]


def _status_bytes(field: str) -> int:
    return int(Path("/proc/self/status").read_text().split(f"{field}:")[1].split()[0]) * 1024


class Meter:
    """Seconds and memory of calls, by step."""

    def __init__(self, stopwatch: Stopwatch) -> None:
        self.figures: Figures = {}
        self._stopwatch = stopwatch
        self._before = _status_bytes("VmRSS")

    def measure(self, step: str, call: Callable[[], Any]) -> Any:
        with self._stopwatch.conditions():
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM counts from here
            wall, processor = time.perf_counter(), time.process_time()
            result = call()
            seconds = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - processor}
        figures = self.figures.setdefault(step, {"wall_s": [], "cpu_s": [], "memory_bytes": []})
        for name, value in (seconds | {"memory_bytes": _status_bytes("VmHWM") - self._before}).items():
            figures[name].append(value)
        return result


def of_another_mesh(boxes: Boxes) -> Boxes:
    """Returns what a rank wants that has its shards at the same place of a mesh with fewer shards: each begins in the
    middle of a shard that was saved, is a third longer, and ends in the next one."""
    return [
        (fqn, [begin + rows // 2, *others], [rows + rows // 3, *columns])
        for fqn, (begin, *others), (rows, *columns) in boxes
    ]


def measure_round(meter: Meter, kind: str, num_ranks: int, num_chunks: int, folder: Path) -> dict[str, int]:
    """Measures one save and one rank's search. Returns the counts."""
    made = _testing.SyntheticMetadata(kind, num_ranks, num_chunks)
    boxes = made.boxes_of(num_ranks // 3)
    meter.measure("lay_out", made.lay_out)
    meter.measure("assemble", made.assemble)
    made.forget_results()
    num_bytes = meter.measure("encode", made.encode)
    path = folder / ".metadata"
    path.unlink(missing_ok=True)
    made.write_to(str(path))
    del made
    found, blocks_read, blocks = meter.measure("find", lambda: _testing.find_chunks(str(folder), boxes))
    others = of_another_mesh(boxes)
    found_of_others, *_ = meter.measure("reshard", lambda: _testing.find_chunks(str(folder), others))
    if (found, found_of_others) != (num_chunks, 2 * num_chunks):
        raise RuntimeError(f"{found} and {found_of_others} chunks found of {num_chunks} and {2 * num_chunks}")
    return {"metadata_bytes": num_bytes, "blocks_read": blocks_read, "blocks": blocks}


def measure_stock(meter: Meter, path: Path) -> int:
    """Pickles what stock DCP finds in the metadata file of the last round. Returns the number of bytes."""
    with path.open("rb") as file:
        metadata = pickle.load(file)
    num_bytes = len(meter.measure("stock", lambda: pickle.dumps(metadata)))
    return num_bytes


def print_table(figures: Figures, title: str, console: Console) -> None:
    console.print(title)
    table = Table()
    for column in ("", "wall, s", "processor, s", "goal, s", "memory, MiB"):
        table.add_column(column, justify="right" if column else "left")
    for step, values in figures.items():
        goal = f"{GOALS_S[step]:g}" if step in GOALS_S else ""
        seconds = [f"{min(values[clock]):.4f}" for clock in ("wall_s", "cpu_s")]
        table.add_row(
            STEPS.get(step, "stock: pickle.dumps"), *seconds, goal, f"{max(values['memory_bytes']) / MIB:.0f}"
        )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", nargs="?", choices=KINDS, default="fsdp", help="how tensors are sharded (default fsdp)")
    parser.add_argument("--ranks", type=int, default=10000, help="ranks that save (default 10000)")
    parser.add_argument("--chunks", type=int, default=200, help="chunks of each rank (default 200)")
    parser.add_argument("--stock-ranks", type=int, default=400, help="the same for stock DCP, 0 for none (default 400)")
    add_arguments(parser)
    arguments = parser.parse_args()
    console = Console(highlight=False, width=100)

    runs: dict[str, dict[str, Any]] = {}
    with (
        tempfile.TemporaryDirectory(dir=arguments.dir, prefix="metadata-") as folder,
        Stopwatch(arguments.warm_gib, arguments.idle_limit_s) as stopwatch,
    ):
        path = Path(folder)
        for num_ranks in (arguments.ranks, arguments.stock_ranks):
            if num_ranks == 0:
                continue
            meter = Meter(stopwatch)
            for _ in range(arguments.repetitions):
                counts = measure_round(meter, arguments.kind, num_ranks, arguments.chunks, path)
                if num_ranks == arguments.stock_ranks:
                    counts["stock_bytes"] = measure_stock(meter, path / ".metadata")
            runs[str(num_ranks)] = {"counts": counts, "figures": meter.figures}

    facts = machine.facts(arguments.dir)
    for ranks, run in runs.items():
        counts = run["counts"]
        print_table(
            run["figures"],
            f"{arguments.kind}: {ranks} ranks x {arguments.chunks} chunks, .metadata of "
            f"{counts['metadata_bytes'] / 1e6:.0f} MB, {counts['blocks_read']} of {counts['blocks']} blocks read",
            console,
        )
    console.print(f"least of {arguments.repetitions} rounds; {machine.summary(facts)}")
    if arguments.json:
        report: dict[str, Any] = {"command": machine.command("metadata.py", arguments, parser), "machine": facts}
        report |= {"versions": machine.versions(), "kind": arguments.kind, "runs": runs}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
