# SPDX-License-Identifier: Apache-2.0
"""How long `bcp steps` takes over a run of 100 checkpoints of 20,000 tensors.

Each figure is of a whole process, with the start of Python: its wall time, and its CPU time, which other processes
hardly change. `--other PYTHON` runs the `bcp` of another environment in turns, to compare two builds.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from bytecheckpoint import save_state_dict


def fill(run: Path, num_checkpoints: int, num_tensors: int) -> None:
    """Writes a run whose checkpoints differ in their number alone."""
    first = run / "step-1"
    save_state_dict(first, {f"layers.{i}.weight": torch.zeros(4) for i in range(num_tensors)}, no_dist=True)
    for number in range(2, num_checkpoints + 1):
        shutil.copytree(first, run / f"step-{number}")


def time_steps(python: str, run: Path) -> tuple[float, float]:
    """Returns the seconds of wall time and of CPU time that one `bcp steps` takes."""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    listed = subprocess.run([python, "-m", "bytecheckpoint", "steps", run], capture_output=True, text=True)
    seconds, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    if listed.returncode != 0 or "complete" not in listed.stdout:
        raise SystemExit(f"{python}: bcp steps {run}: {listed.stdout}{listed.stderr}")
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoints", type=int, default=100, help="(default 100)")
    parser.add_argument("--tensors", type=int, default=20_000, help="of each checkpoint (default 20,000)")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each `bcp`; the least counts (default 5)")
    parser.add_argument("--dir", type=Path, help="where the run is written (default: where temporary files are)")
    parser.add_argument("--other", metavar="PYTHON", help="the Python of another environment, to run in turns")
    args = parser.parse_args()
    os.environ.pop("PYTHONPATH", None)
    pythons = [sys.executable, *([args.other] if args.other else [])]
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        run = Path(folder)
        fill(run, args.checkpoints, args.tensors)
        times: dict[str, list[tuple[float, float]]] = {python: [] for python in pythons}
        for _ in range(args.rounds):
            for python in pythons:
                times[python].append(time_steps(python, run))
    least = {python: tuple(map(min, zip(*of_one, strict=True))) for python, of_one in times.items()}
    print(f"bcp steps of {args.checkpoints} checkpoints of {args.tensors:,} tensors:")
    for python, (wall, cpu) in least.items():
        print(f"  {python}: {wall:.2f} s, {cpu:.2f} s of CPU time")
    if args.other:
        (wall, cpu), (other_wall, other_cpu) = least[sys.executable], least[args.other]
        print(f"  {wall / other_wall:.2f} times as long as the other, {cpu / other_cpu:.2f} times the CPU time")


if __name__ == "__main__":
    main()
