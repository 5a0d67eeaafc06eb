# SPDX-License-Identifier: Apache-2.0
"""Lines of the journal about the copies of steps from a near place to a durable one. Needs no torch."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

from bytecheckpoint.checkpoint.copying import CopyReport
from bytecheckpoint.config import Config
from bytecheckpoint.storage.folders import folder_at
from bytecheckpoint.storage.journal_files import FOLDER, append
from bytecheckpoint.storage.paths import Place, as_place, below, name_of
from bytecheckpoint.storage.save_records import FORMAT
from bytecheckpoint.storage.step_names import run_and_step

__all__ = ["note_copied", "note_dropped", "note_failed"]

_logger = logging.getLogger("bytecheckpoint")


def note_copied(path: str, copied: CopyReport, begun_at: float, config: Config) -> None:
    """Notes that a step was copied, unless it was there already.

    Args:
        path: Folder of the step near by.
        copied: What was copied.
        begun_at: When that began, as a Unix time.
        config: Settings; with ``journal`` off nothing is noted.
    """
    if copied.is_new:
        numbers = {"total_s": round(copied.seconds, 6), "num_bytes": copied.num_bytes}
        _note(path, begun_at, config, save_id=copied.save_ids[-1], target=copied.target, **numbers)


def note_failed(path: str, durable: Place, why: str, begun_at: float, config: Config) -> None:
    """Notes that a step could not be copied, and is tried again; see ``note_copied``."""
    seconds = round(max(time.time() - begun_at, 0.0), 6)
    _note(path, begun_at, config, target=_target(path, durable), total_s=seconds, failed=why)


def note_dropped(path: str, durable: Place, why: str, config: Config) -> None:
    """Notes that a step is not copied any more; see ``note_copied``. One that was removed has no journal."""
    _note(path, time.time(), config, target=_target(path, durable), dropped=why)


def _target(path: str, durable: Place) -> str:
    return str(below(durable, name_of(as_place(path))))


def _note(path: str, at: float, config: Config, **fields: Any) -> None:
    """Writes a line to the journal of a step. What fails is said: the copy is what counts."""
    place = as_place(path)
    if config.journal == "off" or not isinstance(place, Path) or folder_at(place).is_gone():
        return
    step = run_and_step(path)[1]
    record = {"format": FORMAT, "kind": "drain", "at": round(at, 3), "path": place.name, "step": step, **fields}
    try:
        append(place / FOLDER, json.dumps(record, separators=(",", ":")).encode() + b"\n")
    except OSError as error:
        _logger.warning("the journal in %s cannot be written: %s", place, error.strerror or error)
