# SPDX-License-Identifier: Apache-2.0
"""What the journal of a run says of one save: who wrote what, when, and how fast."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bytecheckpoint.errors import StorageError
from bytecheckpoint.observability.journal import find_save
from bytecheckpoint.report.text import utc_text
from bytecheckpoint.storage.folders import folder_at
from bytecheckpoint.storage.journal_files import FOLDER

__all__ = ["SaveRecord", "find_save_record"]

# The checkpoint has the line itself. Older versions wrote it to the run, which is above the step; a part such as
# `model` is below that, and a role may be between.
_MOST_LEVELS = 4


@dataclass(frozen=True)
class SaveRecord:
    """The record of one save.

    Attributes:
        journal: Folder whose journal has it.
        record: The record. Any field may be missing, or be of another type: anybody may have written it.
    """

    journal: str
    record: dict[str, Any]

    @property
    def began(self) -> str | None:
        """When the save began, in UTC."""
        text = utc_text(_number(self.record.get("at")))
        return None if text == "?" else text

    def of_rank(self, rank: int) -> dict[str, Any]:
        """Returns what is known of a rank: ``host``, ``num_bytes``, ``seconds`` of its part, ``write_s``, rates.

        ``write_s`` are the seconds in which threads of the rank wrote, all added up.
        """
        columns = self.record.get("ranks")
        columns = columns if isinstance(columns, dict) else {}
        ranks = columns.get("rank")
        if not isinstance(ranks, list) or rank not in ranks:
            return {}
        row = ranks.index(rank)
        phases = columns.get("phases")
        write_s = _cell(phases if isinstance(phases, dict) else {}, "write", row)
        begin, end = _cell(columns, "arrived_s", row), _cell(columns, "ended_s", row)
        num_bytes = _cell(columns, "num_bytes", row)
        seconds = None if begin is None or end is None else end - begin
        found = {
            "host": self._host(_cell(columns, "host", row)),
            "num_bytes": num_bytes,
            "seconds": seconds,
            "gb_per_s": _rate(num_bytes, seconds),
            "write_s": write_s,
            "write_gb_per_s": _rate(num_bytes, write_s),
        }
        return {name: value for name, value in found.items() if value is not None}

    def _host(self, number: Any) -> str | None:
        hosts = self.record.get("hosts")
        is_one = isinstance(hosts, list) and isinstance(number, int) and 0 <= number < len(hosts)
        return str(hosts[number]) if is_one and isinstance(hosts, list) else None


def find_save_record(path: str, save_id: str, journal: str | None) -> tuple[SaveRecord | None, str]:
    """Looks for a save in the journal of its run.

    Args:
        path: The checkpoint: a step, or a part of one.
        save_id: Id of the save, 32 hex digits.
        journal: The run folder, or the folder of a journal; None looks in the checkpoint and the folders above it.

    Returns:
        The record, and ""; or None, and a sentence that says why there is none.
    """
    if journal is not None:
        folders = [Path(journal)]
    elif not folder_at(path).keeps_journals:
        return None, "no journal is kept beside a URL; --journal names the folder of one"
    else:
        above = [Path(path), *Path(path).parents][:_MOST_LEVELS]
        folders = [folder for folder in above if (folder / FOLDER).is_dir()]
    for folder in folders:
        try:
            record = find_save(folder, save_id)
        except StorageError as error:
            return None, f"the journal of the run cannot be read: {error}"
        if record is not None:
            return SaveRecord(str(folder), record), ""
    if not folders:
        return None, f"there is no journal: no folder {FOLDER} in {path} and the folders above it"
    return None, f"the journal in {folders[-1]} has no record of this save, {save_id}"


def _number(value: Any) -> Any:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _cell(columns: dict[str, Any], name: str, row: int) -> Any:
    column = columns.get(name)
    return _number(column[row]) if isinstance(column, list) and row < len(column) else None


def _rate(num_bytes: float | None, seconds: float | None) -> float | None:
    return None if num_bytes is None or not seconds or seconds < 0 else num_bytes / seconds / 1e9
