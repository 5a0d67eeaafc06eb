# SPDX-License-Identifier: Apache-2.0
"""Where a save goes: a directory, or the objects below a URL. How its commit begins there, and the job of a rank."""

from __future__ import annotations

import time

from bytecheckpoint.compat.dcp_calls import background_call
from bytecheckpoint.config import Config
from bytecheckpoint.dcp._save_session import SaveSession
from bytecheckpoint.errors import CheckpointBusyError, UnsupportedError
from bytecheckpoint.native import _C
from bytecheckpoint.object_store.client import StoreClient
from bytecheckpoint.object_store.commit import StoreCommit
from bytecheckpoint.object_store.stores import most_file_bytes, use_store, with_store_ring
from bytecheckpoint.object_store.urls import is_store_url

__all__ = ["begin_commit", "start_job"]

# A save that failed in another process releases the path within a fraction of this time; see _save_session.
_BUSY_GRACE_S = 1.0


def begin_commit(
    session: SaveSession, config: Config, *, overwrite: bool, sync: bool, reserve_bytes: int
) -> _C.Commit | StoreCommit:
    """Takes the right to commit. Waits a moment if another save has it, which may be one that has just failed.

    Args:
        session: The save.
        config: Settings.
        overwrite: Whether a checkpoint may be there.
        sync: Whether to sync what is written.
        reserve_bytes: Bytes that ``.metadata`` may need.

    Raises:
        CheckpointBusyError: Another save has the right.
        CheckpointExistsError: There is a checkpoint, and ``overwrite`` is False.
        StorageError: The storage refused, or does not answer.
        UnsupportedError: The URL can only be read, ranks commit by themselves, or obstore is not installed.
    """
    rank = session.rank if session.commits_alone else None
    if is_store_url(session.path):
        if rank is not None:
            # Ranks that commit by themselves would sweep one another's files: a store has no locks to tell them apart.
            raise UnsupportedError(
                f"save({session.path}): use_collectives=False is for directories; save to a URL with collectives",
                session.path,
            )
        return StoreCommit(_store_of(session, config), overwrite=overwrite, deadline_s=config.commit_deadline_s)
    give_up = time.monotonic() + _BUSY_GRACE_S
    while True:
        try:
            return _C.Commit(
                directory=session.path,
                save_id=session.save_id,
                rank=rank,
                overwrite=overwrite,
                take_over=config.take_over,
                sync=sync,
                direct_io=config.direct_io,
                reserve_bytes=reserve_bytes,
                deadline_s=config.commit_deadline_s,
                visibility_timeout_s=config.visibility_timeout_s,
                io_timeout_s=config.io_timeout_s,
            )
        except CheckpointBusyError:
            if time.monotonic() >= give_up:
                raise
        time.sleep(_BUSY_GRACE_S / 10)


def start_job(
    session: SaveSession, config: Config, plan: _C.WritePlan, *, sync: bool, one_file_a_record: bool
) -> _C.SaveJob:
    """Starts the threads that write this rank's part.

    Args:
        session: The save.
        config: Settings.
        plan: What this rank writes.
        sync: Whether to sync what is written.
        one_file_a_record: Whether each record gets a file of its own.

    Raises:
        StorageError: The storage refused, or does not answer.
        UnsupportedError: obstore is not installed.
    """
    if is_store_url(session.path):
        _store_of(session, config)
        config = with_store_ring(config)
    session.phases.trace.expect(plan.num_bytes)
    is_background = session.context.staging is not None or background_call() is not None
    return _C.SaveJob(
        directory=session.path,
        rank=session.rank,
        direct_io=config.direct_io,
        sync=sync,
        one_file_a_record=one_file_a_record,
        num_io_threads=config.io_threads,
        ring_bytes=config.ring_bytes,
        expected_bytes=plan.num_bytes,
        niceness=config.niceness if is_background else 0,
        bytes_per_s=config.write_bytes_per_s,
        io_timeout_s=config.io_timeout_s,
        visibility_timeout_s=config.visibility_timeout_s,
        max_file_bytes=most_file_bytes(session.path),
        trace=session.phases.trace.spans,
    )


def _store_of(session: SaveSession, config: Config) -> StoreClient:
    """Returns the client of the save, which its commit and its job share."""
    if session.store is None:
        session.store = use_store(session.path, config, _C)
        session.store.on_request = session.phases.trace.note_request
    return session.store
