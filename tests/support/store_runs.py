# SPDX-License-Identifier: Apache-2.0
"""Runs in a store in memory: what tests save there, and what they find."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from bytecheckpoint import BcpWriter, load_state_dict, save_state_dict, scan_steps
from bytecheckpoint.storage.object_store.client import StoreClient

__all__ = ["copy_ranks", "loaded", "names", "save", "states"]


def save(root: str, *steps: int) -> None:
    """Saves each step into a folder of its own, with values from which it is known again."""
    for step in steps:
        save_state_dict(f"{root}/step-{step}", {"w": torch.full((1000,), float(step)), "step": step})


def loaded(url: str) -> int:
    """Returns the step of the checkpoint there, after all its values were compared."""
    found = {"w": torch.zeros(1000), "step": 0}
    load_state_dict(url, found)
    assert (found["w"] == found["step"]).all()
    return int(found["step"])


def states(root: str) -> dict[int, str]:
    """Returns the state of each step folder."""
    return {folder.step: folder.state for folder in scan_steps(root)}


def names(client: StoreClient) -> set[str]:
    """Returns the names of all objects below the URL of ``client``."""
    return {each.name for each in client.everything("")}


def copy_ranks(client: StoreClient, folder: Path, name: str) -> None:
    """Puts a checkpoint there whose only rank has committed by itself, which cannot be saved there."""
    dcp.save({"w": torch.ones(1000)}, storage_writer=BcpWriter(folder), use_collectives=False, no_dist=True)
    for file in filter(Path.is_file, folder.iterdir()):
        client.put(f"{name}/{file.name}", file.read_bytes())
