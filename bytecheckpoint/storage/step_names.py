# SPDX-License-Identifier: Apache-2.0
"""The names of step folders, and the step folders that a run folder has. Needs no torch."""

from __future__ import annotations

import os
import re
from pathlib import Path

from bytecheckpoint.errors import ConfigError
from bytecheckpoint.storage.folders import folder_at, known
from bytecheckpoint.storage.paths import below, location

__all__ = ["DEFAULT_PATTERN", "MOST_DIGITS", "compile_pattern", "run_and_step", "run_of", "step_number", "step_paths"]

MOST_DIGITS = 18  # of a step, so that it fits into an int64
DEFAULT_PATTERN = r"(?:(?:global_)?step[-_]?|checkpoint[-_]?)?(\d+)"


def step_paths(
    root: str | os.PathLike[str], pattern: str | None = None, *, follow_links: bool = False
) -> list[tuple[int, str]]:
    """Returns step and path of all step folders of a run folder, sorted by step, then by name. It does not look inside.

    Args:
        root: Folder of a run.
        pattern: See ``scan_steps``.
        follow_links: Whether to return symbolic links, too, wherever they lead.

    Raises:
        ConfigError: See ``scan_steps``.
        StorageError: See ``scan_steps``.
    """
    expression = compile_pattern(pattern)
    folder = known(location(root))
    names = folder_at(folder).folders(follow_links=follow_links)
    numbers = [(step_number(match[1] or ""), name) for name in names if (match := expression.fullmatch(name))]
    return [
        (step, str(below(folder, name))) for step, name in sorted((n, name) for n, name in numbers if n is not None)
    ]


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


def run_and_step(path: str) -> tuple[Path | None, int | None]:
    """Returns the folder of the run that a checkpoint is a step of, or a part of a step, and the step; else None.

    Looks at the path alone, and at no URL.
    """
    if "://" in path:
        return None, None
    for folder in (Path(path), Path(path).parent):
        match = _DEFAULT.fullmatch(folder.name)
        step = None if match is None else step_number(match[1] or "")
        if step is not None:
            return folder.parent, step
    return None, None


def run_of(path: str) -> str:
    """Returns the folder of the run that a checkpoint is a step of, or a part of a step; else the one that it is in."""
    run, _ = run_and_step(path)
    return os.path.dirname(path) if run is None else str(run)  # noqa: PTH120


_DEFAULT = re.compile(DEFAULT_PATTERN)
