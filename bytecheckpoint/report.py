# SPDX-License-Identifier: Apache-2.0
"""What a save or a load did, as this rank saw it, and what a check found."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path

from bytecheckpoint.errors import CorruptCheckpointError

__all__ = ["LoadReport", "PlanReport", "Problem", "RankLoadReport", "RankSaveReport", "SaveReport", "VerifyReport"]


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """How a planner came to its plan.

    Attributes:
        cache: ``hit``: the plan is that of an earlier save. ``miss``: it was made, and kept. ``off``: nothing is kept.
        bytes_sent: Bytes of plans that this rank sent to others.
        bytes_received: Bytes of plans that it got from others.
        seconds: Spent in the planner on this rank.
    """

    cache: str = "off"
    bytes_sent: int = 0
    bytes_received: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RankSaveReport:
    """What one rank did until its files were durable.

    The phases ``plan_s``, ``exchange_s`` and ``write_s`` follow one another; ``stage_s``, ``flush_s`` and ``sync_s``
    are parts of ``write_s``.

    Attributes:
        rank: Number of the rank in the save.
        num_records: Records it wrote.
        bytes_written: Bytes of its files.
        plan_s: Seconds from the beginning of the save until its own plan was ready.
        exchange_s: Seconds from there until it knew what to write: plans of the other ranks, planning by the
            coordinator, the way back. On the coordinator without ``global_plan_s`` and ``begin_s``.
        write_s: Seconds of writing.
        stage_s: Seconds spent copying, summing and waiting for slots.
        flush_s: Seconds spent waiting for the last writes.
        sync_s: Seconds spent in fsync.
        plan: Of the planner, if it says anything.
    """

    rank: int = 0
    num_records: int = 0
    bytes_written: int = 0
    plan_s: float = 0.0
    exchange_s: float = 0.0
    write_s: float = 0.0
    stage_s: float = 0.0
    flush_s: float = 0.0
    sync_s: float = 0.0
    plan: PlanReport = PlanReport()


@dataclass(frozen=True, kw_only=True)
class SaveReport(RankSaveReport):
    """One rank's part of a committed or handed-in save; on the coordinator, all of a committed one.

    The phases of the coordinator are ``plan_s``, ``global_plan_s``, ``begin_s``, ``exchange_s``, ``write_s``,
    ``wait_s``, ``assemble_s``, ``commit_s`` and ``sweep_s``, in this order; together they are ``total_s``. On other
    ranks those of the coordinator alone are 0.

    Attributes:
        path: Directory of the checkpoint.
        save_id: 32 hex digits, drawn by the coordinator; "" on other ranks, which are not told.
        global_plan_s: Seconds of the coordinator gathering plans and deciding who writes what.
        begin_s: Seconds of taking the right to commit: lock, sweep of dead saves, reserved disk space.
        wait_s: Seconds of waiting for what the other ranks wrote.
        assemble_s: Seconds of joining what was planned with what was written.
        commit_s: Seconds of the commit: check of all files, ``.metadata``, fsync, rename, fsync.
        sweep_s: Seconds of removing data files of older saves. File systems may take long to free large files.
        total_s: Seconds from the beginning to the end on this rank. Asynchronous saves begin once they are staged.
        ranks: On the coordinator, all ranks in the order of their numbers; empty on others.
        files_swept: Data files of older saves that the commit removed.
        warnings: What went wrong after the commit and did not undo it.
    """

    path: str
    save_id: str
    global_plan_s: float = 0.0
    begin_s: float = 0.0
    wait_s: float = 0.0
    assemble_s: float = 0.0
    commit_s: float = 0.0
    sweep_s: float = 0.0
    total_s: float = 0.0
    ranks: tuple[RankSaveReport, ...] = ()
    files_swept: int = 0
    warnings: list[str] = field(default_factory=list)

    @property
    def total_bytes(self) -> int:
        """Bytes that all ``ranks`` wrote; without them, this rank."""
        return sum(of_rank.bytes_written for of_rank in self.ranks) if self.ranks else self.bytes_written

    @property
    def gb_per_s(self) -> float:
        """``total_bytes`` in 10^9 bytes by ``total_s``."""
        return _ratio(self.total_bytes / 1e9, self.total_s)

    @property
    def balance(self) -> float | None:
        """Bytes of the rank that wrote most by the mean of all ranks, at best 1; None if other ranks are not known."""
        if not self.ranks:
            return None
        largest = max(of_rank.bytes_written for of_rank in self.ranks)
        return largest * len(self.ranks) / self.total_bytes if largest else 1.0

    def summary(self) -> str:
        """One line for people. Its phases add up to the whole."""
        phases = {
            "plan": self.plan_s + self.global_plan_s + self.begin_s + self.exchange_s,
            "write": self.write_s + self.wait_s,
            "commit": self.assemble_s + self.commit_s,
            "sweep": self.sweep_s,
        }
        notes = [_in_words(phases)]
        if self.balance is not None and len(self.ranks) > 1:
            notes.append(f"largest rank {self.balance:.2f}x the mean")
        if self.plan.cache != "off":
            notes.append(f"plan cache {self.plan.cache}")
        return (
            f"saved {self.path}: {size_text(self.total_bytes)} by {_who(self)} in {_duration(self.total_s)} "
            f"({_rate(self.gb_per_s)}; {'; '.join(notes)})"
        )

    def to_json(self) -> str:
        """All of it as a JSON object: fields under their names, ``total_bytes``, ``gb_per_s`` and ``balance``."""
        return _to_json(self, total_bytes=self.total_bytes, gb_per_s=self.gb_per_s, balance=self.balance)


@dataclass(frozen=True, kw_only=True)
class RankLoadReport:
    """What one rank did until all that it wanted was where it belongs.

    The phases ``metadata_s``, ``plan_s``, ``exchange_s``, ``read_s`` and ``objects_s`` follow one another.

    Attributes:
        rank: Number of the rank in the load.
        num_boxes: Stored boxes that were read into tensors or buffers.
        num_files: Data files that were opened.
        bytes_wanted: Bytes of those boxes.
        bytes_read: Bytes that this rank read: whole blocks of 256 KiB, each once.
        bytes_received: Bytes that another rank read for this one, and sent.
        seconds: Reading, verifying and scattering, of tensors and objects.
        metadata_s: Seconds of reading ``.metadata``.
        plan_s: Seconds from there until this rank's own plan was ready.
        exchange_s: Seconds from there until all ranks had agreed on what to read.
        read_s: Seconds of bringing tensors to where they belong.
        objects_s: Seconds of reading and unpacking all that is not a tensor.
    """

    rank: int = 0
    num_boxes: int = 0
    num_files: int = 0
    bytes_wanted: int = 0
    bytes_read: int = 0
    bytes_received: int = 0
    seconds: float = 0.0
    metadata_s: float = 0.0
    plan_s: float = 0.0
    exchange_s: float = 0.0
    read_s: float = 0.0
    objects_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class LoadReport(RankLoadReport):
    """One rank's part of a load; on the coordinator, all of it.

    The phases, and ``wait_s`` after them, are together ``total_s``.

    Attributes:
        path: Directory of the checkpoint.
        save_id: 32 hex digits.
        reading: ``independent``, or ``cooperative`` where the ranks shared it.
        wait_s: Seconds of waiting at the end: where ranks share their reading, until none needs this one any more; on
            the coordinator, if it knows the ``ranks``, until all had what they wanted.
        total_s: Seconds from the beginning to the end on this rank.
        ranks: On the coordinator, all ranks in the order of their numbers; empty on others. Empty also where not all
            ranks were certain to come to tell it: the reader is wrapped, its ``read_data`` or ``finish_plan`` of the
            planner is overridden, or each rank read what it had saved without collectives.
        missing_keys: Asked for, and not in the checkpoint: what ``allow_partial_load=True`` left as it was. On the
            coordinator those of any rank, on the others of this rank; 256 at most. Of a planner that is not ours they
            are not known.
        num_missing_keys: How many there are; on the coordinator at least so many, if ranks that lack more than 256 lack
            different ones.
        unexpected_keys: In the checkpoint, and no rank asked for them, though some asked for others of their top-level
            part (``optimizer`` of ``optimizer.state.0.step``); 256 at most. On the coordinator; empty on others, but
            where each rank read what it had saved without collectives.
        num_unexpected_keys: How many there are.
    """

    path: str
    save_id: str
    reading: str = "independent"
    wait_s: float = 0.0
    total_s: float = 0.0
    ranks: tuple[RankLoadReport, ...] = ()
    missing_keys: tuple[str, ...] = ()
    num_missing_keys: int = 0
    unexpected_keys: tuple[str, ...] = ()
    num_unexpected_keys: int = 0

    @property
    def total_bytes_wanted(self) -> int:
        """``bytes_wanted`` of all ``ranks``; without them, of this rank."""
        return sum(of_rank.bytes_wanted for of_rank in self.ranks) if self.ranks else self.bytes_wanted

    @property
    def total_bytes_read(self) -> int:
        """``bytes_read`` of all ``ranks``; without them, of this rank."""
        return sum(of_rank.bytes_read for of_rank in self.ranks) if self.ranks else self.bytes_read

    @property
    def gb_per_s(self) -> float:
        """``total_bytes_wanted`` in 10^9 bytes by ``total_s``."""
        return _ratio(self.total_bytes_wanted / 1e9, self.total_s)

    @property
    def read_amplification(self) -> float:
        """``total_bytes_read`` by ``total_bytes_wanted``; 0 if nothing was wanted. Below 1 where ranks share."""
        return _ratio(self.total_bytes_read, self.total_bytes_wanted)

    def summary(self) -> str:
        """One line for people. Its phases add up to the whole."""
        phases = {
            "metadata": self.metadata_s,
            "plan": self.plan_s + self.exchange_s,
            "read": self.read_s,
            "objects": self.objects_s,
            "wait": self.wait_s,
        }
        notes = [_in_words(phases), f"read {self.read_amplification:.2f}x what was wanted"]
        if self.num_missing_keys:
            notes.append(f"{self.num_missing_keys:,} keys not in the checkpoint")
        if self.num_unexpected_keys:
            notes.append(f"{self.num_unexpected_keys:,} keys not asked for")
        return (
            f"loaded {self.path}: {size_text(self.total_bytes_wanted)} by {_who(self)} in {_duration(self.total_s)} "
            f"({_rate(self.gb_per_s)}; {'; '.join(notes)})"
        )

    def to_json(self) -> str:
        """All of it as a JSON object: fields under their names, and the properties but ``summary``."""
        return _to_json(
            self,
            total_bytes_wanted=self.total_bytes_wanted,
            total_bytes_read=self.total_bytes_read,
            gb_per_s=self.gb_per_s,
            read_amplification=self.read_amplification,
        )


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that is not as it was written.

    Attributes:
        file: Name in the directory of the checkpoint.
        section: ``metadata``, ``file`` (missing or unreadable), ``header``, ``records`` or ``block table or trailer``.
        offset: First byte in doubt, from the start of the file, if that is known.
        num_bytes: How many, if that is known: a checksum covers 256 KiB.
        fqns: Keys with bytes there.
        message: What was found, and what was wanted.
    """

    file: str
    section: str
    offset: int | None
    num_bytes: int | None
    fqns: list[str]
    message: str


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """What ``verify`` found.

    Attributes:
        path: Directory of the checkpoint.
        save_ids: 32 hex digits; one, or one a rank that saved without collectives.
        num_files: Data files that were read.
        num_records: Tensors and objects in them.
        bytes_checked: Bytes of data files that were compared with checksums.
        bytes_unchecked: Of another writer's records: bytes that have no checksum. 0 of our own checkpoints.
        problems: None if the checkpoint is whole; a thousand at most.
        unreferenced: Names of data files that no commit mark refers to. They do the checkpoint no harm, but take space;
            the next save removes those of our naming. None while a save may be under way.
        notes: What says that a save may be under way, and files that may be its own.
    """

    path: str
    save_ids: list[str]
    num_files: int
    num_records: int
    bytes_checked: int
    problems: list[Problem]
    bytes_unchecked: int = 0
    unreferenced: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        """Is every byte what was written?"""
        return not self.problems

    def raise_if_damaged(self) -> None:
        """Raises a CorruptCheckpointError that says all problems."""
        if self.problems:
            lines = [f"{p.file}, {p.section}{_keys(p)}: {p.message}" for p in self.problems]
            raise CorruptCheckpointError(
                f"verify({self.path}): {len(lines)} problems\n" + "\n".join(lines),
                str(Path(self.path) / self.problems[0].file),
            )


def _keys(problem: Problem) -> str:
    return f" of {', '.join(map(repr, problem.fqns))}" if problem.fqns else ""


def _ratio(value: float, by: float) -> float:
    return value / by if by > 0 else 0.0


def _who(report: SaveReport | LoadReport) -> str:
    """Did what the report says: 4 ranks."""
    if not report.ranks:
        return f"rank {report.rank}"
    return "1 rank" if len(report.ranks) == 1 else f"{len(report.ranks)} ranks"


def _to_json(report: SaveReport | LoadReport, **derived: float | None) -> str:
    return json.dumps({**dataclasses.asdict(report), **derived}, allow_nan=False)


def size_text(num_bytes: int) -> str:
    """In words: 1.07 GB."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.2f} {unit}"
    return f"{num_bytes} bytes"


def _rate(gb_per_s: float) -> str:
    return f"{gb_per_s:.2f} GB/s" if gb_per_s < 10 else f"{gb_per_s:.0f} GB/s"


def _duration(seconds: float) -> str:
    """In words: 31 ms."""
    if seconds >= 1.0:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.1f} ms"


def _in_words(phases: dict[str, float]) -> str:
    return ", ".join(f"{name} {_duration(seconds)}" for name, seconds in phases.items())
