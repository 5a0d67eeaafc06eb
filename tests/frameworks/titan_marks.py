# SPDX-License-Identifier: Apache-2.0
"""The mark of tests that need a newer torch."""

from __future__ import annotations

import pytest

from bytecheckpoint.probes.of_torchtitan import TRAINER

__all__ = ["needs_trainer"]

needs_trainer = pytest.mark.skipif(
    bool(TRAINER.fault()),
    reason=f"torchtitan's trainer cannot be imported with this torch: {TRAINER.path}: {TRAINER.fault()}. "
    "OUR CHECKPOINT MANAGER IS NOT TESTED",
)
