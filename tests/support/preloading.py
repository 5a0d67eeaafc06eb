# SPDX-License-Identifier: Apache-2.0
"""Compiles libraries for LD_PRELOAD, which can disturb a call whichever thread makes it; strace counts by thread."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

__all__ = ["preloaded"]


def preloaded(source: Path, directory: Path, *, untested: str) -> Path:
    """Compiles a library and returns its path. Without a compiler it skips ``untested``."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip(f"{untested} NOT TESTED: there is no C compiler")
    library = directory / source.with_suffix(".so").name
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True)
    return library
