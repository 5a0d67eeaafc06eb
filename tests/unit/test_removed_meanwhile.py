# SPDX-License-Identifier: Apache-2.0
"""A checkpoint that another process prunes while it is read is said to be removed, not damaged."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from bytecheckpoint import BcpLoadPlanner, load_state_dict, save_state_dict, verify
from bytecheckpoint.errors import CheckpointNotFoundError

PRUNE = "import sys; from bytecheckpoint import Retention; Retention(sys.argv[1], keep_latest=1).prune()"


def prune_elsewhere(run: Path) -> None:
    """Prunes in another process, which does not know who reads here, as on another machine."""
    subprocess.run([sys.executable, "-c", PRUNE, str(run)], check=True)


class Pruned(BcpLoadPlanner):
    """Prunes after the metadata are read, and before the tensors are."""

    def __init__(self, run: Path) -> None:
        super().__init__()
        self.run = run

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        prune_elsewhere(self.run)
        return plan


def test_a_load(tmp_path: Path) -> None:
    state = {"a": torch.ones(5000), "object": {1, 2}}
    for step in (1, 2):
        save_state_dict(tmp_path / f"step_{step}", state)
    with pytest.raises((CheckpointNotFoundError, CheckpointException)) as caught:
        load_state_dict(tmp_path / "step_1", state, planner=Pruned(tmp_path))
    assert isinstance(caught.value, CheckpointNotFoundError), caught.value
    assert "the checkpoint was removed while it was read, such as by a prune of another process" in str(caught.value)
    assert not verify(tmp_path / "step_2").problems
