# SPDX-License-Identifier: Apache-2.0
"""Holds the saves of ``bytecheckpoint.save`` at a part, or has them fail there."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from bytecheckpoint import BcpWriter
from bytecheckpoint.training_state import saving

__all__ = ["Gate"]

_LIMIT_S = 60.0


class Gate:
    """Before a part of a save is written, in this process.

    Args:
        part: Name of it.
        error: Raised there, instead of a wait.

    Attributes:
        arrived: Set when a save has come there.
        go_on: To be set by the test.
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
        """Lets the save go on, and later ones through."""
        monkeypatch.setattr(saving, "BcpWriter", BcpWriter)
        self.go_on.set()
