# SPDX-License-Identifier: Apache-2.0
"""Runs ``tests/cuda``: it tests DeviceMerge as nvcc compiles it, with a stand-in for the CUDA runtime and its device.

It checks bytes and the order of streams, also where there is no GPU. ``tests/gpu`` tests what a device itself does.
"""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest
from support.cpp_build import OUT, build, has_doctest

pytestmark = pytest.mark.not_under_asan("a program of its own, whose compiler would be preloaded, too")


def skip_without_tools() -> None:
    missing = [tool for tool in ("nvcc", "make", os.environ.get("CXX", "g++")) if shutil.which(tool) is None]
    if not missing and not has_doctest():
        missing = ["doctest/doctest.h"]
    if missing:
        pytest.skip(f"HOST CODE OF THE CUDA LAYER NOT TESTED: {', '.join(missing)} is missing")


@pytest.mark.timeout(600)
def test_cuda_on_host() -> None:
    skip_without_tools()
    failed = build("tests/cuda/build.mk")
    assert not failed, failed
    ran = subprocess.run([OUT / "run_cuda_tests"], capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]
