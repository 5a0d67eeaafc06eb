# SPDX-License-Identifier: Apache-2.0
"""What a rank wrote in its last save of a run, so that the next one links the files that have not changed."""

from __future__ import annotations

import logging

from bytecheckpoint.checkpoint.commit_order import commit_order
from bytecheckpoint.config import Config
from bytecheckpoint.dcp._save_session import SaveSession
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.native import _C
from bytecheckpoint.runtime.fork_locks import ForkSafeLock
from bytecheckpoint.runtime.per_process import PerProcess
from bytecheckpoint.staging.content_hash import load_content_hash
from bytecheckpoint.storage.folders import folder_at, known
from bytecheckpoint.storage.parts import json_of, step_and_part
from bytecheckpoint.storage.paths import as_place, below, parent_of
from bytecheckpoint.storage.step_folder import step_paths
from bytecheckpoint.storage.stored_hashes import hashes_in

__all__ = ["can_link", "keep_for_next_save", "last_save"]

_MARK = ".metadata"
_MOST_MARK_BYTES = 256 << 20  # of each rank, once in each process; else its first save writes everything

_MOST_KEPT = 16  # of runs, and parts of their steps

_logger = logging.getLogger("bytecheckpoint")

_Key = tuple[str, str, int, int]  # run folder, part of a step, rank, number of ranks


class _LastSaves:
    """What this process saved last, by run: the last two saves, since the last one may have failed behind this rank."""

    def __init__(self) -> None:
        self.by_run: dict[_Key, list[_C.LastSave]] = {}
        self.said: set[str] = set()  # runs of which was said that files are not linked
        self.lock = ForkSafeLock()

    def add(self, key: _Key, saved: _C.LastSave) -> None:
        with self.lock:
            self.by_run[key] = [saved, *self.by_run.pop(key, [])][:2]
            while len(self.by_run) > _MOST_KEPT:
                del self.by_run[next(iter(self.by_run))]

    def of(self, key: _Key) -> list[_C.LastSave]:
        with self.lock:
            return [*self.by_run.get(key, [])]

    def is_new(self, run: str) -> bool:
        with self.lock:
            is_new = run not in self.said
            self.said.add(run)
            return is_new


_last_saves = PerProcess(_LastSaves)


def can_link(session: SaveSession, config: Config) -> bool:
    """Whether a save computes hashes, and links what is unchanged: where that is asked for, but not in memory.

    Not with ``take_over``: the save that is stuck there may yet remove links that it has made, by their names.
    """
    if not config.link_unchanged or config.take_over or session.folder.is_of_one_machine:
        return False
    load_content_hash()  # DCP may save in another process than the one that made the writer
    return True


def last_save(session: SaveSession, config: Config) -> _C.LastSave | None:
    """Returns what this rank wrote in the last committed save of the run.

    The first time in this process, that is what the newest step says of it.
    """
    for saved in _last_saves.get().of(_key(session)):
        folder = folder_at(known(as_place(saved.directory), config))
        if any(folder.has(mark) for mark in (_MARK, f"__{session.rank}{_MARK}")):
            return saved
    return _read(session, config)


def keep_for_next_save(session: SaveSession, job: _C.SaveJob, config: Config) -> tuple[tuple[str, int, bytes], ...]:
    """Keeps what a job has written, and returns the hashes of its files for the commit mark."""
    if not can_link(session, config):
        return ()
    if job.not_linked_because:
        _say_once(session, f"files that are unchanged are written: {job.not_linked_because}")
    saved = job.take_saved()
    _last_saves.get().add(_key(session), saved)
    return tuple(saved.hashes())


def _key(session: SaveSession) -> _Key:
    step, part = step_and_part(as_place(session.path))
    return str(parent_of(step)), part, session.rank, session.context.size


def _read(session: SaveSession, config: Config) -> _C.LastSave | None:
    step, part = step_and_part(as_place(session.path))
    run = parent_of(step)
    runs = folder_at(run)
    runs.use(config, _C)
    try:
        if runs.is_absent():
            return None
        for _, path in commit_order(run, step_paths(run)).by_time:
            place = below(as_place(path), *([part] if part else []))
            if str(place) == session.path:
                continue
            mark = folder_at(place).file(_MARK)
            if mark is None or mark.num_bytes > _MOST_MARK_BYTES:
                return None
            checkpoint = _C.Checkpoint.open(str(place), io_timeout_s=config.io_timeout_s)
            hashes = hashes_in(json_of(checkpoint.user_metadata, place))
            return _C.LastSave.of_checkpoint(checkpoint, str(place), session.rank, hashes) if hashes else None
    except (CheckpointError, OSError) as error:
        _logger.info("save(%s): nothing is linked: %s", session.path, error)
    return None


def _say_once(session: SaveSession, what: str) -> None:
    if _last_saves.get().is_new(_key(session)[0]):
        _logger.warning("save(%s): %s", session.path, what)
