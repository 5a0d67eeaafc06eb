# SPDX-License-Identifier: Apache-2.0
"""The names of step folders, and which of them a run folder has. Needs no torch."""

from __future__ import annotations

import os
import re

from bytecheckpoint.errors import ConfigError, StorageError
from bytecheckpoint.local_path import local_path

__all__ = ["DEFAULT_PATTERN", "MOST_DIGITS", "compile_pattern", "step_number", "step_paths"]

MOST_DIGITS = 18  # of a step: what an int64 holds
DEFAULT_PATTERN = r"(?:(?:global_)?step[-_]?|checkpoint[-_]?)?(\d+)"


def step_paths(
    root: str | os.PathLike[str], pattern: str | None = None, *, follow_links: bool = False
) -> list[tuple[int, str]]:
    """The step folders of a run folder, by step, then by name; nothing in them is looked at.

    Args:
        follow_links: Also symbolic links, wherever they lead.

    Raises:
        ConfigError, StorageError: As ``scan_steps``.
    """
    expression = compile_pattern(pattern)
    folder = local_path(root)
    try:
        with os.scandir(folder) as entries:
            names = [e.name for e in entries if e.is_dir(follow_symlinks=False) or (follow_links and e.is_symlink())]
    except OSError as error:
        raise StorageError(f"scan_steps({folder}): {error.strerror}", str(folder), error.errno or 0) from error
    numbers = [(step_number(match[1] or ""), name) for name in names if (match := expression.fullmatch(name))]
    return [(step, str(folder / name)) for step, name in sorted((n, name) for n, name in numbers if n is not None)]


def step_number(text: str) -> int | None:
    """The number of a step; None if ``text`` is none, or larger than any run has (``MOST_DIGITS``)."""
    return int(text) if text.isdecimal() and len(text) <= MOST_DIGITS else None


def compile_pattern(pattern: str | None) -> re.Pattern[str]:
    """The expression for names of step folders.

    Raises:
        ConfigError: It is none, or has no group.
    """
    try:
        expression = re.compile(DEFAULT_PATTERN if pattern is None else pattern)
    except re.error as error:
        raise ConfigError(f"pattern={pattern!r}: {error}") from error
    if expression.groups < 1:
        raise ConfigError(f"pattern={pattern!r}: a group around the number of the step wanted")
    return expression
