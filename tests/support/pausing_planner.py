# SPDX-License-Identifier: Apache-2.0
"""A planner that holds a save up until the test lets it go on."""

from __future__ import annotations

import threading
from typing import Any

from torch.distributed.checkpoint.planner import WriteItem

from bytecheckpoint import BcpSavePlanner

__all__ = ["PausingPlanner"]

_LIMIT_S = 60.0


class PausingPlanner(BcpSavePlanner):
    """Stops before it hands over the first value: by then this rank's file is there.

    Attributes:
        arrived: Set when it has stopped.
        go_on: To be set by the test.
    """

    def __init__(self) -> None:
        super().__init__()
        self.arrived = threading.Event()
        self.go_on = threading.Event()

    def resolve_data(self, write_item: WriteItem) -> Any:
        self.arrived.set()
        assert self.go_on.wait(_LIMIT_S)
        return super().resolve_data(write_item)
