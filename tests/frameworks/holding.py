# SPDX-License-Identifier: Apache-2.0
"""Stops the saves of ``bytecheckpoint.save`` before they write a chosen part, or makes them fail there."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from bytecheckpoint import BcpWriter
from bytecheckpoint.training_state import saving

__all__ = ["Gate"]

_LIMIT_S = 60.0


class Gate:
    """Stops a save of this process before it writes one part.

    Args:
        part: Name of the part.
        error: Raised at that point, instead of waiting.

    Attributes:
        arrived: Set when a save has reached that point.
        go_on: The test sets it to let the save continue.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, part: str, error: Exception | None = None) -> None:
        self.arrived, self.go_on = threading.Event(), threading.Event()
        gate = self

        class Gated(BcpWriter):
            def prepare_local_plan(self, plan: Any) -> Any:
                if self.path.name == part:
                    gate.arrived.set()
                    if error is not None:
                        raise error
                    assert gate.go_on.wait(_LIMIT_S)
                return super().prepare_local_plan(plan)

        monkeypatch.setattr(saving, "BcpWriter", Gated)

    def open(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Lets the save continue, and does not stop later ones."""
        monkeypatch.setattr(saving, "BcpWriter", BcpWriter)
        self.go_on.set()
