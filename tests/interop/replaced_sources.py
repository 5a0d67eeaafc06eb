# SPDX-License-Identifier: Apache-2.0
"""Sources of every format that are replaced while somebody reads them."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from bytecheckpoint import save_state_dict

KEYS = [f"w{number}" for number in range(4)]
NUMEL = 100_000


def values(step: int) -> dict[str, torch.Tensor]:
    """Returns the tensors of a step, which have the names and shapes of those of every other one."""
    return {key: torch.full((NUMEL,), float(step)) for key in KEYS}


def write(kind: str, path: Path, step: int) -> None:
    """Writes the source of a step over that of another one."""
    if kind == "bcp":
        save_state_dict(path, values(step), no_dist=True)
    elif kind == "dcp":
        dcp.save(values(step), storage_writer=dcp.FileSystemWriter(path, overwrite=True), no_dist=True)
    elif kind == "safetensors":
        path.mkdir(exist_ok=True)
        halves = [KEYS[:2], KEYS[2:]]
        for number, keys in enumerate(halves, 1):
            of_step = {key: value for key, value in values(step).items() if key in keys}
            save_file(of_step, path / f"model-{number:05}-of-00002.safetensors")
    else:
        torch.save(values(step), path)
