# SPDX-License-Identifier: Apache-2.0
"""What a run folder tells about its saves and loads: the journal, and what the disk was measured to do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bytecheckpoint.observability.journal import FOLDER, read_journal

__all__ = ["Run", "holds_steps", "journal_files", "journal_folder", "read_run"]


@dataclass(frozen=True)
class Run:
    """The records of a run.

    Attributes:
        path: The run folder; or a folder that ``Config(journal=...)`` named, which holds nothing but a journal.
        records: Records of saves and loads, oldest first.
        num_skipped: Number of lines that are torn, or no records.
        disk: What ``bcp bench disk`` measured there; None if it was not run.
    """

    path: Path
    records: tuple[dict[str, Any], ...]
    num_skipped: int = 0
    disk: Mapping[str, Any] | None = None


def holds_steps(run: Path) -> bool:
    """Whether the paths of the records are relative to the folder. If not, it holds nothing but a journal."""
    return (run / FOLDER).is_dir()


def journal_folder(run: Path) -> Path:
    """Returns the folder in which the files of the journal are, or would be."""
    return run / FOLDER if holds_steps(run) else run


def journal_files(run: Path) -> list[Path]:
    """Returns the files of the journal; none if there is no journal."""
    return sorted(journal_folder(run).glob("journal*.jsonl"))


def read_run(path: Path, *, last: int | None = None, since: int | None = None) -> Run:
    """Reads the journal of a run folder.

    Args:
        path: The run folder.
        last: How many of the newest records to take; None takes all of them.
        since: First step to take; records without a step are left out. None takes all of them.

    Raises:
        StorageError: A file of the journal cannot be read.
    """
    found, num_skipped = read_journal(path, last if since is None else None)
    records = [record for record in found if _has_time(record)]
    num_skipped += len(found) - len(records)
    if since is not None:
        records = [record for record in records if isinstance(record.get("step"), int) and record["step"] >= since]
    records.sort(key=lambda record: float(record["at"]))
    return Run(path, tuple(records if last is None else records[-last:]), num_skipped, _disk(path))


def _has_time(record: Mapping[str, Any]) -> bool:
    at = record.get("at")
    return isinstance(at, int | float) and not isinstance(at, bool) and 0 <= at < 1e12


def _disk(path: Path) -> Mapping[str, Any] | None:
    try:
        disk = json.loads((journal_folder(path) / "disk.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return disk if isinstance(disk, dict) else None
