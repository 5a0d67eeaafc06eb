# SPDX-License-Identifier: Apache-2.0
"""Runs the command line, in this process or in a new one, and makes checkpoints for it to look at."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner, Result

from bytecheckpoint import BcpWriter
from bytecheckpoint.cli.app import bcp
from support.goldens import GOLDEN as GOLDENS

__all__ = ["HOSTILE", "STOCK", "as_json", "run", "save", "start", "state", "stock"]

ROOT = Path(__file__).parents[2]
STOCK = GOLDENS / "stock"
# A key that, printed as it is, would end the line, colour it, reorder it, and look like another key.
HOSTILE = "a\n\x1b[31m\u202eb\u05d0\\n\x9b'"


def stock(name: str) -> str:
    """Returns the path of a checkpoint that stock DCP wrote."""
    return str(STOCK / name)


def state() -> dict[str, Any]:
    """Returns tensors of several dtypes, objects, and a hostile key."""
    return {
        "model": {"embed": torch.arange(600, dtype=torch.float32).reshape(20, 30), "bias": torch.arange(7.0)},
        "step": 7,
        "betas": [0.9, 0.95],
        HOSTILE: torch.ones(3, dtype=torch.bfloat16),
    }


def save(path: Path, value: dict[str, Any] | None = None, **writer: Any) -> str:
    """Saves a checkpoint with our writer, and returns its path."""
    writing = BcpWriter(path, sync_files=False, **writer)
    dcp.save(state() if value is None else value, storage_writer=writing, no_dist=True)
    return str(path)


def run(*arguments: str) -> Result:
    """Runs a command in this process; fails on an exception that the command did not turn into a message."""
    result = CliRunner().invoke(bcp, arguments, prog_name="bcp")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def as_json(*arguments: str, code: int = 0) -> Any:
    """Runs a command with ``--json``, and returns what it prints."""
    result = run(*arguments, "--json")
    assert result.exit_code == code, result.output
    assert result.stdout.isascii()

    def refuse(number: str) -> None:
        raise AssertionError(f"{number} is no JSON")

    return json.loads(result.stdout, parse_constant=refuse)


def start(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    """Starts a command in a new process."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **options.pop("environment", {})}
    return subprocess.Popen(
        [sys.executable, "-m", "bytecheckpoint", *arguments],
        stdout=options.pop("stdout", subprocess.PIPE),
        stderr=options.pop("stderr", subprocess.PIPE),
        env=environment,
        text=True,
        **options,
    )
