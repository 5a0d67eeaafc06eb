# SPDX-License-Identifier: Apache-2.0
"""Runs ``tests/cuda``: it tests DeviceMerge as nvcc compiles it, with a stand-in for the CUDA runtime and its device.

It checks bytes and the order of streams, also where there is no GPU. ``tests/gpu`` tests what a device itself does.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.not_under_asan("a program of its own, whose compiler would be preloaded, too")

ROOT = Path(__file__).parents[2]
RUN_TESTS = ROOT / "build" / "cuda" / "run_tests"


def skip_without_tools() -> None:
    missing = [tool for tool in ("nvcc", "make", os.environ.get("CXX", "g++")) if shutil.which(tool) is None]
    if not missing:
        code = "#include <doctest/doctest.h>\n"
        command = [os.environ.get("CXX", "g++"), "-E", "-x", "c++", "-"]
        if subprocess.run(command, input=code, text=True, capture_output=True, check=False).returncode != 0:
            missing = ["doctest/doctest.h"]
    if missing:
        pytest.skip(f"HOST CODE OF THE CUDA LAYER NOT TESTED: {', '.join(missing)} is missing")


@pytest.mark.timeout(600)
def test_cuda_on_host() -> None:
    skip_without_tools()
    RUN_TESTS.parent.mkdir(parents=True, exist_ok=True)
    with (RUN_TESTS.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # sessions share the folder
        built = subprocess.run(
            ["make", "-f", "tests/cuda/build.mk", "-j2"], cwd=ROOT, capture_output=True, text=True, check=False
        )
    assert built.returncode == 0, built.stdout[-4000:] + built.stderr[-8000:]
    ran = subprocess.run([RUN_TESTS], capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]
