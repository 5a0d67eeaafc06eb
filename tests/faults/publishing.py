# SPDX-License-Identifier: Apache-2.0
"""A process that publishes versions which every other one can compute, until it is killed."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

from bytecheckpoint import Publisher

__all__ = ["blank", "is_at", "publish_on", "state_of"]

NUMEL = 20_000


def state_of(version: int) -> dict[str, Any]:
    weights = torch.arange(NUMEL, dtype=torch.float32)
    for changed in range(1, version + 1):
        weights[changed % 97 :: 97] += changed
    return {"weights": weights, "version": version}


def blank() -> dict[str, Any]:
    return {"weights": torch.zeros(NUMEL), "version": -1}


def is_at(state: dict[str, Any], version: int) -> bool:
    wanted = state_of(version)
    return torch.equal(state["weights"], wanted["weights"]) and state["version"] == version


def publish_on(place: str, said: str, first: int, num: int, keep_versions: int = 2) -> None:
    """Publishes ``num`` versions from ``first`` on, and writes each that is published into a file."""
    warnings.simplefilter("ignore")
    publisher = Publisher(place, base_every=2, keep_versions=keep_versions, no_dist=True)
    for version in range(first, first + num):
        publisher.publish(state_of(version), version)
        Path(said).write_text(str(version))
