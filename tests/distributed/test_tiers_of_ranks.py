# SPDX-License-Identifier: Apache-2.0
"""Ranks that pass different tiers, or different arguments to a save to them: all hear so, and nobody waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks

import bytecheckpoint
from bytecheckpoint import MemoryTier, Tiers
from bytecheckpoint.dcp import near_disks
from bytecheckpoint.errors import ConfigError, StorageError


def outcome_of_save(folder: str, differs: str) -> str:
    odd = dist.get_rank() == 1
    memory = MemoryTier(name=f"of {folder}", linger_s=0.0) if differs != "tiers" or odd else None
    tiers = Tiers(memory=memory, near=folder)
    options: dict[str, Any] = {"overwrite": False} if differs == "overwrite" and odd else {}
    try:
        bytecheckpoint.save_state_dict(tiers / "step-1", {"w": torch.ones(8)}, **options)
    except ConfigError as error:
        return str(error)
    finally:
        bytecheckpoint.shutdown()
    return ""


@pytest.mark.parametrize("differs", ["overwrite", "tiers"])
def test_ranks_that_differ_are_told(differs: str, tmp_path: Path) -> None:
    texts = run_ranks(2, outcome_of_save, str(tmp_path / "run"), differs)
    assert texts[0] == texts[1]
    assert f"{differs} is " in texts[0]
    assert "on rank 1: it must be the same on all ranks" in texts[0]
    assert not (tmp_path / "run").exists()


def outcome_with_a_disk_that_is_not_mounted(folder: str) -> str:
    if dist.get_rank() == 0:
        near_disks._disk_at = lambda near, makes: ""  # storage that machines share
    try:
        bytecheckpoint.save_state_dict(Tiers(near=folder) / "step-1", {"w": torch.ones(8)})
    except StorageError as error:
        return str(error)
    return ""


def test_shared_storage_that_is_not_mounted_everywhere_is_refused(tmp_path: Path) -> None:
    for text in run_ranks(2, outcome_with_a_disk_that_is_not_mounted, str(tmp_path / "run")):
        assert "share on rank 0, and a disk of one machine on rank 1: it may not be mounted there" in text
