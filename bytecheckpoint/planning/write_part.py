# SPDX-License-Identifier: Apache-2.0
"""The item of a box that several ranks write together."""

from __future__ import annotations

import dataclasses

from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem

__all__ = ["WritePart"]


@dataclasses.dataclass(frozen=True)
class WritePart(WriteItem):
    """Some rows of a box. Several ranks hold the box, and each writes a part of it.

    Attributes:
        held: The whole box. ``tensor_data.chunk`` lies in it.
    """

    held: ChunkStorageMetadata | None = None
