# SPDX-License-Identifier: Apache-2.0
"""What the hooks of a load do: open the checkpoint, read this rank's part, report it."""

from __future__ import annotations

import warnings
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner

from bytecheckpoint.calls.phases import Phases
from bytecheckpoint.checkpoint.direct_io import tell_of_refused_direct_io
from bytecheckpoint.config import Config
from bytecheckpoint.contents.opening import open_checkpoint
from bytecheckpoint.dcp._dcps_objects import warning_of_dcp
from bytecheckpoint.dcp._loaded_keys import LoadedKeys
from bytecheckpoint.dcp._mesh import mesh_of
from bytecheckpoint.dcp.call_context import CallContext
from bytecheckpoint.dcp.load_planner import is_meant_to_fill
from bytecheckpoint.dcp.rank_load import Load, check_requested, plan_to_read
from bytecheckpoint.errors import CheckpointNotFoundError, StorageError
from bytecheckpoint.journal.observers import note_call, note_trace
from bytecheckpoint.native import _C, _core
from bytecheckpoint.report import LoadReport, RankLoadReport
from bytecheckpoint.sharing.exchange import Exchange
from bytecheckpoint.sharing.report_gather import ReportGather
from bytecheckpoint.storage.folder import Folder
from bytecheckpoint.storage.last_used import note_load
from bytecheckpoint.storage.names import rank_of_mark
from bytecheckpoint.storage.save_ids import begin_of_save

__all__ = ["LoadPart", "no_part_of", "open_to_load", "prepare_to_read", "read_part"]


@dataclass(frozen=True)
class LoadPart:
    """What one rank loads.

    Attributes:
        path: Path or URL of the checkpoint.
        folder: Its folder, which the engine knows.
        checkpoint: The opened checkpoint, or the view of it that is loaded.
        rank: The rank whose part is read, if it was saved without collectives.
        number: Number of this rank in the load.
        is_coordinator: Whether this rank coordinates the load.
        config: Settings.
        call: Context of the DCP call that loads.
        keys: The keys that are loaded, for the report.
    """

    path: str
    folder: Folder
    checkpoint: _C.Checkpoint
    rank: int | None
    number: int
    is_coordinator: bool
    config: Config
    call: CallContext
    keys: LoadedKeys


def open_to_load(folder: Folder, config: Config, rank: int | None, max_whole_bytes: int) -> _C.Checkpoint:
    """Opens a checkpoint, or the part of one rank. Its pickle, which DCP's own readers use, is checked, too.

    Args:
        folder: Its folder, which the engine knows.
        config: Settings.
        rank: The rank whose part is opened; None opens the checkpoint of all.
        max_whole_bytes: Of larger metadata only what is asked for is read.

    Raises:
        CheckpointNotFoundError: There is none.
        CheckpointError: See ``open_checkpoint``.
    """
    # Only a missing `.metadata` is explained: DCP also asks for the part of a rank that has none.
    try:
        return open_checkpoint(
            folder.place,
            config,
            kind=_C.Checkpoint,
            rank=rank,
            is_known=True,
            explain=rank is None,
            check_pickle=True,
            max_whole_bytes=max_whole_bytes,
        ).stored
    except CheckpointNotFoundError as error:
        if _core.look_anew(str(folder.place)):
            error.visible_within_s = config.visibility_timeout_s
            error.args = (f"{error}; on this file system a commit of another machine may be seen late",)
        raise


def prepare_to_read(checkpoint: _C.Checkpoint, plan: LoadPlan, planner: Any, config: Config) -> int:
    """Refuses what the checkpoint does not have, and begins to touch the ring while the ranks exchange their plans.

    Returns:
        Number of bytes that this rank wants.

    Raises:
        CheckpointError: See ``check_requested`` and ``plan_to_read``.
    """
    check_requested(checkpoint, planner)
    num_bytes = plan_to_read(checkpoint, plan).num_bytes
    _C.prepare_ring(config.ring_bytes, num_bytes)
    return num_bytes


def no_part_of(folder: Folder, rank: int) -> CheckpointNotFoundError | None:
    """Returns the error for a missing part of ``rank`` if other ranks have parts; None if there are no parts."""
    parts: list[str] = []
    with suppress(StorageError):
        if not folder.commits_by_rank:
            return None
        parts = sorted(name for name in folder.names() if rank_of_mark(name) is not None)
    if not parts:
        return None
    return CheckpointNotFoundError(
        f"open({folder.place}): ranks saved without collectives, and rank {rank} has no part "
        f"(there are {', '.join(parts)}); a part can be read only by the rank of the same number",
        str(folder.place),
    )


def read_part(
    part: LoadPart, plan: LoadPlan, planner: LoadPlanner, gather: ReportGather, phases: Phases
) -> LoadReport | None:
    """Reads and verifies what ``plan`` asks for, scatters it into the tensors, and tells the other ranks.

    Returns:
        The report; None if other ranks failed, which DCP raises on all.

    Raises:
        CheckpointError: Something cannot be read, is damaged, or does not fit.
    """
    phases.end("exchange_s")
    config, keys = part.config, part.keys
    of_dcp = warning_of_dcp(part.path, plan, planner) if part.is_coordinator else None
    with Exchange.of_plan(plan, part.call.peers) or nullcontext() as exchange:
        tuned = part.folder.tuned(config)
        load = Load(part.checkpoint, plan, part.path, part.rank, tuned, planner, exchange, phases.trace)
        with load.progress_bar() if config.progress and part.is_coordinator else nullcontext():
            load.tensors()
            phases.end("read_s")
            load.objects()
        tell_of_refused_direct_io(part.path, _C)
        phases.end("objects_s")
        keys.numbers = load.numbers
        load.warn_of_casts()
        own: dict[str, Any] = {"rank": part.number, **load.done, **phases.seconds, "trace": phases.trace.of_rank()}
        own["num_requests"] = part.folder.num_requests
        note_trace(part.path, "load", part.number, phases.trace.whole(), config)
    ranks = gather.gather(RankLoadReport(**own))
    phases.end("wait_s")
    whole = tuple(of_rank for of_rank in ranks if of_rank is not None)
    if len(whole) < len(ranks):
        return None
    note_load(part.path)
    # What goes on from here is newer than it, whatever the clock of this machine says, and that of who saved it said.
    _C.draw_save_ids_after(begin_of_save(part.checkpoint.save_id) // 1_000_000)
    report = LoadReport(
        path=part.path,
        save_id=part.checkpoint.save_id,
        mesh=mesh_of(planner, part.call.size) if part.is_coordinator else (),
        began_at=phases.trace.began_at,
        reading="independent" if exchange is None else exchange.reading,
        **own,
        as_given=part.call.as_given,
        wait_s=phases.seconds["wait_s"],
        total_s=phases.total_s,
        ranks=whole,
        **keys.of_report(),
    )
    if part.is_coordinator:
        note_call(report, config)
        texts = [keys.warning(part.path), of_dcp] if is_meant_to_fill(planner) else []
        for text in filter(None, texts):
            warnings.warn(text, RuntimeWarning, stacklevel=2)
    return report
