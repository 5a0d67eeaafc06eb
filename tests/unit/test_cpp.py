# SPDX-License-Identifier: Apache-2.0
"""Makes each doctest case of ``tests/cpp`` a pytest item, so that pytest alone shows all tests.

The cases are built while pytest collects: plain, or with ASan and UBSan if such a build exists, as in CI. One process
runs all cases. A case then meets what others left behind, and 560 starts of a process would take longer than the tests.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from xml.etree import ElementTree

import pytest
from support.cpp_build import OUT, build, has_doctest
from support.sanitizing import IS_UNDER_ASAN

LIMIT_S = 900
pytestmark = [
    pytest.mark.not_under_asan("a program of its own; `make sanitize` runs it under ASan"),
    pytest.mark.timeout(LIMIT_S + 60),  # the first item waits for all
]

RUN_TESTS = OUT / "run_tests"


@cache
def _build() -> str:
    """Builds the cases. Returns an error, empty if there is none; it begins with ``absent:`` if a tool is missing."""
    if shutil.which("make") is None or shutil.which(os.environ.get("CXX", "g++")) is None:
        return "absent: make and a C++ compiler are needed to build the C++ tests"
    failed = build("tests/cpp/build.mk")
    if failed and not has_doctest():
        return "absent: doctest/doctest.h is missing, THE C++ TESTS DID NOT RUN; apt-get install doctest-dev"
    return failed and f"the C++ tests do not build:\n{failed}"


def _names() -> list[str]:
    listing = subprocess.run(
        [RUN_TESTS, "--list-test-cases", "--no-intro=true", "--no-version=true"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return [line for line in listing.splitlines() if line and not line.startswith(("[doctest]", "==="))]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", ["(not built)"] if IS_UNDER_ASAN or _build() else _names())


@cache
def _outcomes() -> tuple[dict[str, str], str]:
    """Runs all cases. Returns what failed in each case that ended, empty if nothing did, and how the run ended."""
    command = [RUN_TESTS, "--reporters=xml", "--no-intro=true", "--no-version=true"]
    ran = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, timeout=LIMIT_S)
    parser = ElementTree.XMLPullParser(["end"])
    parser.feed(ran.stdout)  # the XML is cut off if the process died
    outcomes = {}
    for _, element in parser.read_events():
        if element.tag == "TestCase" and (result := element.find("OverallResultsAsserts")) is not None:
            passed = result.get("test_case_success") == "true"
            outcomes[element.get("name", "")] = "" if passed else ElementTree.tostring(element, encoding="unicode")
    return outcomes, f"exit status {ran.returncode}\n{ran.stdout[-2000:]}\n{ran.stderr}"


def test_cpp(case: str) -> None:
    if problem := _build():
        if problem.startswith("absent:") and not os.environ.get("CI"):
            pytest.skip(problem)
        pytest.fail(problem)
    outcomes, end = _outcomes()
    assert case in outcomes, f"it did not come to its end: {end}"
    assert not outcomes[case], outcomes[case]


def test_the_run_of_all_cases_ended_well() -> None:
    """Sanitizers may report errors after the last case, for example leaks."""
    if _build():
        pytest.skip("not built: the cases say why")
    outcomes, end = _outcomes()
    assert outcomes
    assert any(outcomes.values()) or end.startswith("exit status 0\n"), end
