# SPDX-License-Identifier: Apache-2.0
"""Where a conversion writes, and how all of it gets its name at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bytecheckpoint.convert.ranks import Ranks
from bytecheckpoint.convert.source import Opened, Source
from bytecheckpoint.convert.target import Target, TargetPiece
from bytecheckpoint.convert.workers import run_pieces

__all__ = ["Conversion", "Destination"]


@dataclass(frozen=True)
class Conversion:
    """One conversion, as planned.

    Attributes:
        job: What every process needs to know of the source.
        opened: The source, opened in this process.
        made: What is written.
        ranks: Who shares the work.
        workers: Number of processes of each rank.
        verify: Whether to read back what was written.
        progress: Called with the bytes that this rank has written, and all that it is to write; None: nobody asks.
    """

    job: Source
    opened: Opened
    made: Target
    ranks: Ranks
    workers: int
    verify: bool
    progress: Callable[[int, int], None] | None

    def run(self, pieces: Sequence[TargetPiece], folder: Path, *, verify: bool) -> None:
        """Writes pieces of the target.

        Another writer may write the files of the source in place while they are read, so they are compared afterwards.

        Args:
            pieces: What this rank writes.
            folder: Where the pieces go, or the notes of what was uploaded.
            verify: Whether to read back each of them.
        """
        total = bytes_of(pieces)  # ranks have about equal shares
        tell = self.progress
        run_pieces(
            self.job,
            pieces,
            folder,
            self.workers,
            verify=verify,
            progress=None if tell is None else lambda now: tell(now, total),
        )
        self.job.check_unchanged(self.opened)


class Destination(Protocol):
    """A path or URL that is to become a checkpoint."""

    def check(self, to: str, *, resume: bool, is_shared: bool) -> None:
        """Refuses what cannot be done here, and what is there already.

        Args:
            to: Format of the target.
            resume: Whether an interrupted conversion is to go on.
            is_shared: Whether several ranks convert.

        Raises:
            CheckpointExistsError: Something is there.
            ConfigError: It cannot be done here.
            StorageError: The storage refused.
            UnsupportedError: Nothing can be written here.
        """

    def write(self, work: Conversion, *, resume: bool) -> int:
        """Writes all of it, and gives it its name. Returns how many pieces were left to write.

        Raises:
            CheckpointError: It was not converted. At a path, what is finished stays for ``resume``.
        """


def bytes_of(pieces: Sequence[TargetPiece]) -> int:
    """Returns about how many bytes pieces have on disk."""
    return sum(piece.num_bytes for piece in pieces)
