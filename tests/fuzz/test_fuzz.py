# SPDX-License-Identifier: Apache-2.0
"""Fuzzes every target with clang's libFuzzer: ``BCP_LONG=1``, for ``BCP_FUZZ_SECONDS`` each.

Every test run replays earlier finds without clang, in ``tests/cpp/test_fuzz_replay.cpp``.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TARGETS = sorted(file.stem.removeprefix("fuzz_") for file in Path(__file__).parent.glob("fuzz_*.cpp"))
SECONDS = int(os.environ.get("BCP_FUZZ_SECONDS", "20"))
CLANGS = ("clang++", *(f"clang++-{version}" for version in range(19, 13, -1)))


@pytest.mark.long
@pytest.mark.parametrize("target", TARGETS)
def test_fuzz(target: str) -> None:
    if not any(map(shutil.which, CLANGS)) and not os.environ.get("CI"):
        pytest.skip("THE FUZZERS DID NOT RUN: clang is missing; apt-get install clang-14 libclang-rt-14-dev")
    command = ["make", "-f", "tests/fuzz/build.mk", "fuzz", f"TARGET={target}", f"SECONDS={SECONDS}"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace", check=False)
    assert ran.returncode == 0, ran.stderr[-8000:]
    (executions,) = re.findall(r"stat::number_of_executed_units:\s+(\d+)", ran.stderr)
    print(f"{target}: {executions} executions in {SECONDS} s")
    assert int(executions) > 0
