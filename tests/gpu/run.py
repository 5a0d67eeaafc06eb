#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Does on a machine with a GPU, in one command and within minutes, all that can be done only there.

    python3 tests/gpu/run.py --prepare              # here: what must travel, into build/gpu/wheels
    python3 tests/gpu/run.py --output DIR           # there: build, tests/gpu with the newest first, benchmarks
    python3 tests/gpu/run.py --rehearse             # without a GPU: the same steps, as far as they go
    python3 tests/gpu/run.py --table DIR/report.json

DIR/report.json has each step's command, exit status, seconds, end of output and figures; it is written before and after
each step, so that a run that is cut off leaves what was done. DIR/output.log has all output. The exit status is 1 if a
test failed, or if a step that was not left out for a reason has no result. tests/gpu/README.md says more.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "gpu")]

from run_plan import GROUP_LIMITS_S, ON_DEVICE, REHEARSED, TESTS, Plan  # noqa: E402
from run_table import tables_of  # noqa: E402
from run_wheels import (  # noqa: E402
    git,
    prepare,
    prepared,
    tests_newest_first,
    wheels_for_what_is_missing,
)
from support.timed_steps import Run, Step  # noqa: E402

BUILD = ROOT / "build" / "gpu"
WHEELS = BUILD / "wheels"
SITE = BUILD / f"site-{sys.version_info[0]}.{sys.version_info[1]}"
SCRATCH = BUILD / "scratch"
CUDA = Path("/usr/local/cuda")
PACKAGES = ("torch", "pytest", "safetensors", "fastsafetensors", "runai-model-streamer")


def facts(mode: str) -> dict[str, Any]:
    """Returns what is known before anything is built."""
    versions: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return {
        "mode": mode,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit(),
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "gpu": said_by("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"),
        "nvcc": said_by(find_nvcc(), "--version"),
        "versions": versions,
    }


def commit() -> str | None:
    """Returns that of the tree, or where no repository has travelled with it, that of ``--prepare``."""
    here = git(ROOT, "describe", "--always", "--dirty") if (ROOT / ".git").exists() else ""
    travelled: str | None = prepared(WHEELS).get("commit")
    return here or travelled


def find_nvcc() -> str:
    return "nvcc" if shutil.which("nvcc") else str(CUDA / "bin" / "nvcc")


def said_by(*command: str) -> str | None:
    """Returns the last line of a command; None where it cannot run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip().splitlines()[-1] if done.returncode == 0 and done.stdout.strip() else None


def variables() -> dict[str, str]:
    paths = [str(SITE), str(ROOT), os.environ.get("PYTHONPATH", "")]
    found = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1", "COLUMNS": "120"}
    found["MAX_JOBS"] = os.environ.get("MAX_JOBS", str(len(os.sched_getaffinity(0))))
    if shutil.which("nvcc") is None and (CUDA / "bin" / "nvcc").exists():
        found["CUDA_HOME"] = str(CUDA)
    return found


def install_step(run: Run | None) -> list[Step]:
    """Returns the step that installs the wheels that this Python lacks, if there are any."""
    fitting, unfit = wheels_for_what_is_missing(ROOT, WHEELS)
    if unfit and run is not None:
        run.leave_out("other wheels", f"they are of another Python: {', '.join(unfit)}")
    if not fitting:
        return []
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--upgrade")
    return [Step("wheels", (*pip, "--target", str(SITE), *map(str, fitting)), 40.0)]


def steps_of(arguments: argparse.Namespace, run: Run | None) -> list[Step]:
    plan = Plan(REHEARSED if arguments.rehearse else ON_DEVICE, SCRATCH)
    steps = [*install_step(run), *plan.build_steps()]
    if arguments.rehearse:
        missing = [tool for tool in ("nvcc", "make", "g++") if shutil.which(tool) is None]
        if not missing:
            steps += plan.stand_in_steps()
        elif run is not None:
            run.leave_out("stand-in for the CUDA runtime", f"{', '.join(missing)} is missing")
    chosen = [*plan.test_steps(tests_newest_first(ROOT, WHEELS)), *plan.benchmark_steps()]
    return steps + [step for step in chosen if any(word in step.name for word in arguments.only or [""])]


def carry_out(arguments: argparse.Namespace) -> int:
    """Runs all steps. Returns 1 if something is missing from a whole run."""
    mode = "rehearsal" if arguments.rehearse else "device"
    limit_s = arguments.limit_s or (3600.0 if arguments.rehearse else 480.0)
    limits = {group: limit * (4.0 if arguments.rehearse else 1.0) for group, limit in GROUP_LIMITS_S.items()}
    os.chdir(ROOT)
    shutil.rmtree(SCRATCH, ignore_errors=True)
    SCRATCH.mkdir(parents=True)
    words_for = {sys.executable: "python3", f"{SCRATCH}/": "", f"{ROOT}/": "", str(ROOT): "."}
    output = arguments.output or BUILD / "results"
    run = Run(output, limit_s, limits, facts(mode), variables(), words_for, lambda text: print(text, flush=True))
    steps = steps_of(arguments, run)
    for step in steps:
        run.run(step)
    shutil.rmtree(SCRATCH)
    missing = run.finish()
    tests = [entry for entry in run.report["steps"] if entry["name"].startswith(f"{TESTS}/")]
    if not arguments.rehearse and tests and not any(entry["status"] == "ok" for entry in tests):
        missing.append("no file of tests/gpu passed")
    print(f"\n{tables_of(run.report)}")
    print("\n".join(["", *(f"MISSING: {line}" for line in missing)]) if missing else "\nall steps have a result")
    print(f"the report is {run.file.name}, beside output.log, where --output says")
    return 1 if missing else 0


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--prepare", action="store_true", help="fetch the wheels that travel, and check the size of all")
    what.add_argument("--rehearse", action="store_true", help="run all steps without a GPU; the figures mean nothing")
    what.add_argument("--table", type=Path, metavar="REPORT", help="print a report as Markdown, for the measurements")
    parser.add_argument("--list", action="store_true", help="print the steps in their order, and run none")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="of tests and benchmarks those whose name has a TEXT")
    parser.add_argument("--limit-s", type=float, help="for all steps together (default 480; 3600 for a rehearsal)")
    parser.add_argument("--output", type=Path, metavar="DIR", help="where the report goes (default build/gpu/results)")
    arguments = parser.parse_args()
    if arguments.output is not None:
        arguments.output = arguments.output.resolve()
    if arguments.prepare:
        return prepare(ROOT, WHEELS)
    if arguments.table is not None:
        print(tables_of(json.loads(arguments.table.read_text())))
        return 0
    if arguments.list:
        print("\n".join(step.name for step in steps_of(arguments, None)))
        return 0
    return carry_out(arguments)


if __name__ == "__main__":
    sys.exit(main())
