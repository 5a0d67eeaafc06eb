# SPDX-License-Identifier: Apache-2.0
"""A planner that stops a save until the test lets it continue."""

from __future__ import annotations

import threading
from typing import Any

from torch.distributed.checkpoint.planner import WriteItem

from bytecheckpoint import BcpSavePlanner

__all__ = ["PausingPlanner"]

_LIMIT_S = 60.0


class PausingPlanner(BcpSavePlanner):
    """Stops before it returns the first value. By then the file of this rank exists.

    Attributes:
        arrived: Set when the planner has stopped.
        go_on: The test sets it to let the save continue.
    """

    def __init__(self) -> None:
        super().__init__()
        self.arrived = threading.Event()
        self.go_on = threading.Event()

    def resolve_data(self, write_item: WriteItem) -> Any:
        self.arrived.set()
        assert self.go_on.wait(_LIMIT_S)
        return super().resolve_data(write_item)
