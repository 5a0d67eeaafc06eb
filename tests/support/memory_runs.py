# SPDX-License-Identifier: Apache-2.0
"""Tiers with memory for one test, and what is in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bytecheckpoint import MemoryTier, Tiers, scan_steps
from bytecheckpoint.storage.memory.client import HolderClient
from bytecheckpoint.storage.memory.connection import stop_holder

__all__ = ["in_memory", "tiers"]


def in_memory(tiers: Tiers) -> list[str]:
    return [folder.name for folder in scan_steps(tiers) if folder.tiers.get("memory") == "complete"]


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[Tiers]:
    made = Tiers(memory=MemoryTier(), near=tmp_path / "near")
    HolderClient(made.in_memory).put("started", b"")  # before the first test looks at what it leaves
    yield made
    stop_holder(made.in_memory.rpartition("/")[2])
