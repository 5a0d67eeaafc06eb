# SPDX-License-Identifier: Apache-2.0
"""Saves to ``Tiers``, and looks at what is in their places."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bytecheckpoint import SaveReport, Tiers, load_state_dict, read, save_state_dict
from bytecheckpoint.checkpoint.tier_drains import drain_of

__all__ = ["BIG", "LIMIT_S", "loaded", "save", "state_of", "tiers", "value_at", "wait_until"]

LIMIT_S = 60.0
BIG = 16 << 20  # elements of eight slots


def state_of(value: float, numel: int = 1000) -> dict[str, Any]:
    return {"w": torch.full((numel,), float(value))}


def save(tiers: Tiers, step: int, value: float | None = None, numel: int = 1000) -> SaveReport:
    return save_state_dict(tiers / f"step-{step}", state_of(value or float(step), numel), no_dist=True)


def value_at(path: str | os.PathLike[str]) -> float:
    (value,) = set(read(path)["w"].tolist())
    return float(value)


def loaded(tiers: Tiers, step: int) -> tuple[float, str]:
    state = state_of(0)
    report = load_state_dict(tiers / f"step-{step}", state, no_dist=True)
    return float(state["w"][0]), report.path


def wait_until(holds: Any) -> None:
    end = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[Tiers]:
    made = Tiers(near=tmp_path / "near", durable=tmp_path / "durable")
    yield made
    found = drain_of(f"{made.near}/step-1")
    if found is not None:
        found[0].stop()
        found[0].wait(time.monotonic() + LIMIT_S)
