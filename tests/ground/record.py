# SPDX-License-Identifier: Apache-2.0
"""Writes what a run of `make ground` found to build/ground.json: each test by file system, and the measured facts."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

__all__ = ["RECORD", "pytest_runtest_logreport", "pytest_sessionfinish"]

RECORD = Path(os.environ.get("BCP_GROUND_JSON") or Path(__file__).parents[2] / "build" / "ground.json")
_NUM_LINES_KEPT = 3
_found: dict[str, dict[str, Any]] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keeps the worst of a test's setup, call and teardown; hooks of several workers' tests arrive in one process."""
    test, _, kind = report.nodeid.removesuffix("]").partition("[")
    of = _found.setdefault(kind, {"tests": {}})
    of.update({name: value for name, value in report.user_properties if name == "facts"})
    tests, name = of["tests"], test.rpartition("::")[2]
    if report.when == "call" or report.outcome != "passed":
        why = "" if report.outcome == "passed" else report.longreprtext
        if isinstance(report.longrepr, tuple):  # of a skip: file, line, reason
            why = str(report.longrepr[2])
        lines = [line for line in why.strip().splitlines() if line.startswith("E  ")] or why.splitlines()
        outcome = "failed" if hasattr(report, "wasxfail") else report.outcome
        tests[name] = {"outcome": outcome, "why": lines[:_NUM_LINES_KEPT]}


def pytest_sessionfinish(session: pytest.Session) -> None:
    if os.environ.get("BCP_GROUND") == "1" and not hasattr(session.config, "workerinput"):
        RECORD.parent.mkdir(exist_ok=True)
        RECORD.write_text(json.dumps({"date": time.strftime("%Y-%m-%d"), "kinds": _found}, indent=1) + "\n")
