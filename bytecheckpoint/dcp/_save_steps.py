# SPDX-License-Identifier: Apache-2.0
"""What the hooks of a save do, one after the other: take the right to commit, write this rank's part, commit."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from errno import ETIMEDOUT

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from bytecheckpoint.calls.progress import progress_bar
from bytecheckpoint.checkpoint.direct_io import tell_of_refused_direct_io
from bytecheckpoint.checkpoint.tier_drains import note_tier_commit
from bytecheckpoint.config import Config
from bytecheckpoint.dcp._cancelling import Cancelling
from bytecheckpoint.dcp._execute_plan import execute_plan
from bytecheckpoint.dcp._gaps import check_planned_metadata, gaps_of_save
from bytecheckpoint.dcp._save_digest import with_digest
from bytecheckpoint.dcp._save_failures import check_handed_in, error_to_send, explaining_unseen, say_files_stay
from bytecheckpoint.dcp._save_reports import report_of_all, report_of_rank
from bytecheckpoint.dcp._save_session import RankResult, SaveSession, end_unfinished_saves, note_coordinator
from bytecheckpoint.dcp._unsafe import UnsafeObjects, describe_unsafe
from bytecheckpoint.dcp.last_saves import can_link, keep_for_next_save, last_save
from bytecheckpoint.dcp.metadata import assemble, complete_metadata
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.journal.failed_calls import note_unended
from bytecheckpoint.native import _C
from bytecheckpoint.planning.assignment import plan_to_write
from bytecheckpoint.planning.plan_items import PlanItems
from bytecheckpoint.report import SaveReport
from bytecheckpoint.storage.last_used import note_commit
from bytecheckpoint.storage.stored_hashes import with_hashes

__all__ = ["SaveOptions", "commit_save", "take_right", "write_part"]

# A generous guess of the bytes that one chunk takes in `.metadata`. They are reserved when the save begins, so that the
# disk cannot be full when `.metadata` is written.
_METADATA_BYTES_A_CHUNK = 512


@dataclass(frozen=True)
class SaveOptions:
    """How a writer saves.

    Attributes:
        config: Settings.
        overwrite: Whether a checkpoint may be there.
        sync: Whether to sync what is written.
        one_file_a_record: Whether each record gets a file of its own.
        user_metadata: What the user passed, as JSON text; "" for nothing.
        after_write: Called with the names of the files that this rank has written, before it says so; or None.
        ranks_here: The ranks that write to the disk of the coordinator; None for all.
    """

    config: Config
    overwrite: bool
    sync: bool
    one_file_a_record: bool
    user_metadata: str
    after_write: Callable[[Sequence[str]], None] | None = None
    ranks_here: Set[int] | None = None

    def gaps_of(self, session: SaveSession) -> str:
        """Returns what becomes of elements that no rank holds; see ``gaps_of_save``."""
        return gaps_of_save(self.config, False if session.commits_alone else session.context.use_collectives)


def take_right(session: SaveSession, options: SaveOptions, plans: Sequence[SavePlan]) -> None:
    """Takes the right to commit, and watches that it ends with the save.

    Raises:
        CheckpointError: See ``Folder.begin_commit``; or a rank was lost.
        InvalidPlanError: The plans of another planner do not fit.
    """
    session.check_ranks(range(len(plans)))
    session.check_machines()
    if not all(isinstance(plan.items, PlanItems) for plan in plans):  # another planner made the plans
        check_planned_metadata(session.context.planned_metadata(), options.gaps_of(session))
    is_there = end_unfinished_saves(session, options.config.io_timeout_s)
    num_items = sum(len(plan.items) for plan in plans)
    session.use_folder(options.config)
    keeps_journal = session.is_coordinator and options.config.journal != "off"
    if is_there and keeps_journal and session.folder.keeps_journals:
        note_unended(session.path, options.config)
    session.commit = session.folder.begin_commit(
        options.config,
        save_id=session.save_id,
        rank=session.rank if session.commits_alone else None,
        overwrite=options.overwrite,
        sync=options.sync,
        reserve_bytes=(num_items + 8) * _METADATA_BYTES_A_CHUNK,
        about=session.about(options.config) if keeps_journal else b"",
    )
    note_coordinator(session, session.commit.directory_id)
    if session.ranks is not None:
        session.ranks.hold(session.save_id)
    if session.is_over:
        session.end()
        raise CheckpointError(f"save({session.path}): a rank was lost while the save began", session.path)
    session.monitor(options.config)


def write_part(
    session: SaveSession, options: SaveOptions, plan: SavePlan, planner: SavePlanner, cancelling: Cancelling
) -> tuple[RankResult, SaveReport | None]:
    """Writes and syncs the files of this rank.

    Returns:
        What the rank sends to the coordinator, also of a failure, which is not raised: the coordinator is to clean up
        before the error is raised on every rank. And its report; None if it failed.
    """
    job: _C.SaveJob | None = None
    unsafe = UnsafeObjects(options.config)
    try:
        to_write = plan_to_write(plan.items)
        job = _start_job(session, options, to_write)
        with _progress_bar(session, options, job, to_write.num_bytes), cancelling.cancellable(session, job):
            execute_plan(job, to_write, planner, unsafe)
            written = job.finish()
            if options.after_write is not None:
                options.after_write(job.file_names)
        tell_of_refused_direct_io(session.path, _C)
        hashes = keep_for_next_save(session, job, options.config)
        of_rank, report = report_of_rank(session, job, planner, options.config)
        result = RankResult(
            session.rank,
            session.path,
            session.call,
            written,
            tuple(job.file_names),
            tuple(job.link_names),
            report=of_rank,
            unsafe=tuple(unsafe.found.items()),
            hashes=hashes,
        )
    except BaseException as error:
        session.refuse_forked_child()
        names, links = ((), ()) if job is None else (tuple(job.file_names), tuple(job.link_names))
        job = None
        error = error_to_send(error, session)
        result, report = RankResult(session.rank, session.path, session.call, b"", names, links, error), None
    session.handed_in = True
    return result, report


def commit_save(
    session: SaveSession,
    options: SaveOptions,
    metadata: Metadata,
    handed_in: list[RankResult],
    cancelling: Cancelling,
) -> SaveReport:
    """Checks what every rank has handed in, and commits; or undoes the save and raises.

    Args:
        session: The save.
        options: How it is saved.
        metadata: Metadata of the plan; what is known only after the commit is added.
        handed_in: What the ranks have sent.
        cancelling: Whether the save is cancelled.

    Raises:
        CheckpointError: The save failed.
    """
    commit = session.commit
    assert commit is not None, "prepare_global_plan was not called"
    session.begin_finish()
    session.phases.end("wait_s")
    failed = {result.rank: result.error for result in handed_in if result.error is not None}
    try:
        check_handed_in(session, handed_in, failed)
        cancelling.raise_if_cancelled(session)
        assembled: Callable[..., _C.Checkpoint] = functools.partial(
            assemble,
            metadata,
            save_id=session.save_id,
            checkpoint_id=session.path,
            results=[result.written for result in handed_in],
            gaps=options.gaps_of(session),
        )
        hashes = [of_file for result in handed_in for of_file in result.hashes]
        user_metadata = with_hashes(options.user_metadata, hashes) if hashes else options.user_metadata
        checkpoint = assembled(user_metadata=user_metadata)
        session.phases.end("assemble_s")
        here = [result for result in handed_in if options.ranks_here is None or result.rank in options.ranks_here]
        with explaining_unseen(session.path, here):
            commit.check_files(checkpoint, options.ranks_here)
        if options.config.digest:
            text = with_digest(session, options.config, user_metadata, checkpoint, cancelling.raise_if_cancelled)
            checkpoint = assembled(user_metadata=text)
        report = commit.commit(checkpoint)
        note_commit(session.path)
        if options.ranks_here is None:  # else the other disks come next
            note_tier_commit(session.path)
    except BaseException as error:
        try:
            in_doubt = any(getattr(reason, "errno", None) == ETIMEDOUT for reason in failed.values())
            links = [name for result in handed_in for name in result.link_names]
            commit.abort([name for result in handed_in for name in result.file_names], in_doubt, links)
        except CheckpointError as of_clean_up:
            say_files_stay(error, session.path, of_clean_up)
        raise
    finally:
        session.end()
    complete_metadata(metadata, checkpoint, session.path, session.rank if session.commits_alone else None)
    found = {fqn: names for result in handed_in for fqn, names in result.unsafe}
    report["warnings"] += [describe_unsafe(found)] if found else []
    for warning in report["warnings"]:
        warnings.warn(f"bytecheckpoint: {session.path}: {warning}", RuntimeWarning, stacklevel=3)
    session.phases.end("commit_s", "sweep_s", report["sweep_s"])
    return report_of_all(session, handed_in, report, options.config)


def _start_job(session: SaveSession, options: SaveOptions, plan: _C.WritePlan) -> _C.SaveJob:
    """Starts the threads that write this rank's part."""
    config = options.config
    session.use_folder(config)
    config = session.folder.tuned(config)
    session.phases.trace.expect(plan.num_bytes)
    links = can_link(session, config)
    return _C.SaveJob(
        directory=session.path,
        rank=session.rank,
        direct_io=config.direct_io,
        sync=options.sync,
        one_file_a_record=options.one_file_a_record,
        num_io_threads=config.io_threads,
        ring_bytes=config.ring_bytes,
        expected_bytes=plan.num_bytes,
        niceness=config.niceness if session.context.is_in_background else 0,
        bytes_per_s=config.write_bytes_per_s,
        io_timeout_s=config.io_timeout_s,
        visibility_timeout_s=config.visibility_timeout_s,
        max_file_bytes=session.folder.most_file_bytes,
        trace=session.phases.trace.spans,
        has_hashes=links,
        last=last_save(session, config) if links else None,
        most_links=config.link_rewrite_every - 1,
    )


def _progress_bar(
    session: SaveSession, options: SaveOptions, job: _C.SaveJob, num_bytes: int
) -> AbstractContextManager[None]:
    shown = progress_bar(f"saving {session.path}", num_bytes, lambda: job.bytes_done, session.phases.trace)
    return shown if options.config.progress and session.is_coordinator else nullcontext()
