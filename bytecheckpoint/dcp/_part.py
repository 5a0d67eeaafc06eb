# SPDX-License-Identifier: Apache-2.0
"""An item of a box that several ranks write together."""

from __future__ import annotations

import dataclasses

from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem

__all__ = ["WritePart"]


@dataclasses.dataclass(frozen=True)
class WritePart(WriteItem):
    """Some rows of a box that several ranks hold, each of which writes a part.

    Attributes:
        held: The whole box. ``tensor_data.chunk`` lies in it.
    """

    held: ChunkStorageMetadata | None = None
