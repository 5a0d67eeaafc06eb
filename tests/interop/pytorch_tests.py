# SPDX-License-Identifier: Apache-2.0
"""Runs PyTorch's own tests of DCP with our classes: ``python tests/interop/pytorch_tests.py``.

The script runs each file of ``test/distributed/checkpoint`` of the installed torch in a process of its own, with stock
classes and with ours (swapped.py says how). A test that passes with stock classes must also pass with ours, unless
``pytorch_differences.toml`` lists it with the reason. A listed test that passes is a failure, too.

Exit status: 0 if all is as listed, 1 if not, 77 if the tests are not available here.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from interop.pytorch_sources import REPOSITORY, SourcesError, fetch_packages, fetch_tests, tests_of  # noqa: E402
from interop.swapped import MODES  # noqa: E402

NO_SOURCES = 77
STOCK = MODES[0]
TABLE = HERE / "pytorch_differences.toml"


@dataclass
class Listed:
    """An entry of the table: tests of a file that do not pass with our classes, and the reason."""

    file: str
    tests: list[str]
    modes: list[str]
    reason: str
    seen: set[str] = field(default_factory=set)  # tests of the entry that did not pass
    passed: set[str] = field(default_factory=set)

    def covers(self, file: str, mode: str, test: str) -> bool:
        is_here = self.file == file and mode in self.modes
        return is_here and any(fnmatchcase(test, pattern) for pattern in self.tests)


@dataclass
class Outcome:
    """The outcome of a test: passed, failed, error, skipped, or killed at the time limit."""

    is_what: str
    why: str = ""


def read_table(path: Path) -> list[Listed]:
    with path.open("rb") as file:
        entries: list[dict[str, Any]] = tomllib.load(file).get("difference", [])
    return [Listed(**entry) for entry in entries]


def run_file(
    path: Path, mode: str, where: str, limit_s: float, packages: Path, wanted: Sequence[str] | None = None
) -> dict[str, Outcome]:
    """Runs a file of tests in a process of its own, and kills that and all that it started at the limit.

    Args:
        wanted: The tests to run; None runs all.
    """
    with tempfile.TemporaryDirectory(prefix="pytorch-tests-") as temporary:
        folder = Path(temporary)
        found = [str(HERE.parent.parent), str(packages), os.environ.get("PYTHONPATH", "")]
        environ = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, found)),
            "TMPDIR": temporary,
            "OMP_NUM_THREADS": "1",
            "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(int(limit_s / 3)),
        }
        command = [sys.executable, str(HERE / "swapped.py"), mode, where, str(folder / "outcomes"), str(path)]
        if wanted is not None:
            (folder / "wanted").write_text("\n".join(wanted))
            command.append(str(folder / "wanted"))
        with (folder / "output").open("wb") as output:
            process = subprocess.Popen(
                command, cwd=folder, env=environ, stdout=output, stderr=output, start_new_session=True
            )
            try:
                ended = f"exit status {process.wait(limit_s)}"
            except subprocess.TimeoutExpired:
                ended = f"killed after {limit_s:g} s"
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        outcomes = _read(folder / "outcomes", ended)
        if ended != "exit status 0":
            last = (folder / "output").read_text(errors="replace").strip().splitlines()[-1:]
            outcomes["(process)"] = Outcome("error", " ".join([ended, *last]))
        else:
            outcomes["(process)"] = Outcome("passed")
    return outcomes


def _read(path: Path, ended: str) -> dict[str, Outcome]:
    outcomes: dict[str, Outcome] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        told = json.loads(line)
        if told["outcome"] is None:
            outcomes[told["test"]] = Outcome("killed", ended)
        else:
            outcomes[told["test"]] = Outcome(told["outcome"], told["why"])
    return outcomes


def compare(
    file: str, mode: str, stock: Mapping[str, Outcome], ours: Mapping[str, Outcome], table: Sequence[Listed]
) -> tuple[int, list[str]]:
    """Returns how many differences are listed, and a line for each that is not. Records in the table what was seen."""
    listed, unlisted = 0, []
    for test, outcome in stock.items():
        if outcome.is_what != "passed":
            continue
        own = ours.get(test, Outcome("missing"))
        entry = next((entry for entry in table if entry.covers(file, mode, test)), None)
        name = f"{file}::{test} ({mode})"
        if own.is_what == "passed":
            if entry is not None:
                entry.passed.add(name)
        elif entry is not None:
            entry.seen.add(name)
            listed += 1
        else:
            unlisted.append(f"{name} passes with stock classes; with ours: {own.is_what} {_first_lines(own.why)}")
    return listed, unlisted


def _first_lines(why: str) -> str:
    return " | ".join(line for line in why.splitlines() if line.strip())[:500]


def counted(outcomes: Mapping[str, Outcome]) -> str:
    counts = Counter(outcome.is_what for test, outcome in outcomes.items() if test != "(process)")
    return ", ".join(f"{number} {what}" for what, number in sorted(counts.items())) or "no tests"


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    import torch

    version = torch.__version__.partition("+")[0]
    try:
        packages = fetch_packages(options.cache)
        tests = tests_of(options.source) if options.source else fetch_tests(version, options.cache, options.repository)
    except SourcesError as error:
        print(f"SKIPPED: PyTorch's tests of {version} cannot be had here: {error}", file=sys.stderr)
        return NO_SOURCES
    files = sorted(str(path.relative_to(tests)) for path in tests.rglob("test_*.py"))
    if options.files:
        files = [file for file in files if any(fnmatchcase(file, pattern) for pattern in options.files)]
    if not files:
        print(f"no file of {tests} is called {' or '.join(options.files)}", file=sys.stderr)
        return 2
    table = read_table(options.table)
    where = "cpu" if options.on_cpu else "as-is"
    rows, unlisted = [], []
    for number, file in enumerate(files, 1):
        print(f"[{number}/{len(files)}] {file}", flush=True)
        stock = run_file(tests / file, STOCK, where, options.limit_s, packages)
        print(f"  {STOCK}: {counted(stock)}", flush=True)
        row = [file, counted(stock)]
        passed = [test for test, outcome in stock.items() if outcome.is_what == "passed" and test != "(process)"]
        for mode in options.modes:
            if not passed:
                row.append("-")
                continue
            ours = run_file(tests / file, mode, where, options.limit_s, packages, passed)
            known, unknown = compare(file, mode, stock, ours, table)
            print(f"  {mode}: {counted(ours)}; {known} listed, {len(unknown)} unlisted differences", flush=True)
            row.append(f"{known} listed, {len(unknown)} unlisted" if known or unknown else "as stock")
            unlisted += unknown
        rows.append(row)
    status = report(version, [["file", STOCK, *options.modes], *rows], unlisted, table)
    if all(row[-1] == "-" for row in rows):
        print("\nNothing was compared: no test passes with stock classes.")
        return 1
    return status


def report(version: str, rows: list[list[str]], unlisted: list[str], table: Sequence[Listed]) -> int:
    """Prints the results and returns the exit status."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    print(f"\nPyTorch's tests of DCP, torch {version}")
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for entry in table:
        if entry.seen:
            print(f"\nlisted: {entry.reason}\n  " + "\n  ".join(sorted(entry.seen)))
    too_many = sorted(name for entry in table for name in entry.passed)
    for line in unlisted:
        print(f"\nUNLISTED: {line}")
    for name in too_many:
        print(f"\nLISTED, BUT PASSES: {name}")
    return 1 if unlisted or too_many else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="files below test/distributed/checkpoint, or patterns; all if none")
    parser.add_argument("--source", type=Path, help="a checkout of PyTorch, instead of fetching the release's tests")
    parser.add_argument("--repository", default=REPOSITORY, help="where git fetches them (default: %(default)s)")
    parser.add_argument(
        "--cache",
        type=Path,
        default=HERE.parent.parent / "build" / "pytorch_tests",
        help="keeps what was fetched, by version (default: %(default)s)",
    )
    parser.add_argument("--modes", nargs="+", choices=MODES[1:], default=list(MODES[1:]), help="see swapped.py")
    parser.add_argument("--table", type=Path, default=TABLE, help="of known differences (default: %(default)s)")
    parser.add_argument("--on-cpu", action="store_true", help="run tests on CPU ranks that skip for want of GPUs")
    parser.add_argument(
        "--limit-s", type=float, default=600.0, help="seconds for a file in a mode (default: %(default)s)"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
