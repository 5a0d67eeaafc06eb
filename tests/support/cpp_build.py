# SPDX-License-Identifier: Apache-2.0
"""Builds the tests in C++: plain, or with ASan and UBSan if such a build exists, as in CI."""

from __future__ import annotations

import fcntl
import os
import subprocess
from pathlib import Path

__all__ = ["OUT", "ROOT", "build", "has_doctest"]

ROOT = Path(__file__).parents[2]
_BUILDS = ROOT / "build" / "cpp"
_VARIANT = "asan" if (_BUILDS / "asan" / "run_tests").exists() else "plain"
OUT = _BUILDS / _VARIANT
"""The folder of the programs."""


def has_doctest() -> bool:
    command = [os.environ.get("CXX", "g++"), "-E", "-x", "c++", "-"]
    code = "#include <doctest/doctest.h>\n"
    return subprocess.run(command, input=code, text=True, capture_output=True, check=False).returncode == 0


def build(makefile: str) -> str:
    """Makes the first target of ``makefile``. Returns what make says if it fails, else an empty text."""
    OUT.mkdir(parents=True, exist_ok=True)
    with (OUT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # sessions and xdist workers share the folder
        command = ["make", "-f", makefile, f"VARIANT={_VARIANT}", "-j2"]
        made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return "" if made.returncode == 0 else made.stdout[-4000:] + made.stderr[-8000:]
