# SPDX-License-Identifier: Apache-2.0
"""Tests that a build has device code if nvcc is there to compile it, and that a build without torch fails clearly."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch  # noqa: F401  # _C links against it

import bytecheckpoint
from bytecheckpoint.native import _C

ARCHITECTURES = ["sm_80", "sm_90", "sm_100"]


def wants_device_code() -> bool:
    """Whether setup.py, run as these tests are, would compile device code."""
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    has_nvcc = any(shutil.which("nvcc", path=f"{home}/bin") for home in homes) or shutil.which("nvcc") is not None
    return has_nvcc and os.environ.get("BCP_BUILD_CUDA") != "0"


def test_device_code_is_in_where_nvcc_is() -> None:
    cuda = bytecheckpoint.build_info()["cuda"]
    assert bool(cuda) == wants_device_code(), f"built with {cuda}, nvcc is at {shutil.which('nvcc')}"


def test_device_code_is_for_the_architectures_that_it_names() -> None:
    cuda = bytecheckpoint.build_info()["cuda"]
    if not cuda:
        pytest.skip("NO DEVICE CODE IN THIS BUILD: there was no nvcc")
    assert cuda == [*ARCHITECTURES, "compute_100"]
    cuobjdump = shutil.which("cuobjdump")
    if cuobjdump is None:
        pytest.skip("CUOBJDUMP IS MISSING: what device code is in the extension is not looked at")
    listing = subprocess.run([cuobjdump, "--list-elf", str(_C.__file__)], capture_output=True, text=True, check=True)
    assert set(re.findall(r"\.(sm_\d+)\.", listing.stdout)) == set(ARCHITECTURES)


def test_the_runtime_of_cuda_stays_inside() -> None:
    """Torch loads its own CUDA runtime with global names, maybe another version. Ours must not use or replace it."""
    if not bytecheckpoint.build_info()["cuda"]:
        pytest.skip("NO DEVICE CODE IN THIS BUILD: there was no nvcc")
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("NM IS MISSING: the names that the extension shares are not looked at")
    listing = subprocess.run([nm, "-D", str(_C.__file__)], capture_output=True, text=True, check=True).stdout
    assert "PyInit__C" in listing
    assert not re.findall(r"\b_*cuda\w+", listing)


def test_a_build_without_torch_says_what_to_do() -> None:
    """By default pip builds in an environment of its own, which has no torch."""
    setup = Path(__file__).parents[2] / "setup.py"
    code = f"import runpy, sys; sys.modules['torch'] = None; runpy.run_path({str(setup)!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code, "--version"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.endswith("wheel ninja && pip install --no-build-isolation .\n")
