# SPDX-License-Identifier: Apache-2.0
"""What ``verify`` found."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from bytecheckpoint.errors import CorruptCheckpointError
from bytecheckpoint.listing import listed

__all__ = ["Problem", "VerifyReport"]

_MOST_SAID = 4


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
        notes: Signs that a save may be under way, and the files that may belong to it. The other steps that have a
            damaged file, too. Over HTTP, that unreferenced files were not looked for.
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
        """Raises a CorruptCheckpointError that says the first problems and how many there are, if there are any."""
        if self.problems:
            said = [f"{p.file}, {p.section}{_keys(p)}: {p.message}" for p in self.problems]
            raise CorruptCheckpointError(
                f"verify({self.path}): {listed(said, _MOST_SAID)}; `bcp verify` lists all problems",
                str(Path(self.path) / self.problems[0].file),
            )


def _keys(problem: Problem) -> str:
    return f" of {', '.join(map(repr, problem.fqns))}" if problem.fqns else ""
