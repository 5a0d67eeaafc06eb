# SPDX-License-Identifier: Apache-2.0
"""Tests the error of an extension that is for another torch, or cannot be linked, also in `bcp doctor`."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from bytecheckpoint.native import _C, _core

INSTALLED = torch.__version__
LIMIT_S = 250.0

# Code that runs before the package is imported.
OTHER_TORCH = """
from importlib import metadata
installed = metadata.version
metadata.version = lambda name: "2.99.1+cu140" if name == "torch" else installed(name)
"""
NOT_LINKED = """
import importlib.abc
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "bytecheckpoint._C":
            raise ImportError("_C.so: undefined symbol: _ZN5torch8autograd9something")
sys.meta_path.insert(0, Finder())
"""


def run(before: str, code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", f"import sys\n{before}\n{code}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def test_each_extension_knows_the_torch_that_it_was_built_for() -> None:
    for module in (_core, _C):
        assert module.build_info()["torch"].split(".")[:2] == INSTALLED.split(".")[:2]


@pytest.mark.parametrize(
    ("before", "said"),
    [
        (OTHER_TORCH, "and torch 2.99.1+cu140 is installed; build it again"),
        (NOT_LINKED, f"undefined symbol: _ZN5torch8autograd9something): it was built for torch {INSTALLED[:4]}"),
    ],
)
def test_using_the_package_says_what_to_do(before: str, said: str) -> None:
    done = run(before, "import bytecheckpoint\nprint('imported')\nbytecheckpoint.BcpWriter('/ckpt')")
    assert done.stdout == "imported\n"
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: bytecheckpoint._C")
    assert f"it was built for torch {_core.build_info()['torch']}" in last
    assert said in last
    assert last.endswith("pip install --no-build-isolation --no-deps --force-reinstall . in the source checkout")


@pytest.mark.parametrize("before", [OTHER_TORCH, NOT_LINKED])
def test_the_doctor_says_the_same_and_what_needs_no_torch_goes_on(before: str) -> None:
    doctor = "from bytecheckpoint.cli.app import run\nsys.argv = ['bcp', 'doctor']\nsys.exit(run())"
    done = run(before, doctor)
    assert done.returncode == 1, done.stderr
    assert "\nbroken  _C: bytecheckpoint._C" in done.stdout
    assert "pip install --no-build-isolation" in done.stdout
    assert (
        run(before, "import bytecheckpoint.checkpoint.retention\nfrom bytecheckpoint.native import _core").returncode
        == 0
    )


def test_a_patch_of_the_same_version_is_no_other_torch() -> None:
    other = OTHER_TORCH.replace("2.99.1+cu140", ".".join([*INSTALLED.split(".")[:2], "99"]))
    done = run(other, "import bytecheckpoint\nbytecheckpoint.BcpWriter('/ckpt')")
    assert done.returncode == 0, done.stderr
