# SPDX-License-Identifier: Apache-2.0
"""``CheckpointReport``: what ``bytecheckpoint.save`` has saved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bytecheckpoint.report import SaveReport

__all__ = ["CheckpointReport"]


@dataclass(frozen=True, kw_only=True)
class CheckpointReport:
    """What was saved.

    Attributes:
        path: Folder of the parts; pass it to ``load``.
        parts: Report of each part, by name, in the order in which they were committed.
    """

    path: str
    parts: Mapping[str, SaveReport]

    def __str__(self) -> str:
        return self.summary()

    def summary(self) -> str:
        """Returns one line for each part, for people."""
        return "\n".join(report.summary() for report in self.parts.values())
