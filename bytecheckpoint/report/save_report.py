# SPDX-License-Identifier: Apache-2.0
"""What a save did, as each rank saw it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from bytecheckpoint.report.rank_trace import RankTrace
from bytecheckpoint.report.text import duration_text, in_words, rate_text, ratio, size_text, to_plain, who

__all__ = ["PlanReport", "RankSaveReport", "SaveReport"]


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """How a planner made its plan.

    Attributes:
        cache: ``hit``: the plan of an earlier save was used again. ``miss``: the plan was made, and kept. ``off``: no
            plans are kept.
        bytes_sent: Bytes of plans that this rank sent to other ranks.
        bytes_received: Bytes of plans that this rank received from other ranks.
        seconds: Seconds that this rank spent in the planner.
        as_given: Why the planner that DCP had planned the save, and none of ours; empty if ours did.
    """

    cache: str = "off"
    bytes_sent: int = 0
    bytes_received: int = 0
    seconds: float = 0.0
    as_given: str = ""


@dataclass(frozen=True, kw_only=True)
class RankSaveReport:
    """What one rank did until its files were durable.

    The phases ``plan_s``, ``exchange_s`` and ``write_s`` follow one another; ``stage_s``, ``flush_s`` and ``sync_s``
    are parts of ``write_s``.

    Attributes:
        rank: Number of the rank in the save.
        num_records: Number of records that the rank wrote.
        bytes_written: Size of the rank's files, in bytes.
        bytes_linked: Size of the files that the rank linked instead of writing them, with ``Config.link_unchanged``.
        bytes_compared: Bytes of tensors that the rank read to find out whether they have changed. Tensors that were
            staged are not read for it.
        plan_s: Seconds from the beginning of the save until the rank's own plan was ready.
        exchange_s: Seconds from then until the rank knew what to write: the plans of all ranks travel to the
            coordinator, it plans, and the answers travel back. On the coordinator without ``global_plan_s`` and
            ``begin_s``.
        write_s: Seconds of writing.
        stage_s: Seconds spent copying, computing checksums and waiting for slots.
        flush_s: Seconds spent waiting for the last writes.
        sync_s: Seconds spent in fsync.
        num_requests: Number of requests to the object store; 0 for a directory. A request that obstore tried again
            counts once: it does not tell.
        plan: Report of the planner; the default one if the planner gives none.
        blocked_s: Seconds for which the save kept training from going on: all of a save that is not in the background,
            else the staging of the state, which includes waiting for memory that an earlier save still uses.
        trace: Where and when the rank did this, and what its threads did; None with ``Config(trace="off")``.
    """

    rank: int = 0
    num_records: int = 0
    bytes_written: int = 0
    bytes_linked: int = 0
    bytes_compared: int = 0
    plan_s: float = 0.0
    exchange_s: float = 0.0
    write_s: float = 0.0
    stage_s: float = 0.0
    flush_s: float = 0.0
    sync_s: float = 0.0
    num_requests: int = 0
    plan: PlanReport = PlanReport()
    blocked_s: float = 0.0
    trace: RankTrace | None = None


@dataclass(frozen=True, kw_only=True)
class SaveReport(RankSaveReport):
    """On the coordinator, a report of the whole committed save; on another rank, of what that rank wrote for it.

    The phases of the coordinator are ``plan_s``, ``global_plan_s``, ``begin_s``, ``exchange_s``, ``write_s``,
    ``wait_s``, ``assemble_s``, ``digest_s``, ``commit_s`` and ``sweep_s``, in this order. They add up to ``total_s``.
    On other ranks, the phases that only the coordinator has are 0.

    Attributes:
        path: Directory of the checkpoint.
        tier: Which of ``Tiers`` it is committed in: ``memory``, ``near`` or ``durable``; "" without them.
        memory_s: Seconds that it took to commit the same state in memory before; 0 if it was not. They are not in
            ``total_s``.
        save_id: 32 hex digits, chosen by the coordinator; "" on other ranks, to which it is not sent.
        mesh: Name and size of each axis of the device mesh that the ranks are arranged in; on the coordinator, if the
            state has a DTensor whose mesh has all ranks in their order. Empty otherwise.
        began_at: Unix time at which the save began on this rank. An asynchronous save begins when it is staged.
        is_async: Whether the state was staged before, and the save ran in the background.
        global_plan_s: Seconds in which the coordinator gathers plans and decides which rank writes what.
        begin_s: Seconds of taking the right to commit: take the lock, remove files of dead saves, reserve disk space.
        wait_s: Seconds of waiting until the other ranks have written and reported their parts.
        assemble_s: Seconds of joining what was planned with what was written.
        digest_s: Seconds of reading back what was written, with ``Config.digest``.
        commit_s: Seconds of the commit: check all files, write ``.metadata``, fsync, rename, fsync.
        sweep_s: Seconds of removing data files of older saves. Where a file system takes long to free large files, a
            thread frees them after the call.
        total_s: Seconds from the beginning to the end on this rank. An asynchronous save begins when it is staged.
        ranks: On the coordinator, the reports of all ranks, sorted by rank; empty on other ranks.
        digest: The digest of the checkpoint, with ``Config.digest``; else "".
        files_swept: Number of data files of older saves that the commit removed.
        warnings: Problems after the commit, which did not undo it.
    """

    path: str
    save_id: str
    tier: str = ""
    memory_s: float = 0.0
    mesh: tuple[tuple[str, int], ...] = ()
    began_at: float = 0.0
    is_async: bool = False
    global_plan_s: float = 0.0
    begin_s: float = 0.0
    wait_s: float = 0.0
    assemble_s: float = 0.0
    digest_s: float = 0.0
    commit_s: float = 0.0
    sweep_s: float = 0.0
    total_s: float = 0.0
    ranks: tuple[RankSaveReport, ...] = ()
    digest: str = ""
    files_swept: int = 0
    warnings: list[str] = field(default_factory=list)

    @property
    def total_bytes(self) -> int:
        """Bytes that all ``ranks`` wrote; if ``ranks`` is empty, bytes that this rank wrote."""
        return sum(of_rank.bytes_written for of_rank in self.ranks) if self.ranks else self.bytes_written

    @property
    def total_linked_bytes(self) -> int:
        """Bytes of files that all ``ranks`` linked; if ``ranks`` is empty, that this rank linked."""
        return sum(of_rank.bytes_linked for of_rank in self.ranks) if self.ranks else self.bytes_linked

    @property
    def total_requests(self) -> int:
        """Requests to the object store of all ``ranks``, those of the commit included; see ``num_requests``."""
        others = sum(of_rank.num_requests for of_rank in self.ranks if of_rank.rank != self.rank)
        return others + self.num_requests

    @property
    def gb_per_s(self) -> float:
        """``total_bytes`` in units of 10^9 bytes, divided by ``total_s``."""
        return ratio(self.total_bytes / 1e9, self.total_s)

    @property
    def balance(self) -> float | None:
        """Bytes of the rank that wrote most, divided by the mean of all ranks; 1 is best, None if no ``ranks``."""
        if not self.ranks:
            return None
        largest = max(of_rank.bytes_written for of_rank in self.ranks)
        return largest * len(self.ranks) / self.total_bytes if largest else 1.0

    def __str__(self) -> str:
        return self.summary()

    def summary(self) -> str:
        """One line for people. Its phases add up to the whole."""
        phases = {
            "plan": self.plan_s + self.global_plan_s + self.begin_s + self.exchange_s,
            "write": self.write_s + self.wait_s,
            **({"digest": self.digest_s} if self.digest_s else {}),
            "commit": self.assemble_s + self.commit_s,
            "sweep": self.sweep_s,
        }
        notes = [in_words(phases)]
        if self.balance is not None and len(self.ranks) > 1:
            notes.append(f"largest rank {self.balance:.2f}x the mean")
        if self.total_linked_bytes:
            notes.append(f"{size_text(self.total_linked_bytes)} unchanged and linked")
        if self.total_requests:
            notes.append(f"{self.total_requests} requests")
        if self.plan.cache != "off":
            notes.append(f"plan cache {self.plan.cache}")
        return (
            f"saved {self.path}: {size_text(self.total_bytes)} by {who(self.rank, len(self.ranks))} "
            f"in {duration_text(self.total_s)} ({rate_text(self.gb_per_s)}; {'; '.join(notes)})"
        )

    def to_dict(self, *, with_ranks: bool = True) -> dict[str, Any]:
        """Returns all fields and properties by name, as plain values.

        Instead of ``trace`` there are the ``host`` of the rank and ``phases``: seconds by phase.

        Args:
            with_ranks: Whether what the traces and the ``ranks`` say is in it. Without, it is soon made for any number
                of ranks.
        """
        return to_plain(
            self,
            () if with_ranks else ("ranks", "trace"),
            total_bytes=self.total_bytes,
            total_linked_bytes=self.total_linked_bytes,
            total_requests=self.total_requests,
            gb_per_s=self.gb_per_s,
            balance=self.balance,
        )

    def to_json(self) -> str:
        """Returns ``to_dict()`` as JSON."""
        return json.dumps(self.to_dict(), allow_nan=False)
