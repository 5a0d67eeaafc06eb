# SPDX-License-Identifier: Apache-2.0
"""Makes a run folder to prune, and has the functions of processes that prune it."""

from __future__ import annotations

import shutil
from pathlib import Path

from support.fork_server import meet, wait_for
from support.saves import SaveRequest, attempt

from bytecheckpoint import Retention, RetentionReport, scan_steps
from faults.unprivileged import as_nobody

__all__ = ["KEPT", "make_run", "prune_as_nobody", "prune_when_told", "save_template", "states_in"]

# Steps are 1 (complete, with files of others), 2 (half) and 3 (complete). A prune keeps this one.
KEPT = 3


def save_template(request: SaveRequest) -> None:
    assert attempt(request).errors == {}


def make_run(root: Path, template: Path) -> None:
    for step in (1, 2, KEPT):
        shutil.copytree(template, root / f"step-{step}")
    (root / "step-1" / "config.json").write_text("{}")
    (root / "step-1" / "hf").mkdir()
    (root / "step-1" / "hf" / "model").touch()
    (root / "step-2" / ".metadata").rename(root / "step-2" / f".metadata.{'d' * 32}.tmp")


def prune_when_told(address: bytes, root: Path) -> RetentionReport:
    """Prunes, once the test says that it watches."""
    test = meet(address)
    test.send("ready")
    wait_for(test)
    return Retention(root, keep_latest=1).prune()


def prune_as_nobody(root: Path) -> RetentionReport:
    """Prunes without the rights of root."""
    as_nobody()
    return Retention(root, keep_latest=1).prune()


def states_in(root: Path) -> dict[int, str]:
    return {folder.step: folder.state for folder in scan_steps(root)}
