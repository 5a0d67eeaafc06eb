# SPDX-License-Identifier: Apache-2.0
"""Makes tensors of which a process holds only parts, and checkpoints with gaps, as saves before 0.2 left them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from bytecheckpoint import BcpWriter, Config
from bytecheckpoint.dcp._save_steps import SaveOptions
from bytecheckpoint.tensors.chunks import LocalChunks

__all__ = ["PARTIAL", "UncheckedWriter", "gap_of", "rows", "save_incomplete"]

PARTIAL = Config(allow_partial_tensors=True)


def rows(begin: int, end: int, *, of: int = 8, value: float | None = None) -> LocalChunks:
    """Returns rows [begin, end) of a matrix with two columns, which holds 0, 1, 2, ... unless ``value`` is given."""
    whole = torch.arange(2 * of, dtype=torch.float32).view(of, 2)
    part = whole[begin:end].clone() if value is None else torch.full((end - begin, 2), value)
    return LocalChunks((of, 2), [(begin, 0)], [part], torch.float32)


def gap_of(begin: int, end: int, *, of: int = 8, name: str = "w") -> str:
    """Returns the message about rows [begin, end) that no rank has."""
    return f"'{name}': rows {begin} to {end - 1} of {of} are in no chunk"


class _Unchecked(SaveOptions):
    def gaps_of(self, session: Any) -> str:
        return "ignore"


class UncheckedWriter(BcpWriter):
    """Commits a checkpoint even if it has gaps."""

    @property
    def _options(self) -> SaveOptions:
        return _Unchecked(**vars(super()._options))


def save_incomplete(path: Path, state: dict[str, Any] | None = None) -> None:
    """Saves ``state`` without a check for gaps; by default a state with only the first half of ``w``."""
    state = {"w": rows(0, 4), "other": torch.ones(3)} if state is None else state
    writer = UncheckedWriter(path, sync_files=False, config=Config(planning="as given"))
    dcp.save(state, storage_writer=writer, no_dist=True)
