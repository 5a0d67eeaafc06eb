# SPDX-License-Identifier: Apache-2.0
"""The names of step folders, and of the run that they are of. Nothing is looked at. Needs no torch."""

from __future__ import annotations

import re

from bytecheckpoint.errors import ConfigError
from bytecheckpoint.storage.paths import Place, as_place, name_of, parent_of

__all__ = [
    "DEFAULT_PATTERN",
    "MOST_DIGITS",
    "compile_pattern",
    "is_step_name",
    "run_and_step",
    "run_of",
    "step_number",
    "what_it_counts",
]

MOST_DIGITS = 18  # of a step, so that it fits into an int64
DEFAULT_PATTERN = r"(?:(?:global_)?step[-_]?|checkpoint[-_]?|iter_|epoch_|ep\d+-ba)?(\d+)"
# What their numbers count, which differs by the name.
_COUNTS = {"iter_": "iterations", "epoch_": "epochs", "ep": "batches"}


def step_number(text: str) -> int | None:
    """Returns the number of a step; None if ``text`` is not a number, or has more than ``MOST_DIGITS`` digits."""
    return int(text) if text.isdecimal() and len(text) <= MOST_DIGITS else None


def compile_pattern(pattern: str | None) -> re.Pattern[str]:
    """Compiles the regular expression for names of step folders; None takes ``DEFAULT_PATTERN``.

    Raises:
        ConfigError: ``pattern`` is not a regular expression, or has no group.
    """
    try:
        expression = re.compile(DEFAULT_PATTERN if pattern is None else pattern)
    except re.error as error:
        raise ConfigError(f"pattern={pattern!r}: {error}") from error
    if expression.groups < 1:
        raise ConfigError(f"pattern={pattern!r}: must have a group around the number of the step")
    return expression


def is_step_name(name: str) -> bool:
    """Whether a folder of that name is taken for a step where nobody says how steps are called."""
    return _DEFAULT.fullmatch(name) is not None


def what_it_counts(name: str) -> str:
    """Returns what the number in the name of a step folder counts: names of one run all count the same."""
    return next((counts for begin, counts in _COUNTS.items() if name.startswith(begin)), "steps")


def run_and_step(path: str) -> tuple[Place | None, int | None]:
    """Returns the folder of the run that a checkpoint is a step of, or a part of a step, and the step; else None.

    Looks at the path or URL alone.
    """
    here = as_place(path)
    for folder in (here, parent_of(here)):
        match = _DEFAULT.fullmatch(name_of(folder))
        step = None if match is None else step_number(match[1] or "")
        if step is not None and parent_of(folder) != folder:
            return parent_of(folder), step
    return None, None


def run_of(path: str) -> str:
    """Returns the folder of the run that a checkpoint is a step of, or a part of a step; else the one that it is in."""
    run, _ = run_and_step(path)
    return str(parent_of(as_place(path)) if run is None else run)


_DEFAULT = re.compile(DEFAULT_PATTERN)
