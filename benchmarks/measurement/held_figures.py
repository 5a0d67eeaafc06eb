# SPDX-License-Identifier: Apache-2.0
"""The figures of a run of all benchmarks as series by name, and whether one series is worse than another."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# Contenders that are not ours. The first of them that took part is what the others are divided by: all of them met the
# same machine in the same rounds.
YARDSTICKS = ("disk-2", "disk, reading and writing", "dcp-2", "dcp-thread")
OTHERS = ("dcp", "disk", "stock", "torch.save", "no save")
# Parts of a report without series: facts, one call's split, and series of which the largest count, not the median.
LEFT_OUT = {"machine", "versions", "split", "gap_ms", "gap_without_core_ms", "loop_slowdown", "training_slowdown"}
# Numbers that were chosen, not measured. Under the same keys some scripts have tables of what they measured.
SETTINGS = {"bytes", "num_bytes", "num_tensors", "repetitions", "num_calls", "busy_starts", "ranks", "tensors"}
SETTINGS |= {"tensor_bytes", "dim", "saves"}
MOST_RESAMPLES = 400
# Standard errors that a change must exceed, and the part by which it must at least differ.
ERRORS, LEAST_CHANGE = 3.0, 0.03

Path = tuple[str, ...]


def series_of(figures: Mapping[str, Any]) -> dict[Path, list[float]]:
    """Returns every measured series of a script's JSON, by its keys from the top. Less is better in all of them."""

    def walk(value: Any, path: Path) -> Iterator[tuple[Path, list[float]]]:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                if key not in LEFT_OUT and not (key in SETTINGS and _is_number(inner)):
                    yield from walk(inner, (*path, str(key)))
        elif isinstance(value, list) and value and all(_is_number(each) for each in value):
            yield path, [float(each) for each in value]
        elif isinstance(value, list):
            for number, inner in enumerate(value):
                yield from walk(inner, (*path, _label(inner, number)))
        elif _is_number(value):
            yield path, [float(value)]

    return {path: values for path, values in walk(figures, ()) if min(values) > 0}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _label(value: Any, number: int) -> str:
    """Returns what tells an entry of a list from the others: its texts and settings, or else its place."""
    if not isinstance(value, Mapping):
        return str(number)
    words = [
        str(each) for key, each in value.items() if isinstance(each, str) or (key in SETTINGS and _is_number(each))
    ]
    return " ".join(words) or str(number)


def is_ours(path: Path) -> bool:
    return not any(part.startswith(OTHERS) or "DCP" in part for part in path)


def against_yardstick(path: Path, series: Mapping[Path, list[float]]) -> tuple[list[float], str]:
    """Returns a series divided by that of a contender which is not ours, and its name; "" if there is none."""
    for place in range(len(path)):
        for yardstick in YARDSTICKS:
            other = (*path[:place], yardstick, *path[place + 1 :])
            if other != path and other in series:
                values, by = series[path], series[other]
                if len(by) == len(values):
                    return [mine / its for mine, its in zip(values, by, strict=True)], yardstick
                return [mine / statistics.median(by) for mine in values], yardstick
    return series[path], ""


@dataclass(frozen=True)
class Change:
    """How the median of a series has changed.

    Attributes:
        old: The median before.
        new: The median now.
        noise: The part by which the medians are unsure, from how both series scatter; None for single figures.
    """

    old: float
    new: float
    noise: float | None

    @property
    def part(self) -> float:
        """The change, as a part of ``old``; above zero is worse."""
        return self.new / self.old - 1.0

    @property
    def verdict(self) -> str:
        """``worse``, ``better`` or ``same``; "" for single figures, of which nobody knows how they scatter."""
        if self.noise is None:
            return ""
        limit = max(ERRORS * self.noise, LEAST_CHANGE)
        return "worse" if self.part > limit else "better" if -self.part > limit else "same"


def change(old: list[float], new: list[float]) -> Change:
    """Compares two series."""
    noise = None if min(len(old), len(new)) < 3 else math.hypot(_error(old), _error(new))
    return Change(statistics.median(old), statistics.median(new), noise)


def _error(values: list[float]) -> float:
    """Returns the standard error of the median, as a part of it: how medians of samples of the values scatter."""
    draw = random.Random(1)
    medians = [statistics.median(draw.choices(values, k=len(values))) for _ in range(MOST_RESAMPLES)]
    return statistics.stdev(medians) / statistics.median(values)
