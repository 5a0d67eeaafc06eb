# SPDX-License-Identifier: Apache-2.0
"""Reads the journals of a run: one line of JSON for each save, in the folder of its checkpoint.

It skips a line that is not whole, and a line that it has seen before: steps that are removed leave their lines to
others (``storage/journal_files.py``).
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bytecheckpoint.config import Config
from bytecheckpoint.errors import StorageError
from bytecheckpoint.storage.folders import folder_at, known
from bytecheckpoint.storage.journal_files import FOLDER, holds_checkpoint, journal_folders, journal_paths, save_folders
from bytecheckpoint.storage.object_store.save_notes import noted_saves
from bytecheckpoint.storage.paths import location
from bytecheckpoint.storage.small_files import read_head
from bytecheckpoint.storage.unended_saves import unended_saves

__all__ = ["find_save", "read_drains", "read_failures", "read_journal"]

_CALLS = ("save", "load")
_FAILURE = "failure"
_DRAIN = "drain"

_MOST_BYTES = 1 << 30  # of a file: ours have less, and there may be anything
_MOST_TIME = 1e15  # what is larger is no Unix time
# How our lines begin. So most of them need not be parsed where only the newest are wanted.
_BEGIN = re.compile(rb'\{"format": ?\d+, ?"kind": ?"\w+", ?"at": ?(\d{1,12}\.?\d{0,9})[,}]')


def read_journal(run: str | os.PathLike[str], last: int | None = None) -> tuple[list[dict[str, Any]], int]:
    """Returns the records of the saves and loads of a run, the oldest first.

    Args:
        run: Folder of a run; or a checkpoint; or the folder of a journal that ``Config(journal=...)`` named.
        last: How many records to return at most, from the last; None returns all.

    Returns:
        The records, and how many lines were skipped because they are not whole.

    Raises:
        StorageError: The folder cannot be listed. A file of a journal that cannot be read is a warning.
    """
    return _records(Path(run), _CALLS, last)


def read_failures(
    run: str | os.PathLike[str], last: int | None = None, *, config: Config | None = None
) -> list[dict[str, Any]]:
    """Returns the records of the calls of a run that failed, the oldest first, those of saves that died among them.

    A save that was killed has no line in a journal until another save to its folder begins, or a prune removes it.
    Until then its record is made from what it left there.

    In an object store there is no journal, but a note of each such save. There it is not always known whether a save
    of another machine has died: until its deadline its record has ``may_run`` set.

    Args:
        run: As for ``read_journal``; or the URL of a run, or of a checkpoint.
        last: As for ``read_journal``.
        config: Settings for the store; None keeps those that it is known with, else reads ``BYTECHECKPOINT_*``
            variables.

    Raises:
        StorageError: The folder cannot be listed, or the store refused.
        ConfigError: It is no URL of a store that can be listed.
    """
    if folder_at(run).keeps_notes:
        found = sorted(noted_saves(str(known(location(run), config))), key=_began)
        return found if last is None else found[-last:]
    folder = Path(run)
    found = _records(folder, (_FAILURE,), None)[0]
    noted = {record.get("save_id") for record in found}
    for step in save_folders(folder) if folder.is_dir() else ():
        died = [record for record in unended_saves(step) if record["save_id"] not in noted]
        found += [_seen_from(folder, step / FOLDER, record) for record in died]
    found.sort(key=_began)
    return found if last is None else found[-last:]


def read_drains(run: str | os.PathLike[str], last: int | None = None) -> list[dict[str, Any]]:
    """Returns the records of the copies of steps to durable storage, the oldest first.

    One that has ``failed`` says why a step could not be copied, and was to be tried again; one that has ``dropped``,
    why it is not copied any more.

    Args:
        run: As for ``read_journal``: the place that steps are copied from.
        last: As for ``read_journal``.

    Raises:
        StorageError: The folder cannot be listed.
    """
    return _records(Path(run), (_DRAIN,), last)[0]


def _began(record: dict[str, Any]) -> float:
    at = record.get("at")
    return float(at) if isinstance(at, int | float) and abs(at) < _MOST_TIME else 0.0


def find_save(run: str | os.PathLike[str], save_id: str) -> dict[str, Any] | None:
    """Returns the record of one save; None if the journal has none. Other lines are read, but not parsed.

    Args:
        run: As for ``read_journal``.
        save_id: Id of the save, 32 hex digits.

    Raises:
        StorageError: The folder cannot be listed.
    """
    for folder in journal_folders(Path(run)):
        for line in reversed([*_lines_of(folder)]):
            record = _parsed(line) if save_id.encode() in line else None
            if record is not None and record["kind"] == "save" and record.get("save_id") == save_id:
                return record
    return None


def _records(run: Path, kinds: tuple[str, ...], last: int | None) -> tuple[list[dict[str, Any]], int]:
    """Returns the newest records of a run, the oldest first, and how many lines were skipped on the way."""
    lines: list[tuple[float, Path, bytes]] = []
    for folder in journal_folders(run):
        at = 0.0
        for line in _lines_of(folder):
            at = _time_of(line, at)
            lines.append((at, folder, line))
    lines.sort(key=lambda each: each[0])
    found: dict[object, dict[str, Any]] = {}
    num_skipped = 0
    for _, folder, line in reversed(lines):
        if kinds in ((_FAILURE,), (_DRAIN,)) and kinds[0].encode() not in line:
            continue  # most lines are of saves, and long
        record = _parsed(line)
        if record is None:
            num_skipped += bool(line.strip())
        elif record["kind"] in kinds:
            found.setdefault(_identity(record), _seen_from(run, folder, record))
            if len(found) == last:
                break
    return [*found.values()][::-1], num_skipped


def _time_of(line: bytes, before: float) -> float:
    """Returns when the call of a line began; of a line that does not say it, that of the line ``before``."""
    begin = _BEGIN.match(line)
    if begin is not None:
        return float(begin[1])
    record = _parsed(line)
    at = None if record is None else record.get("at")
    return float(at) if isinstance(at, int | float) and abs(at) < _MOST_TIME else before


def _identity(record: dict[str, Any]) -> object:
    """Returns what a record has in common with copies of it, and with no other record."""
    save_id = record.get("save_id")
    if record["kind"] == "save" and isinstance(save_id, str) and save_id:
        return save_id, repr(record.get("at"))
    if record["kind"] == _FAILURE and isinstance(save_id, str) and save_id:
        return _FAILURE, save_id
    if record["kind"] == _FAILURE:
        return repr(record.get("path")), repr(record.get("at"))
    if record["kind"] == _DRAIN:
        return _DRAIN, repr(record.get("path")), repr(record.get("at"))
    return id(record)  # a load: two may be alike, and no load is ever copied


def _seen_from(run: Path, folder: Path, record: dict[str, Any]) -> dict[str, Any]:
    """Returns a record with the path of its checkpoint relative to ``run``, if it lies in the checkpoint itself.

    What a save calls its run may be above the folder that is read, which may be a checkpoint, or below it.
    """
    path = record.get("path")
    if folder == run or not isinstance(path, str):
        return record
    here = os.path.relpath(folder.parent, run)
    if here == ".":
        is_own = os.path.basename(path) == run.resolve().name and holds_checkpoint(run)  # noqa: PTH119
    else:
        is_own = f"/{here}".endswith(f"/{path}") or f"/{path}".endswith(f"/{here}")
    return {**record, "path": here} if is_own and path != here else record


def _lines_of(folder: Path) -> Iterator[bytes]:
    """Yields the lines of a journal, the oldest first. A file that cannot be read is a warning: there are others."""
    for path in reversed(journal_paths(folder)):
        try:
            content = read_head(path, _MOST_BYTES)
        except StorageError as error:
            warnings.warn(f"a journal is left out: {error}", RuntimeWarning, stacklevel=2)
            continue
        yield from (content or b"").splitlines()


def _parsed(line: bytes) -> dict[str, Any] | None:
    """Returns the record of a line; None if it is none that this version knows."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_ours = isinstance(record, dict) and isinstance(record.get("format"), int)
    return record if is_ours and record.get("kind") in (*_CALLS, _FAILURE, _DRAIN) else None
