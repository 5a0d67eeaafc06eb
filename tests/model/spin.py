# SPDX-License-Identifier: Apache-2.0
"""Searches the models in this folder exhaustively, with spin."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

__all__ = [
    "IS_LONG",
    "SECONDS_PER_SEARCH",
    "check_sound",
    "count_of",
    "errors_in",
    "search",
    "unreached_in",
    "violated_in",
]

IS_LONG = os.environ.get("BCP_LONG") == "1"
SECONDS_PER_SEARCH = 3000 if IS_LONG else 280


def _missing() -> str:
    absent = [tool for tool in ("spin", "gcc") if shutil.which(tool) is None]
    return f"{' and '.join(absent)} missing, THE MODELS WERE NOT CHECKED; apt-get install spin gcc" if absent else ""


def _run(arguments: list[str], folder: Path) -> str:
    ran = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, check=False, timeout=SECONDS_PER_SEARCH)
    assert ran.returncode == 0, f"{arguments}:\n{ran.stdout}{ran.stderr}"
    return ran.stdout + ran.stderr


def search(model: Path, flags: str, folder: Path) -> str:
    """Returns what spin says of ``model`` with these flags. The search stops at the first error. Skips without spin."""
    if problem := _missing():
        if os.environ.get("CI"):
            pytest.fail(problem)
        pytest.skip(problem)
    said = _run(["spin", "-a", *(f"-D{flag}" for flag in flags.split()), str(model)], folder)
    assert not said.strip(), said
    # Most searches take less time than a compiler that optimises.
    optimise = "-O2" if any(each in flags for each in ("RANKS=3", "SAVERS=3", "PRUNE=1", "M=3", "M=4")) else "-O0"
    _run(["gcc", optimise, "-w", "-DSAFETY", "-DCOLLAPSE", "-DMEMLIM=2000", "-o", "pan", "pan.c"], folder)
    return _run(["./pan", "-m20000", "-w20"], folder)


def errors_in(said: str) -> int:
    """Returns the number of errors in a search that was otherwise exhaustive."""
    assert "max search depth too small" not in said, said
    assert "out of memory" not in said, said
    assert "Bit statespace" not in said, said
    found = re.search(r"errors: (\d+)", said)
    assert found is not None, said
    return int(found[1])


def unreached_in(said: str) -> set[str]:
    """Returns the statements of the model that the search never reached."""
    return set(re.findall(r'\.pml:\d+, state \d+, "(.*)"', said)) - {"-end-"}


def violated_in(said: str) -> int:
    """Returns the number of the property that the only error violates."""
    assert errors_in(said) == 1, f"not seen\n{said}"
    violated = re.search(r"assertion violated .*\|\|\((\d)==0\)", said)
    assert violated is not None, said
    return int(violated[1])


def count_of(said: str) -> int:
    found = re.search(r"(\d+) states, stored", said)
    assert found is not None, said
    return int(found[1])


def check_sound(model: Path, flags: str, folder: Path, unreached: set[str]) -> None:
    """Fails unless no order of events violates a property, and all statements but ``unreached`` are reached."""
    said = search(model, flags, folder)
    assert errors_in(said) == 0, f"{flags}:\n{said}"
    assert "Search not completed" not in said, said
    print(f"{flags}: {count_of(said)} states")
    assert unreached_in(said) == unreached, f"{flags}: parts of the model that nothing reaches:\n{said}"
