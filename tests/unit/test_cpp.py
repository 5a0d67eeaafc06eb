# SPDX-License-Identifier: Apache-2.0
"""Every doctest case of ``tests/cpp`` as one item, so that pytest alone shows all there is.

The plain variant is built while collecting. Sanitizers run apart: ``make -f tests/cpp/build.mk VARIANT=asan test``.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
from sanitizing import IS_UNDER_ASAN

pytestmark = pytest.mark.not_under_asan("a program of its own; `make sanitize` runs it under ASan")

ROOT = Path(__file__).parents[2]
MAKE = ("make", "-f", "tests/cpp/build.mk", "VARIANT=plain", "-j2")
RUN_TESTS = ROOT / "build" / "cpp" / "plain" / "run_tests"
DOCTEST_MISSING = 3  # of the recipe; make itself ends with 2 and says so
SECONDS_PER_CASE = 120


@cache
def _build() -> str:
    """Builds the cases. Returns what is wrong, empty if nothing is; ``absent:`` in front if a tool is not there."""
    if shutil.which("make") is None or shutil.which(os.environ.get("CXX", "g++")) is None:
        return "absent: make and a C++ compiler are needed to build the C++ tests"
    RUN_TESTS.parent.mkdir(parents=True, exist_ok=True)
    with (RUN_TESTS.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # sessions and xdist workers share the folder
        built = subprocess.run(MAKE, cwd=ROOT, capture_output=True, text=True, check=False)
    if built.returncode == 0:
        return ""
    output = built.stdout[-4000:] + built.stderr[-8000:]
    if f"doctest_is_there] Error {DOCTEST_MISSING}" in output:
        return "absent: doctest/doctest.h is missing, THE C++ TESTS DID NOT RUN; apt-get install doctest-dev"
    return f"the C++ tests do not build:\n{output}"


def _names() -> list[str]:
    listing = subprocess.run(
        [RUN_TESTS, "--list-test-cases", "--no-intro=true", "--no-version=true"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return [line for line in listing.splitlines() if line and not line.startswith(("[doctest]", "==="))]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    metafunc.parametrize("case", ["(not built)"] if IS_UNDER_ASAN or _build() else _names())


def _filter_of(case: str) -> str:
    """The case's name as a doctest filter: commas separate filters, ``*`` and ``?`` are wild."""
    return "-tc=" + case.replace("\\", "\\\\").replace(",", "\\,")


def test_cpp(case: str) -> None:
    if problem := _build():
        if problem.startswith("absent:") and not os.environ.get("CI"):
            pytest.skip(problem)
        pytest.fail(problem)
    ran = subprocess.run(
        [RUN_TESTS, _filter_of(case), "--no-intro=true", "--no-version=true"],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        timeout=SECONDS_PER_CASE,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    # A filter that matches nothing passes too.
    summary = next(line for line in ran.stdout.splitlines() if "test cases:" in line)
    assert int(summary.split("test cases:")[1].split("|")[0]) == 1, f"{case!r} ran as: {summary}"
