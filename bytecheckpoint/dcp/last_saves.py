# SPDX-License-Identifier: Apache-2.0
"""What a rank wrote in its last save of a run, so that the next one links the files that have not changed."""

from __future__ import annotations

import logging
from pathlib import Path

from bytecheckpoint.checkpoint.commit_order import commit_order
from bytecheckpoint.config import Config
from bytecheckpoint.dcp._save_session import SaveSession
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.native import _C
from bytecheckpoint.runtime.per_process import PerProcess
from bytecheckpoint.staging.content_hash import load_content_hash
from bytecheckpoint.storage.parts import json_of, step_and_part
from bytecheckpoint.storage.paths import as_place, parent_of
from bytecheckpoint.storage.step_folder import step_paths
from bytecheckpoint.storage.stored_hashes import hashes_in

__all__ = ["can_link", "keep_for_next_save", "last_save"]

_MARK = ".metadata"
_MOST_MARK_BYTES = 256 << 20  # of each rank, once in each process; else its first save writes everything

_MOST_KEPT = 16  # of runs, and parts of their steps

_logger = logging.getLogger("bytecheckpoint")

_Key = tuple[str, str, int, int]  # run folder, part of a step, rank, number of ranks
_last_saves: PerProcess[dict[_Key, _C.LastSave]] = PerProcess(dict)
_said: PerProcess[set[str]] = PerProcess(set)  # runs of which was said that files are not linked


def can_link(session: SaveSession, config: Config) -> bool:
    """Whether a save computes hashes, and links what is unchanged: to a directory, and where that is asked for."""
    if not config.link_unchanged or session.folder.is_of_one_machine:
        return False
    if isinstance(as_place(session.path), Path):
        load_content_hash()  # DCP may save in another process than the one that made the writer
        return True
    _say_once(session, "link_unchanged has an effect in directories alone: an object store has no links")
    return False


def last_save(session: SaveSession, config: Config) -> _C.LastSave | None:
    """Returns what this rank wrote last in the run; the first time in this process, what the newest step says of it."""
    key = _key(session)
    kept = _last_saves.get()
    if key not in kept:
        found = _read(session, config)
        if found is None:
            return None
        kept[key] = found
    return kept[key]


def keep_for_next_save(session: SaveSession, job: _C.SaveJob, config: Config) -> tuple[tuple[str, int, bytes], ...]:
    """Keeps what a job has written, and returns the hashes of its files for the commit mark."""
    if not can_link(session, config):
        return ()
    if job.not_linked_because:
        _say_once(session, f"files that are unchanged are written: {job.not_linked_because}")
    saved, kept, key = job.take_saved(), _last_saves.get(), _key(session)
    kept.pop(key, None)
    kept[key] = saved
    while len(kept) > _MOST_KEPT:
        del kept[next(iter(kept))]
    return tuple(saved.hashes())


def _key(session: SaveSession) -> _Key:
    step, part = step_and_part(as_place(session.path))
    return str(parent_of(step)), part, session.rank, session.context.size


def _read(session: SaveSession, config: Config) -> _C.LastSave | None:
    step, part = step_and_part(as_place(session.path))
    run = Path(parent_of(step))
    try:
        if not run.is_dir():
            return None
        for _, path in commit_order(run, step_paths(run)).by_time:
            folder = Path(path) / part
            if folder == Path(session.path):
                continue
            if (folder / _MARK).stat().st_size > _MOST_MARK_BYTES:
                return None
            checkpoint = _C.Checkpoint.open(str(folder), io_timeout_s=config.io_timeout_s)
            hashes = hashes_in(json_of(checkpoint.user_metadata, folder))
            return _C.LastSave.of_checkpoint(checkpoint, str(folder), session.rank, hashes) if hashes else None
    except (CheckpointError, OSError) as error:
        _logger.info("save(%s): nothing is linked: %s", session.path, error)
    return None


def _say_once(session: SaveSession, what: str) -> None:
    run = _key(session)[0]
    if run not in _said.get():
        _said.get().add(run)
        _logger.warning("save(%s): %s", session.path, what)
