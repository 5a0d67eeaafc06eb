# SPDX-License-Identifier: Apache-2.0
"""The reports of a save: of one rank, and of all ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch.distributed.checkpoint.planner import SavePlanner

from bytecheckpoint.config import Config
from bytecheckpoint.dcp._mesh import mesh_of
from bytecheckpoint.dcp._save_session import RankResult, SaveSession
from bytecheckpoint.journal.observers import note_trace
from bytecheckpoint.native import _C
from bytecheckpoint.report import PlanReport, RankSaveReport, SaveReport
from bytecheckpoint.storage.tiers import tier_of

__all__ = ["report_of_all", "report_of_rank"]


def report_of_rank(
    session: SaveSession, job: _C.SaveJob, planner: SavePlanner, config: Config
) -> tuple[RankSaveReport, SaveReport]:
    """Returns what this rank did in this save: the report for the coordinator, and the report for this rank.

    Another save that runs on the same writer does not change them.
    """
    session.phases.end("write_s")
    plan = getattr(planner, "last_plan", None)
    own: dict[str, Any] = {"rank": session.rank, "num_requests": _requests_of(session), **job.stats()}
    own["plan"] = plan if isinstance(plan, PlanReport) else PlanReport(as_given=session.context.as_given)
    seconds = session.phases.seconds
    own["trace"] = session.phases.trace.of_rank()
    own["blocked_s"] = _blocked_s(session)
    of_rank = RankSaveReport(**own, **{name: seconds.get(name, 0.0) for name in ("plan_s", "exchange_s", "write_s")})
    note_trace(session.path, "save", session.rank, session.phases.trace.whole(), config)
    session.report = SaveReport(
        path=session.path,
        tier=tier_of(session.path),
        memory_s=session.memory_s,
        save_id=session.save_id if session.is_coordinator or session.commits_alone else "",
        mesh=mesh_of(planner, session.context.size) if session.is_coordinator else (),
        began_at=session.phases.trace.began_at,
        is_async=session.context.staging is not None,
        total_s=session.phases.total_s,
        **own,
        **seconds,
    )
    return of_rank, session.report


def report_of_all(
    session: SaveSession, handed_in: list[RankResult], commit: Mapping[str, Any], config: Config
) -> SaveReport:
    """Returns the complete report of a committed save. Only the rank that committed it can make it."""
    of_ranks = [result.report for result in handed_in if result.report is not None]
    trace, blocked_s = session.phases.trace.of_rank(), _blocked_s(session)
    note_trace(session.path, "save", session.rank, session.phases.trace.whole(), config)
    # What this rank handed in had not seen the end.
    of_ranks = [
        dataclasses.replace(each, trace=trace, blocked_s=blocked_s) if each.rank == session.rank else each
        for each in of_ranks
    ]
    return dataclasses.replace(
        session.report or SaveReport(path=session.path, save_id=session.save_id),
        **session.phases.seconds,
        total_s=session.phases.total_s,
        blocked_s=blocked_s,
        trace=trace,
        num_requests=_requests_of(session),
        ranks=tuple(sorted(of_ranks, key=lambda of_rank: of_rank.rank)),
        digest=session.digest,
        files_swept=commit["files_swept"],
        warnings=commit["warnings"],
    )


def _blocked_s(session: SaveSession) -> float:
    staging = session.context.staging
    return session.phases.total_s if staging is None else staging.blocked_s


def _requests_of(session: SaveSession) -> int:
    return session.folder.num_requests
