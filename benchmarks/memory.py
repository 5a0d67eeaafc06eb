# SPDX-License-Identifier: Apache-2.0
"""Measures the memory that a save and a load add to a process, besides the state.

Each call runs in a separate process, after a save and a load of a small state, so imports do not count. The result is
the highest resident size during the call minus the size before it: VmHWM, reset through /proc/self/clear_refs. The page
cache does not count, but pages of a mapped file do, as in torch.load(mmap=True).
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

from measurement import machine
from measurement.contenders import NAMES, OURS, make_contenders, reason_to_leave_out
from measurement.results import ACTIONS
from measurement.states import KINDS, make_state
from rich.console import Console
from rich.table import Table

MIB = 1 << 20
WARM_UP_GIGABYTES = 0.001
GOAL_MIB = 256


def _status_bytes(field: str) -> int:
    return int(Path("/proc/self/status").read_text().split(f"{field}:")[1].split()[0]) * 1024


def measure_here(name: str, action: str, kind: str, gigabytes: float | None, path: Path) -> dict[str, int]:
    """Returns resident bytes around one save to ``path``, or one load from it, in this process."""
    contender = make_contenders([name])[name]
    warm_up = make_state(kind, WARM_UP_GIGABYTES)
    contender.save(warm_up, path.with_name("warm-up"))
    contender.load(warm_up, path.with_name("warm-up"))
    shutil.rmtree(path.with_name("warm-up"))
    del warm_up

    state = make_state(kind, gigabytes)
    if action == "load":
        state.blank()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM counts from here
    before = _status_bytes("VmRSS")
    getattr(contender, action)(state, path)
    peak = _status_bytes("VmHWM")
    state.check()
    return {"state_bytes": state.num_bytes, "before_bytes": before, "peak_bytes": peak, "added_bytes": peak - before}


def measure_in_child(name: str, action: str, arguments: argparse.Namespace, path: Path) -> dict[str, int]:
    command = [sys.executable, __file__, arguments.kind, "--child", name, action, str(path)]
    if arguments.gigabytes is not None:
        command += ["--gigabytes", str(arguments.gigabytes)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    figures: dict[str, int] = json.loads(done.stdout)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", nargs="?", choices=KINDS, default="large", help="kind of state; see compare.py --help")
    parser.add_argument("--gigabytes", type=float, help="size of the state, instead of the kind's own")
    parser.add_argument("--only", help=f"contenders, with commas between: {', '.join(NAMES)}")
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="where to write (default: here)")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    if arguments.child:
        name, action, path = arguments.child
        print(json.dumps(measure_here(name, action, arguments.kind, arguments.gigabytes, Path(path))))
        return

    console = Console(highlight=False, width=100)
    example = make_state(arguments.kind, WARM_UP_GIGABYTES)
    added: dict[str, dict[str, dict[str, int]]] = {}
    for name in arguments.only.split(",") if arguments.only else NAMES:
        reason = reason_to_leave_out(name, example, arguments.dir)
        if reason:
            console.print(f"{name} is left out: {reason}")
            continue
        with tempfile.TemporaryDirectory(dir=arguments.dir, prefix="memory-") as root:
            path = Path(root) / "checkpoint"
            added[name] = {action: measure_in_child(name, action, arguments, path) for action in ACTIONS}

    facts = machine.facts(arguments.dir)
    num_bytes = next(iter(added.values()))["save"]["state_bytes"]
    console.print(f"MiB added to a process that holds {num_bytes / 1e9:.2f} GB ({arguments.kind})")
    table = Table()
    for column in ("", "save", "load"):
        table.add_column(column, justify="right" if column else "left")
    for name, figures in added.items():
        cells = [f"{figures[action]['added_bytes'] / MIB:.0f}" for action in ACTIONS]
        table.add_row(name, *cells, style="bold" if name == OURS else "")
    console.print(table)
    console.print(f"the goal of {OURS} is {GOAL_MIB} MiB, whatever the size; {machine.summary(facts)}")
    if arguments.json:
        report: dict[str, Any] = {"command": machine.command("memory.py", arguments, parser), "machine": facts}
        report |= {"versions": machine.versions(), "kind": arguments.kind, "bytes": added}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
