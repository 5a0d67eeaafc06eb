# SPDX-License-Identifier: Apache-2.0
"""Frames of callers are looked at in one file, and those who need what is seen there are few."""

from __future__ import annotations

import re
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "bytecheckpoint"
FRAMES = re.compile(r"\b(_getframe|_current_frames|f_back|currentframe|inspect\.stack)\b")
LOOKS = re.compile(r"\b(find_calls|is_any_thread_in|is_called_by)\b")


def files_with(pattern: re.Pattern[str]) -> set[str]:
    return {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if pattern.search(path.read_text())}


def test_one_file_looks_at_frames() -> None:
    assert files_with(FRAMES) == {"calls/frames.py"}


def test_one_file_looks_for_calls_of_dcp() -> None:
    assert files_with(LOOKS) == {"calls/frames.py", "calls/of_dcp.py"}
