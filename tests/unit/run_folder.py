# SPDX-License-Identifier: Apache-2.0
"""Makes run folders with step folders of all kinds, from copies of one small checkpoint."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from bytecheckpoint import BcpWriter, scan_steps

__all__ = ["RunFolder", "save_at", "small_state"]

DEAD_TMP = ".metadata.dddddddddddddddddddddddddddddddd.tmp"


def small_state(step: int = 0) -> dict[str, Any]:
    return {"weight": torch.arange(1000, dtype=torch.float32) + step, "step": step}


def save_at(path: Path, step: int = 0, **writer: Any) -> None:
    dcp.save(small_state(step), storage_writer=BcpWriter(path, **writer), no_dist=True)


class RunFolder:
    """The root of a run.

    Args:
        template: The checkpoint that steps are copied from.
    """

    def __init__(self, root: Path, template: Path) -> None:
        self.root = root
        self._template = template
        root.mkdir()

    def path(self, step: int) -> Path:
        return self.root / f"step-{step}"

    def complete(self, *steps: int) -> None:
        for step in steps:
            shutil.copytree(self._template, self.path(step))

    def half(self, step: int, *, tmp: bool = True, age_s: float = 0) -> Path:
        """Makes what a save leaves that died before its commit, ``age_s`` seconds ago, and returns its folder."""
        self.complete(step)
        path = self.path(step)
        (path / ".metadata").unlink()
        if tmp:
            (path / DEAD_TMP).touch()
        self.age(step, age_s)
        return path

    def corrupt(self, step: int) -> Path:
        """Makes a step with a data file that is cut off, and returns its folder."""
        self.complete(step)
        path = self.path(step)
        os.truncate(next(path.glob("*.distcp")), 100)
        return path

    def age(self, step: int, age_s: float) -> None:
        path = self.path(step)
        then = path.stat().st_mtime - age_s
        for entry in (*path.rglob("*"), path):
            os.utime(entry, (then, then))

    def names(self) -> set[str]:
        return {path.name for path in self.root.iterdir() if path.name != ".bcp"}

    def steps(self, state: str = "complete") -> list[int]:
        return [folder.step for folder in scan_steps(self.root) if folder.state == state]
