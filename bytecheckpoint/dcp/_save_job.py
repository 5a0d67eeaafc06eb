# SPDX-License-Identifier: Apache-2.0
"""The job of one rank in a save: the threads of the engine that write its part."""

from __future__ import annotations

from bytecheckpoint.compat.dcp_calls import background_call
from bytecheckpoint.config import Config
from bytecheckpoint.dcp._save_session import SaveSession
from bytecheckpoint.native import _C

__all__ = ["start_job"]


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
    session.use_folder(config)
    config = session.folder.tuned(config)
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
        max_file_bytes=session.folder.most_file_bytes,
        trace=session.phases.trace.spans,
    )
