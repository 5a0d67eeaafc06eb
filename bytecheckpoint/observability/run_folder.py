# SPDX-License-Identifier: Apache-2.0
"""What a run folder tells about its saves and loads: the journals in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bytecheckpoint.findings.figures import text_of
from bytecheckpoint.observability.journal import read_drains, read_failures, read_journal
from bytecheckpoint.observability.whole_calls import of_newest_calls, part_of, whole_calls
from bytecheckpoint.storage.journal_files import FOLDER, journal_folders, journal_paths

__all__ = ["Run", "holds_steps", "journal_files", "page_folder", "read_run", "trace_folders"]


@dataclass(frozen=True)
class Run:
    """The records of a run.

    Attributes:
        path: The run folder; or a folder that ``Config(journal=...)`` named, which holds nothing but a journal.
        records: Records of saves and loads, oldest first.
        num_skipped: Number of lines that are torn, or no records.
        failures: Records of calls that failed, oldest first.
        drains: Records of copies to durable storage, oldest first.
    """

    path: Path
    records: tuple[dict[str, Any], ...]
    num_skipped: int = 0
    failures: tuple[dict[str, Any], ...] = ()
    drains: tuple[dict[str, Any], ...] = ()


def holds_steps(run: Path) -> bool:
    """Whether the paths of the records are relative to the folder. If not, it holds nothing but a journal."""
    return not any(path.exists() for path in journal_paths(run))


def page_folder(run: Path) -> Path | None:
    """Returns the folder in which the page of a run is written if nobody says where; None if there is none.

    A folder between the steps is not made for it.
    """
    if not holds_steps(run):
        return run
    return run / FOLDER if (run / FOLDER).is_dir() else None


def journal_files(run: Path) -> list[Path]:
    """Returns the files of the journals of a run; none if there is no journal.

    Raises:
        StorageError: The folder cannot be listed.
    """
    return [path for folder in journal_folders(run) for path in journal_paths(folder) if path.exists()]


def trace_folders(run: Path, record: Mapping[str, Any]) -> list[Path]:
    """Returns the folders of journals beside which traces of a call may be."""
    path = text_of(record, "path")
    own = [] if not path or "://" in path or "\0" in path else [run / path / FOLDER]
    return [run, run / FOLDER, *own]


def read_run(path: Path, *, last: int | None = None, since: int | None = None) -> Run:
    """Reads the journal of a run folder.

    Args:
        path: The run folder.
        last: How many of the newest saves and loads to take, each with all its parts; None takes all of them.
        since: First step to take; records without a step are left out. None takes all of them.

    Raises:
        StorageError: A file of the journal cannot be read.
    """
    found, num_skipped = _newest(path, last if since is None else None)
    records = [record for record in found if _has_time(record)]
    num_skipped += len(found) - len(records)
    records.sort(key=lambda record: float(record["at"]))
    records, failures, drains = (
        [record for record in each if _has_time(record) and (since is None or _is_since(record, since))]
        for each in (records, read_failures(path, last), read_drains(path, last))
    )
    newest = tuple(records if last is None else of_newest_calls(records, last))
    return Run(path, newest, num_skipped, tuple(failures), tuple(drains))


def _is_since(record: Mapping[str, Any], since: int) -> bool:
    step = record.get("step")
    return isinstance(step, int) and step >= since


def _newest(path: Path, last: int | None) -> tuple[list[dict[str, Any]], int]:
    """Returns at least the records of the ``last`` newest calls, and how many lines were skipped on the way."""
    most = last
    while True:
        found, num_skipped = read_journal(path, most)
        num_found = len({*whole_calls(found)})
        # The oldest of them may lack parts, which are in lines before it.
        is_enough = last is None or num_found > last or (num_found == last and not part_of(found[0]))
        if is_enough or most is None or len(found) < most:
            return found, num_skipped
        most *= 2


def _has_time(record: Mapping[str, Any]) -> bool:
    at = record.get("at")
    return isinstance(at, int | float) and not isinstance(at, bool) and 0 <= at < 1e12
