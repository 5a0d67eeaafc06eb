# SPDX-License-Identifier: Apache-2.0
"""The state that ranks save in tests of reports, and the lines that are logged."""

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
    """Returns a list that receives all lines that this package logs from now on in this process."""
    handler = Lines()
    logger = logging.getLogger("bytecheckpoint")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    return handler.lines


def state() -> dict[str, Any]:
    """Returns a tensor of this rank, with a size of its own, and one that all ranks have."""
    rank = dist.get_rank()
    return {f"of {rank}": torch.full(((rank + 1) * 1000, 100), rank), "shared": torch.arange(100_000)}
