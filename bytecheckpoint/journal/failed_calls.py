# SPDX-License-Identifier: Apache-2.0
"""Calls that failed, and saves that died: their lines in the journal, and what exporters hear of them."""

from __future__ import annotations

import contextvars
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from errno import ETIMEDOUT
from pathlib import Path
from typing import Any

from bytecheckpoint.config import Config
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.journal.failures import CallFailure
from bytecheckpoint.journal.lines import append, folder_of_failure, place_of
from bytecheckpoint.journal.observers import OBSERVERS, Exporter, Observers, OnReport, saying
from bytecheckpoint.journal.records import failure_record_of
from bytecheckpoint.storage.folders import folder_at
from bytecheckpoint.storage.journal_files import FOLDER
from bytecheckpoint.storage.object_store.save_notes import keep_failure
from bytecheckpoint.storage.step_names import run_of
from bytecheckpoint.storage.unended_saves import unended_saves

__all__ = ["note_failure", "note_lost_coordinator", "note_unended"]

# So many failed saves of a run wait for a journal that can take their lines.
_MOST_FAILURES = 100
# Where a save cannot be made at all, it writes nothing, and its failure is no news of the run.
_BEGIN_NOTHING = ("ConfigError", "UnsupportedError")

_logger = logging.getLogger("bytecheckpoint")


def note_failure(failure: CallFailure, config: Config, error: BaseException | None = None) -> None:
    """Notes a call that has failed, on its coordinator.

    The folder of a save that failed is removed if nothing else was in it, and stays for no line. So the line goes to
    another step of the run; until there is one, it waits in the process. In a store the record takes the place of the
    note that says that the save runs. Exporters hear of the failure at once, in their thread.

    Args:
        failure: What failed.
        config: Settings of the call.
        error: What ended it. If the storage has not answered, it is not asked to take a line.
    """
    observers = OBSERVERS.get()
    folder, path, step = place_of(failure.path, config, is_save=failure.kind == "save")
    record = failure_record_of(failure, config, path, step)
    if folder is not None:
        _write(observers, failure.path, folder, record, config, error)
    if failure.kind == "save" and failure.error_type not in _BEGIN_NOTHING and config.journal != "off":
        _keep_in_store(observers, failure.path, record, config, error)
    _tell(observers, failure)


def note_unended(path: str, config: Config) -> None:
    """Notes the saves that died in the folder of a checkpoint, before a new save there removes what they left.

    Args:
        path: Path of the checkpoint.
        config: Settings of the new save.
    """
    observers = OBSERVERS.get()
    found: list[dict[str, Any]] = []

    def look() -> None:
        found.extend(unended_saves(path, silence_s=0.0))

    if config.io_timeout_s:
        observers.write(Path(path) / FOLDER, look, config)
    else:
        look()
    for record in found:
        _logger.warning("save(%s): an earlier save there died: %s", path, record["message"])
        _note_record(observers, path, record, config)


def note_lost_coordinator(path: str, save_id: str, rank: int, began_at: float, config: Config) -> Callable[[], None]:
    """Looks at a save whose coordinator was lost, on a rank that is about to take its right to commit away.

    Args:
        path: Path of the checkpoint.
        save_id: Id of the save.
        rank: The coordinator.
        began_at: Unix time at which the save began.
        config: Settings of the save.

    Returns:
        A function that notes the save, to be called if its right was taken away.
    """
    found = [each for each in unended_saves(path, silence_s=0.0) if each["save_id"] == save_id]
    if found:
        return lambda: _note_record(OBSERVERS.get(), path, found[0], config)
    failure = CallFailure(
        kind="save",
        path=path,
        rank=rank,
        began_at=began_at,
        total_s=0.0,
        error_type="RankLostError",
        message=f"save({path}): rank {rank}, the coordinator, was lost, but its process is still there",
        save_id=save_id,
    )
    return lambda: note_failure(failure, config)


def _note_record(observers: Observers, path: str, record: dict[str, Any], config: Config) -> None:
    folder, relative, step = place_of(path, config, is_save=True)
    if folder is not None:
        _write(observers, path, folder, {**record, "path": relative, "step": step}, config, None)
    about = {name: record[name] for name in ("rank", "total_s", "error_type", "message", "save_id")}
    _tell(observers, CallFailure(kind="save", path=path, began_at=record["at"], **about))


def _write(
    observers: Observers,
    path: str,
    folder: Path,
    record: dict[str, Any],
    config: Config,
    error: BaseException | None,
) -> None:
    if config.journal != "auto":
        observers.write(folder, lambda: append(folder, record), config)
        return
    waiting = observers.failures.setdefault(run_of(path), deque(maxlen=_MOST_FAILURES))
    waiting.append(record)

    def write() -> None:
        at = folder_of_failure(path)
        while at is not None and waiting:
            append(at, waiting[0])
            waiting.popleft()

    if error is None or not _is_of_silent_storage(error):
        observers.write(run_of(path), write, config)  # which of its journals takes the line, it finds out


def _keep_in_store(
    observers: Observers, url: str, record: dict[str, Any], config: Config, error: BaseException | None
) -> None:
    def write() -> None:
        with suppress(CheckpointError):  # the URL or its options are what the save failed for
            keep_failure(url, record, config)

    if folder_at(url).keeps_notes and (error is None or not _is_of_silent_storage(error)):
        observers.write(url, write, config)


def _is_of_silent_storage(error: BaseException) -> bool:
    reasons = getattr(error, "reasons", None)
    every = [error, error.__cause__, *(reasons.values() if isinstance(reasons, dict) else ())]
    return any(getattr(each, "errno", None) == ETIMEDOUT for each in every)


def _tell(observers: Observers, failure: CallFailure) -> None:
    exporters, context = observers.exporters, contextvars.copy_context()
    if exporters:
        observers.submit(lambda: context.run(_export, observers, exporters, failure))


def _export(observers: Observers, exporters: Sequence[Exporter | OnReport], failure: CallFailure) -> None:
    for exporter in exporters:
        export: Callable[[CallFailure], None] | None = getattr(exporter, "export_failure", None)
        if export is not None:
            with saying(observers, exporter):
                export(failure)
