# SPDX-License-Identifier: Apache-2.0
"""Reports: what a save or a load did, as this rank saw it, and what ``verify`` found."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path

from bytecheckpoint.errors import CorruptCheckpointError
from bytecheckpoint.listing import table

__all__ = ["LoadReport", "PlanReport", "Problem", "RankLoadReport", "RankSaveReport", "SaveReport", "VerifyReport"]


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """How a planner made its plan.

    Attributes:
        cache: ``hit``: the plan of an earlier save was used again. ``miss``: the plan was made, and kept. ``off``: no
            plans are kept.
        bytes_sent: Bytes of plans that this rank sent to other ranks.
        bytes_received: Bytes of plans that this rank received from other ranks.
        seconds: Seconds that this rank spent in the planner.
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
        num_records: Number of records that the rank wrote.
        bytes_written: Size of the rank's files, in bytes.
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
    num_requests: int = 0
    plan: PlanReport = PlanReport()


@dataclass(frozen=True, kw_only=True)
class SaveReport(RankSaveReport):
    """On the coordinator, a report of the whole committed save; on another rank, of what that rank wrote for it.

    The phases of the coordinator are ``plan_s``, ``global_plan_s``, ``begin_s``, ``exchange_s``, ``write_s``,
    ``wait_s``, ``assemble_s``, ``digest_s``, ``commit_s`` and ``sweep_s``, in this order. They add up to ``total_s``.
    On other ranks, the phases that only the coordinator has are 0.

    Attributes:
        path: Directory of the checkpoint.
        save_id: 32 hex digits, chosen by the coordinator; "" on other ranks, to which it is not sent.
        global_plan_s: Seconds in which the coordinator gathers plans and decides which rank writes what.
        begin_s: Seconds of taking the right to commit: take the lock, remove files of dead saves, reserve disk space.
        wait_s: Seconds of waiting until the other ranks have written and reported their parts.
        assemble_s: Seconds of joining what was planned with what was written.
        digest_s: Seconds of reading back what was written, with ``Config.digest``.
        commit_s: Seconds of the commit: check all files, write ``.metadata``, fsync, rename, fsync.
        sweep_s: Seconds of removing data files of older saves. File systems may take long to free large files.
        total_s: Seconds from the beginning to the end on this rank. An asynchronous save begins when it is staged.
        ranks: On the coordinator, the reports of all ranks, sorted by rank; empty on other ranks.
        digest: The digest of the checkpoint, with ``Config.digest``; else "".
        files_swept: Number of data files of older saves that the commit removed.
        warnings: Problems after the commit, which did not undo it.
    """

    path: str
    save_id: str
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
    def total_requests(self) -> int:
        """Requests to the object store of all ``ranks``, those of the commit included; see ``num_requests``."""
        others = sum(of_rank.num_requests for of_rank in self.ranks if of_rank.rank != self.rank)
        return others + self.num_requests

    @property
    def gb_per_s(self) -> float:
        """``total_bytes`` in units of 10^9 bytes, divided by ``total_s``."""
        return _ratio(self.total_bytes / 1e9, self.total_s)

    @property
    def balance(self) -> float | None:
        """Bytes of the rank that wrote most, divided by the mean of all ranks; 1 is best, None if no ``ranks``."""
        if not self.ranks:
            return None
        largest = max(of_rank.bytes_written for of_rank in self.ranks)
        return largest * len(self.ranks) / self.total_bytes if largest else 1.0

    def summary(self) -> str:
        """One line for people. Its phases add up to the whole."""
        phases = {
            "plan": self.plan_s + self.global_plan_s + self.begin_s + self.exchange_s,
            "write": self.write_s + self.wait_s,
            **({"digest": self.digest_s} if self.digest_s else {}),
            "commit": self.assemble_s + self.commit_s,
            "sweep": self.sweep_s,
        }
        notes = [_in_words(phases)]
        if self.balance is not None and len(self.ranks) > 1:
            notes.append(f"largest rank {self.balance:.2f}x the mean")
        if self.total_requests:
            notes.append(f"{self.total_requests} requests")
        if self.plan.cache != "off":
            notes.append(f"plan cache {self.plan.cache}")
        return (
            f"saved {self.path}: {size_text(self.total_bytes)} by {_who(self)} in {_duration(self.total_s)} "
            f"({_rate(self.gb_per_s)}; {'; '.join(notes)})"
        )

    def to_json(self) -> str:
        """Returns a JSON object of all fields and properties, by name."""
        return _to_json(
            self,
            total_bytes=self.total_bytes,
            total_requests=self.total_requests,
            gb_per_s=self.gb_per_s,
            balance=self.balance,
        )


@dataclass(frozen=True, kw_only=True)
class RankLoadReport:
    """What one rank did until it had everything that it wanted.

    The phases ``metadata_s``, ``plan_s``, ``exchange_s``, ``read_s`` and ``objects_s`` follow one another.

    Attributes:
        rank: Number of the rank in the load.
        num_boxes: Number of stored boxes that were read into tensors or buffers.
        num_files: Number of data files that were opened.
        bytes_wanted: Bytes of these boxes.
        bytes_read: Bytes that this rank read: whole blocks of 256 KiB, each once.
        bytes_received: Bytes that other ranks read for this one, and sent to it.
        seconds: Seconds of reading, verifying and scattering tensors and objects.
        metadata_s: Seconds of reading ``.metadata``.
        plan_s: Seconds from then until this rank's own plan was ready.
        exchange_s: Seconds from then until all ranks had agreed on what to read.
        read_s: Seconds of reading tensors into their places.
        objects_s: Seconds of reading and unpacking everything that is not a tensor.
        num_requests: Number of requests to the object store; 0 for a directory. A request that obstore tried again
            counts once: it does not tell.
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
    num_requests: int = 0


@dataclass(frozen=True, kw_only=True)
class LoadReport(RankLoadReport):
    """On the coordinator, a report of the whole load; on another rank, of that rank's part.

    The phases, with ``wait_s`` after them, add up to ``total_s``.

    Attributes:
        path: Directory of the checkpoint.
        save_id: 32 hex digits.
        reading: ``independent``, or ``cooperative`` where the ranks shared their reading.
        wait_s: Seconds of waiting at the end. Where ranks share their reading, a rank waits until no other rank needs
            it any more. The coordinator, if it knows the ``ranks``, waits until all of them have what they wanted.
        total_s: Seconds from the beginning to the end on this rank.
        ranks: On the coordinator, the reports of all ranks, sorted by rank; empty on other ranks. It is also empty if
            it was not certain that all ranks would report: the reader is wrapped, its ``read_data`` or the planner's
            ``finish_plan`` is overridden, or each rank read what it had saved without collectives.
        missing_keys: Keys that were asked for and are not in the checkpoint, so that ``allow_partial_load=True`` left
            their values as they were; 256 at most. On the coordinator those of all ranks, on another rank its own.
            Unknown, and so empty, with a planner that is not ours.
        num_missing_keys: Number of missing keys. On the coordinator it is a lower bound if several ranks lack more than
            256 keys each, and not the same ones.
        unexpected_keys: Keys of the checkpoint that no rank asked for, although some rank asked for another key of the
            same top-level part (``optimizer`` of ``optimizer.state.0.step``); 256 at most. Only the coordinator has
            them, except that each rank has its own where it read what it had saved without collectives.
        num_unexpected_keys: Number of unexpected keys.
        num_loaded_keys: Number of keys of the checkpoint that any rank asked for. Only the coordinator knows it; it is
            None on the others, except that each has its own where it read what it had saved without collectives.
        bytes_unread: Bytes of what is in the checkpoint and no rank asked for: other keys, and what a ``LoadSpec`` left
            out. None where ``num_loaded_keys`` is None, and for metadata so large that only parts of them were read.
        casts: With a ``LoadSpec``, keys of this rank that were loaded into another dtype: key, stored dtype, dtype of
            the state; 256 at most.
        renamed_keys: With a ``LoadSpec``, keys of the checkpoint that were loaded under another name, and that name;
            256 at most.
        num_renamed_keys: Number of these keys.
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
    num_loaded_keys: int | None = None
    bytes_unread: int | None = None
    casts: tuple[tuple[str, str, str], ...] = ()
    renamed_keys: tuple[tuple[str, str], ...] = ()
    num_renamed_keys: int = 0

    @property
    def total_bytes_wanted(self) -> int:
        """``bytes_wanted`` of all ``ranks``; if ``ranks`` is empty, of this rank."""
        return sum(of_rank.bytes_wanted for of_rank in self.ranks) if self.ranks else self.bytes_wanted

    @property
    def total_bytes_read(self) -> int:
        """``bytes_read`` of all ``ranks``; if ``ranks`` is empty, of this rank."""
        return sum(of_rank.bytes_read for of_rank in self.ranks) if self.ranks else self.bytes_read

    @property
    def total_requests(self) -> int:
        """``num_requests`` of all ``ranks``; if ``ranks`` is empty, of this rank."""
        return sum(of_rank.num_requests for of_rank in self.ranks) if self.ranks else self.num_requests

    @property
    def gb_per_s(self) -> float:
        """``total_bytes_wanted`` in units of 10^9 bytes, divided by ``total_s``."""
        return _ratio(self.total_bytes_wanted / 1e9, self.total_s)

    @property
    def read_amplification(self) -> float:
        """``total_bytes_read`` divided by ``total_bytes_wanted``.

        It is 0 if nothing was wanted, and may be below 1 where ranks share their reading.
        """
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
        if self.total_requests:
            notes.append(f"{self.total_requests} requests")
        if self.num_missing_keys:
            notes.append(f"{self.num_missing_keys:,} keys not in the checkpoint")
        if self.num_unexpected_keys:
            notes.append(f"{self.num_unexpected_keys:,} keys not asked for")
        return (
            f"loaded {self.path}: {size_text(self.total_bytes_wanted)} by {_who(self)} in {_duration(self.total_s)} "
            f"({_rate(self.gb_per_s)}; {'; '.join(notes)})"
        )

    def table(self, most: int = 20) -> str:
        """Returns a table of what was loaded and what was not, for people.

        Args:
            most: The most keys of each kind that are named.
        """
        loaded = (
            []
            if self.num_loaded_keys is None
            else [(f"{self.num_loaded_keys:,} key{'s' * (self.num_loaded_keys != 1)}", "")]
        )
        unread = [] if self.bytes_unread is None else [(size_text(self.bytes_unread), "")]
        return table(
            {
                "loaded": (loaded, 1),
                "not in the checkpoint": ([(key, "") for key in self.missing_keys], self.num_missing_keys),
                "not asked for": ([(key, "") for key in self.unexpected_keys], self.num_unexpected_keys),
                "cast": ([(key, f"{stored} -> {to}") for key, stored, to in self.casts], len(self.casts)),
                "renamed": ([(new, f"from {old}") for old, new in self.renamed_keys], self.num_renamed_keys),
                "not read": (unread, 1),
            },
            most,
        )

    def to_json(self) -> str:
        """Returns a JSON object of all fields and properties, by name."""
        return _to_json(
            self,
            total_bytes_wanted=self.total_bytes_wanted,
            total_bytes_read=self.total_bytes_read,
            total_requests=self.total_requests,
            gb_per_s=self.gb_per_s,
            read_amplification=self.read_amplification,
        )


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One place in a checkpoint that differs from what was written.

    Attributes:
        file: Name of the file in the directory of the checkpoint.
        section: ``metadata``, ``file`` (missing or unreadable), ``header``, ``records`` or ``block table or trailer``.
        offset: Offset of the first byte in doubt from the start of the file; None if that is not known.
        num_bytes: Number of bytes in doubt, since a checksum covers 256 KiB; None if that is not known.
        fqns: Keys whose bytes lie there.
        message: What was expected, and what was found.
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
        save_ids: Ids of the save, 32 hex digits each: one, or one for each rank that saved without collectives.
        num_files: Number of data files that were read.
        num_records: Number of tensors and objects in them.
        bytes_checked: Bytes of data files that were compared with checksums.
        bytes_unchecked: Bytes of another writer's records that have no checksum. 0 for our own checkpoints.
        problems: The problems that were found, a thousand at most; empty if the checkpoint is whole.
        unreferenced: Names of data files that no commit mark refers to. They do not harm the checkpoint, but take
            space. The next save removes those that are named as ours are. Empty while a save may be under way.
        notes: Signs that a save may be under way, and the files that may belong to it. Over HTTP, that unreferenced
            files were not looked for.
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
        """Whether every byte is what was written."""
        return not self.problems

    def raise_if_damaged(self) -> None:
        """Raises a CorruptCheckpointError that lists all problems, if there are any."""
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
    """Returns who did what the report says, for example "4 ranks"."""
    if not report.ranks:
        return f"rank {report.rank}"
    return "1 rank" if len(report.ranks) == 1 else f"{len(report.ranks)} ranks"


def _to_json(report: SaveReport | LoadReport, **derived: float | None) -> str:
    return json.dumps({**dataclasses.asdict(report), **derived}, allow_nan=False)


def size_text(num_bytes: int) -> str:
    """Returns a size for people, for example "1.07 GB"."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.2f} {unit}"
    return f"{num_bytes} bytes"


def _rate(gb_per_s: float) -> str:
    return f"{gb_per_s:.2f} GB/s" if gb_per_s < 10 else f"{gb_per_s:.0f} GB/s"


def _duration(seconds: float) -> str:
    """Returns a duration for people, for example "31 ms"."""
    if seconds >= 1.0:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.1f} ms"


def _in_words(phases: dict[str, float]) -> str:
    return ", ".join(f"{name} {_duration(seconds)}" for name, seconds in phases.items())
