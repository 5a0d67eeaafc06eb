# SPDX-License-Identifier: Apache-2.0
"""Tests what a run of pytest says about where its time went."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]

FILE = """
import subprocess, sys, time
import pytest

@pytest.fixture
def slow():
    time.sleep(0.2)

def test_in_a_process():
    subprocess.run([sys.executable, "-c", "sum(range(20_000_000))"], check=True)

def test_waits(slow):
    time.sleep(0.3)
"""


def test_set_up_calls_and_processes_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(FILE)
    (tmp_path / "test_b.py").write_text("def test(): pass\n")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "1", "-p", "support.times", "-p", "no:cacheprovider", "."]
    environ = {**os.environ, "PYTHONPATH": str(TESTS), "BCP_TEST_TIMES": "times.json"}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout
    times = json.loads((tmp_path / "times.json").read_text())
    assert list(times) == ["test_a.py", "test_b.py"]
    first, second = times.values()
    assert (first["num_tests"], second["num_tests"]) == (2, 1)
    assert 0.2 <= first["setup_s"] < first["call_s"]
    assert first["call_s"] >= 0.3
    assert first["cpu_s"] >= 0.1 > second["cpu_s"]
    assert "slowest" not in done.stdout, "three files need no list"
