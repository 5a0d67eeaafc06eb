# SPDX-License-Identifier: Apache-2.0
"""What ranks save to be reported, and what is logged of it."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["logged", "state"]


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def logged() -> list[str]:
    """All that this process logs from now on."""
    handler = Lines()
    logger = logging.getLogger("bytecheckpoint")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    return handler.lines


def state() -> dict[str, Any]:
    """Of each rank a tensor of its own size, and one that all have."""
    rank = dist.get_rank()
    return {f"of {rank}": torch.full(((rank + 1) * 1000, 100), rank), "shared": torch.arange(100_000)}
