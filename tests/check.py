# SPDX-License-Identifier: Apache-2.0
"""`make check`: in a few minutes, what most likely shows that a change is wrong. CI runs everything.

It looks at the files that differ from the merge base with main, or with ``BASE``, and runs ruff, mypy, `tests/lint`,
and:

1. test files that have changed;
2. test files that import a changed module by its name, or that bear its name; of a module of the tests, also those that
   import it through other modules;
3. for the folder of a changed module of the package, and for `csrc`, the files that ``OF_FOLDER`` lists;
4. for a changed `csrc/LAYER/x.cpp` or `x.h`, the C++ tests whose file includes `x.h`, without sanitizers;
5. for any other file, test files that name it.

A name that is imported from `bytecheckpoint` itself does not count for rule 2: half of the suite would run. The files
of `support/slow_files.py` run only if they have changed, and at most ``MOST_FILES`` run: first those of rule 1,
then by suite. What is left out is listed.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from support.slow_files import SLOWEST_FIRST

__all__ = ["Selection", "select"]

TESTS = Path(__file__).parent
ROOT = TESTS.parent
BIN = Path(sys.executable).parent
MOST_FILES = 16
LIMIT_S = 900
# Suites that `make check` runs, those first in which a fault is found soonest. The others need minutes, or servers.
SUITES = ("unit", "distributed", "interop", "docs", "storage", "faults", "frameworks")
# What goes through a whole folder of the package, or of csrc.
OF_FOLDER = {
    "checkpoint": ("unit/test_steps.py", "unit/test_retention.py", "unit/test_digests.py"),
    "cli": ("unit/test_cli_process.py",),
    "calls": ("unit/test_calls.py", "unit/test_call_context.py", "unit/test_live_pages.py"),
    "compat": ("unit/test_objects.py",),
    "contents": ("unit/test_cli_show.py", "unit/test_cli_diff.py", "unit/test_standard_objects.py"),
    "convert": ("interop/test_convert_to_torch.py", "interop/test_safetensors.py"),
    "csrc": ("unit/test_round_trip.py", "unit/test_planning.py", "interop/test_golden.py", "interop/test_stock.py"),
    "dcp": (
        "unit/test_round_trip.py",
        "unit/test_save_planner.py",
        "unit/test_load_planner.py",
        "interop/test_stock.py",
    ),
    "distributed": ("distributed/test_groups.py", "distributed/test_peers.py", "distributed/test_in_step.py"),
    "findings": ("unit/test_findings.py",),
    "integrations": ("frameworks/test_integration_imports.py", "frameworks/test_integration_accelerate.py"),
    "journal": ("unit/test_journal.py", "unit/test_observers.py", "unit/test_failed_saves.py"),
    "load_spec": ("unit/test_load_spec.py", "unit/test_patterns.py"),
    "observability": ("unit/test_cli_report.py", "unit/test_report_page.py", "unit/test_exporters.py"),
    "planning": ("unit/test_planning.py", "unit/test_plan_tree.py", "distributed/test_plan_exchange.py"),
    "probes": ("unit/test_probes.py",),
    "publishing": ("unit/test_publishing.py", "unit/test_published.py", "distributed/test_publishing_ranks.py"),
    "report": ("unit/test_reports.py",),
    "runtime": ("unit/test_fork.py", "unit/test_background.py"),
    "sharing": ("distributed/test_shared_reading.py",),
    "staging": ("unit/test_stager.py", "unit/test_staged_saves.py", "unit/test_background.py"),
    "storage": ("unit/test_places.py", "storage/test_urls.py", "storage/test_contract.py"),
    "tensors": ("distributed/test_dtensor_pieces.py", "unit/test_subclass_parts.py"),
    "torchtitan": ("frameworks/test_torchtitan_spec.py",),
    "training_state": ("unit/test_public_names.py", "frameworks/test_save_load.py"),
}
# What says what it is for everybody, and is imported or named by nearly all files.
FOR_ALL = {"tests/conftest.py", "bytecheckpoint/__init__.py", "bytecheckpoint/_core.pyi", "bytecheckpoint/_C.pyi"}
GENERAL = ("unit/test_round_trip.py", "unit/test_public_names.py", "distributed/test_ranks.py", "interop/test_stock.py")


@dataclass
class Selection:
    """What a change asks for. Paths are relative to `tests`.

    Attributes:
        files: Test files to run.
        cases: Files of `tests/cpp` whose cases run.
        left_out: Test files that the rules name and that do not run.
    """

    files: list[str] = field(default_factory=list)
    cases: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def select(changed: Iterable[str]) -> Selection:
    """Returns what to run for changed files, which are named relative to the repository."""
    own, named, cases = set[str](), set[str](), set[str]()
    for path in changed:
        parts = path.split("/")
        if path.startswith("tests/lint/"):
            continue  # runs always
        if _is_test(path):
            own.add(path.removeprefix("tests/"))
        elif path in FOR_ALL:
            named.update(GENERAL)
        elif parts[0] in ("bytecheckpoint", "tests") and path.endswith(".py"):
            module = ".".join(parts[parts[0] == "tests" :]).removesuffix(".py").removesuffix(".__init__")
            named.update(file for file in _test_files() if module in _imports_of_test(file, path))
            if parts[0] == "bytecheckpoint":
                names = {f"test_{parts[-1]}", f"test_{'_'.join(parts[1:])}"}
                named.update(file for file in _test_files() if file.split("/")[1] in names)
                named.update(OF_FOLDER.get(parts[1].removesuffix(".py"), GENERAL))
        elif parts[0] == "csrc":
            header = str(Path(path).with_suffix(".h"))
            cases.update(file.name for file in TESTS.glob("cpp/*.cpp") if f'"{header}"' in file.read_text())
            named.update(OF_FOLDER["csrc"])
        elif parts[:2] == ["tests", "cpp"]:
            cases.add(parts[-1])
        else:
            name = parts[-1] if "." in parts[-1] else path
            named.update(file for file in _test_files() if name in (TESTS / file).read_text())
    fast = {file for file in named - own if file not in SLOWEST_FIRST and file.split("/")[0] in SUITES}
    files = [*_in_order(own), *_in_order(fast)]
    files = [file for file in files if (TESTS / file).exists()]
    left_out = {file for file in named - own - fast if file.split("/")[0] != "lint"}  # which runs always
    return Selection(files[:MOST_FILES], sorted(cases), [*files[MOST_FILES:], *sorted(left_out)])


def _is_test(path: str) -> bool:
    return path.startswith("tests/") and Path(path).name.startswith("test_") and path.endswith(".py")


def _in_order(files: Iterable[str]) -> list[str]:
    return sorted(files, key=lambda file: ((*SUITES, file.split("/")[0]).index(file.split("/")[0]), file))


@cache
def _test_files() -> list[str]:
    return sorted(path.relative_to(TESTS).as_posix() for path in TESTS.glob("*/test_*.py"))


@cache
def _imports(path: Path) -> frozenset[str]:
    """Returns the modules that a file imports by name; of `from a import b` both `a` and `a.b`, which may be one."""
    found = set[str]()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(found - {"bytecheckpoint"})


def _imports_of_test(file: str, changed: str) -> set[str]:
    """Returns the modules that a test file imports by name; also through its suite, if `changed` is of the package.

    If `changed` is of the tests, also through all modules of the tests.
    """
    found, waiting = set[str](), [TESTS / file]
    while waiting:
        fresh = _imports(waiting.pop()) - found
        found |= fresh
        suite = file.split("/")[0]
        # tests/unit is no package: its modules are imported as they are.
        for name in [
            name if (TESTS / f"{name.replace('.', '/')}.py").exists() else f"{suite}.{name}" for name in fresh
        ]:
            place = TESTS / f"{name.replace('.', '/')}.py"
            if place.exists() and (changed.startswith("tests/") or name.startswith(f"{suite}.")):
                found.add(name)
                waiting.append(place)
    return found


def _changed(base: str) -> list[str]:
    """Returns the files that differ from the merge base, also those that git does not know yet."""
    (merge_base,) = _lines("git", "merge-base", "HEAD", base)
    differing = _lines("git", "diff", "--name-only", merge_base)
    return sorted({*differing, *_lines("git", "ls-files", "--others", "--exclude-standard")})


def _lines(*command: str) -> list[str]:
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()


def _steps(changed: list[str], chosen: Selection) -> Iterator[list[str]]:
    """Yields the commands, those that end soonest first."""
    there = [path for path in changed if (ROOT / path).exists()]
    if python := [path for path in there if path.endswith((".py", ".pyi"))]:
        yield [f"{BIN}/ruff", "check", "--quiet", *python]
        yield [f"{BIN}/ruff", "format", "--check", "--quiet", *python]
    if cpp := [path for path in there if path.endswith((".cpp", ".h", ".cu"))]:
        yield [f"{BIN}/clang-format", "--dry-run", "-Werror", *cpp]
    if any(path.startswith("bytecheckpoint/") for path in changed):
        yield [f"{BIN}/mypy"]
    files = ["tests/lint", *(f"tests/{file}" for file in chosen.files)]
    yield [sys.executable, "-m", "pytest", "-q", "-n", str(os.cpu_count()), "--dist", "loadfile", *files]
    if chosen.cases:
        yield ["make", f"-j{os.cpu_count()}", "-f", "tests/cpp/build.mk", "VARIANT=plain", "all"]
        yield ["build/cpp/plain/run_tests", "-sf=" + ",".join(f"*/{case}" for case in chosen.cases)]


def main(base: str) -> int:
    """Runs what a change asks for. Returns how many of the commands failed."""
    changed = _changed(base)
    chosen = select(changed)
    print(f"{len(changed)} files differ from the merge base with {base}", flush=True)
    failed = []
    for command in _steps(changed, chosen):
        shown = " ".join(command).replace(f"{BIN}/", "")
        print(f"\n--- {shown}", flush=True)
        begin = time.monotonic()
        if subprocess.run(command, cwd=ROOT, check=False, timeout=LIMIT_S).returncode != 0:
            failed.append(shown)
        print(f"--- {time.monotonic() - begin:.0f} s", flush=True)
    print("\nNot run: clang-tidy, sanitizers, docs, the wheel, and all other tests. .ci/run runs them.")
    if chosen.left_out:
        print(f"Of the tests that are near to the change these were too slow, or too many: {' '.join(chosen.left_out)}")
    print("\n".join(f"FAILED: {command}" for command in failed) or "All of this passed.")
    return len(failed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", nargs="?", default="main", help="branch or commit to compare with (main)")
    sys.exit(main(parser.parse_args().base))
