# SPDX-License-Identifier: Apache-2.0
"""The command line, in this process and in processes of its own, and checkpoints for it to look at."""

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

__all__ = ["HOSTILE", "STOCK", "as_json", "run", "save", "start", "state", "stock"]

ROOT = Path(__file__).parents[2]
STOCK = ROOT / "tests" / "interop" / "golden" / "stock"
# A key that would end the line, colour it, reorder it, and pass for another.
HOSTILE = "a\n\x1b[31m\u202eb\u05d0\\n\x9b'"


def stock(name: str) -> str:
    """A checkpoint that stock DCP wrote."""
    return str(STOCK / name)


def state() -> dict[str, Any]:
    """Tensors of several dtypes, objects, and a hostile name."""
    return {
        "model": {"embed": torch.arange(600, dtype=torch.float32).reshape(20, 30), "bias": torch.arange(7.0)},
        "step": 7,
        "betas": [0.9, 0.95],
        HOSTILE: torch.ones(3, dtype=torch.bfloat16),
    }


def save(path: Path, value: dict[str, Any] | None = None) -> str:
    """A checkpoint of ours."""
    dcp.save(state() if value is None else value, storage_writer=BcpWriter(path, sync_files=False), no_dist=True)
    return str(path)


def run(*arguments: str) -> Result:
    """A command in this process; fails on an exception that it did not turn into a message."""
    result = CliRunner().invoke(bcp, arguments, prog_name="bcp")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def as_json(*arguments: str, code: int = 0) -> Any:
    """What a command prints with ``--json``."""
    result = run(*arguments, "--json")
    assert result.exit_code == code, result.output
    assert result.stdout.isascii()

    def refuse(number: str) -> None:
        raise AssertionError(f"{number} is no JSON")

    return json.loads(result.stdout, parse_constant=refuse)


def start(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    """A command in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **options.pop("environment", {})}
    return subprocess.Popen(
        [sys.executable, "-m", "bytecheckpoint", *arguments],
        stdout=options.pop("stdout", subprocess.PIPE),
        stderr=options.pop("stderr", subprocess.PIPE),
        env=environment,
        text=True,
        **options,
    )
