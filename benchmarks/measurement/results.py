# SPDX-License-Identifier: Apache-2.0
"""The results of one comparison: stored as JSON, read by tables and figures."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CEILING = ("disk-1", "disk-2")
DISK = "disk"
ACTIONS = ("save", "load")


@dataclass
class Comparison:
    """All figures of one run, and the facts needed to interpret them.

    Attributes:
        kind: Kind of the state.
        state: The state in words.
        num_bytes: Bytes of its tensors.
        num_tensors: Their number.
        baseline: The contender that ratios refer to.
        ours: The contender to highlight.
        repetitions: Rounds that were counted.
        command: The command that repeats the run.
        machine: Facts from ``machine.facts``.
        versions: Versions of every compared package.
        labels: Name of each contender in tables.
        left_out: Why contenders are missing.
        seconds: By contender and action (``save`` or ``load``), one figure for each round.
        num_calls: Number of timed calls, including those of the round that does not count.
        busy_starts: Number of calls that began on a machine that was not idle.
        split: Seconds of our own save and load, split by component, from a separate call.
    """

    kind: str
    state: str
    num_bytes: int
    num_tensors: int
    baseline: str
    ours: str
    repetitions: int
    command: str
    machine: dict[str, Any]
    versions: dict[str, Any]
    labels: dict[str, str]
    left_out: dict[str, str]
    seconds: dict[str, dict[str, list[float]]]
    num_calls: int = 0
    busy_starts: int = 0
    split: dict[str, dict[str, float]] = field(default_factory=dict)

    def write(self, file: Path) -> None:
        file.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, file: Path) -> Comparison:
        """Reads a comparison. Raises TypeError if fields are missing or unknown."""
        return cls(**json.loads(file.read_text()))

    def names(self) -> Iterator[str]:
        """Yields contenders in the order of the table. The disk, if it took part, comes last."""
        yield from (name for name in self.seconds if name not in CEILING)
        if all(name in self.seconds for name in CEILING):
            yield DISK

    def label(self, name: str) -> str:
        return "the disk itself" if name == DISK else self.labels[name]

    def all_s(self, name: str, action: str) -> list[float]:
        """Returns seconds by round. For the disk, the faster number of threads counts in each round."""
        if name != DISK:
            return self.seconds[name][action]
        return [min(pair) for pair in zip(*(self.seconds[part][action] for part in CEILING), strict=True)]

    def median_s(self, name: str, action: str) -> float:
        return statistics.median(self.all_s(name, action))

    def gb_per_s(self, name: str, action: str) -> float:
        return self.num_bytes / 1e9 / self.median_s(name, action)

    def ratio(self, name: str, other: str, action: str) -> float | None:
        """Returns how many times as fast as ``other`` it is, from medians, or None if ``other`` took no part."""
        if other not in self.names():
            return None
        return self.median_s(other, action) / self.median_s(name, action)
