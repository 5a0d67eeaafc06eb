# SPDX-License-Identifier: Apache-2.0
"""What a save or a load did, as this rank saw it, and what a check found."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from bytecheckpoint.errors import CorruptCheckpointError

__all__ = ["LoadReport", "PlanReport", "Problem", "SaveReport", "VerifyReport"]


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
class SaveReport:
    """One rank's part of a committed or handed-in save.

    Attributes:
        path: Directory of the checkpoint.
        save_id: 32 hex digits, drawn by the coordinator; "" on other ranks, which are not told.
        num_records: Records this rank wrote.
        bytes_written: Bytes of this rank's files.
        stage_s: Seconds spent copying, summing and waiting for slots.
        flush_s: Seconds spent waiting for the last writes.
        sync_s: Seconds spent in fsync.
        commit_s: Seconds of the commit; 0 on ranks that do not coordinate.
        files_swept: Data files of older saves that the commit removed.
        warnings: What went wrong after the commit and did not undo it.
    """

    path: str
    save_id: str
    num_records: int = 0
    bytes_written: int = 0
    stage_s: float = 0.0
    flush_s: float = 0.0
    sync_s: float = 0.0
    commit_s: float = 0.0
    files_swept: int = 0
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """One rank's part of a load.

    Attributes:
        path: Directory of the checkpoint.
        save_id: 32 hex digits.
        num_boxes: Stored boxes that were read into tensors or buffers.
        num_files: Data files that were opened.
        bytes_wanted: Bytes of those boxes.
        bytes_read: Bytes read for them: whole blocks of 256 KiB, each once.
        seconds: Reading, verifying and scattering.
    """

    path: str
    save_id: str
    num_boxes: int = 0
    num_files: int = 0
    bytes_wanted: int = 0
    bytes_read: int = 0
    seconds: float = 0.0


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
        problems: None if the checkpoint is whole; a thousand at most.
    """

    path: str
    save_ids: list[str]
    num_files: int
    num_records: int
    bytes_checked: int
    problems: list[Problem]

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
