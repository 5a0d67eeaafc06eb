# SPDX-License-Identifier: Apache-2.0
"""Runs the benchmarks whose figures we hold, one after another, and keeps all of their figures in one file.

Nothing else should run meanwhile. It takes just under 20 minutes on two cores. `compare_runs.py OLD NEW` says what got
worse between two of its files. Benchmarks that need packages or a server beside `make .venv/.bench` are not in it.

    python benchmarks/bench_all.py --output build/bench/all.json --only large small
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measurement import machine
from rich.console import Console

SCRIPTS = Path(__file__).resolve().parent
# What each command measures, by name. All contenders of a command take turns, so ratios between them hold.
COMMANDS: dict[str, tuple[str, ...]] = {
    "large": ("compare.py", "large", "--only", "dcp-2,bytecheckpoint,disk", "--repetitions", "4"),
    "small": ("compare.py", "small", "--only", "dcp-2,bytecheckpoint,disk", "--repetitions", "2"),
    "flat": ("compare.py", "flat", "--only", "bytecheckpoint,bytecheckpoint-registered", "--repetitions", "4"),
    "stall": ("stall.py", "large", "--only", "no save,bytecheckpoint", "--repetitions", "3"),
    "stall of small": ("stall.py", "small", "--only", "no save,bytecheckpoint", "--repetitions", "3"),
    "ranks": ("ranks.py", "--repetitions", "1"),
    "sharing": ("sharing.py", "--modes", "default", "disk", "--repetitions", "3"),
    "planning": ("planning.py", "--ranks", "10000", "--stock-ranks", "100", "--repetitions", "3"),
    "plan tree": (
        "plan_tree.py",
        "3-d",
        "--ranks",
        "10000",
        "--fan-out",
        "16",
        "--latency-us",
        "250",
        "--gb-per-s",
        "1",
        "--repetitions",
        "3",
    ),
    "metadata": ("metadata.py", "--repetitions", "3"),
    "memory": ("memory.py", "--only", "bytecheckpoint"),
    "convert": ("convert.py", "--only", "ours to safetensors;safetensors to ours"),
    "verify": ("verify.py", "--repetitions", "3"),
    "spans": ("trace_cost.py", "--states", "small", "--ranks", "1024"),
    "observability": ("observability.py", "--ranks", "1024", "--saves", "100"),
}


def run(name: str, folder: Path) -> dict[str, Any]:
    """Runs one command. Returns its figures, how long it took, and what it said if it failed."""
    script, *arguments = COMMANDS[name]
    file = folder / "figures.json"
    file.unlink(missing_ok=True)
    begin = time.perf_counter()
    command = [sys.executable, str(SCRIPTS / script), *arguments, "--json", str(file)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    kept: dict[str, Any] = {"took_s": time.perf_counter() - begin, "figures": None, "said": None}
    if done.returncode == 0 and file.exists():
        kept["figures"] = json.loads(file.read_text())
    else:
        kept["said"] = done.stdout[-2000:]
    return kept


def main() -> int:
    """Returns 1 if a command failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("build/bench/all.json"), help="default: %(default)s")
    parser.add_argument("--only", nargs="+", choices=COMMANDS, metavar="NAME", help=f"of {', '.join(COMMANDS)}")
    arguments = parser.parse_args()
    console = Console(highlight=False, width=120)
    report: dict[str, Any] = {"machine": machine.facts(Path.cwd()), "versions": machine.versions(), "runs": {}}
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.only or COMMANDS:
            console.print(f"{name}: {' '.join(COMMANDS[name])}", end=" ... ")
            kept = run(name, Path(folder))
            report["runs"][name] = kept
            arguments.output.write_text(json.dumps(report, indent=1) + "\n")  # what there is, if this is interrupted
            console.print(f"{kept['took_s']:.0f} s" + ("" if kept["said"] is None else ", failed"))
            if kept["said"] is not None:
                failed.append(name)
                console.print(kept["said"], markup=False)
    seconds = sum(kept["took_s"] for kept in report["runs"].values())
    console.print(f"{machine.summary(report['machine'])}; {seconds / 60:.1f} minutes; all figures: {arguments.output}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
