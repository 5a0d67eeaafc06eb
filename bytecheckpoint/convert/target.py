# SPDX-License-Identifier: Apache-2.0
"""What a format must offer to be a target of conversions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from bytecheckpoint.convert.source import Opened, Source

__all__ = ["Target", "TargetPiece"]


class TargetPiece(Protocol):
    """A part of a target that one process writes. It is sent to that process."""

    @property
    def name(self) -> str:
        """Its name, unique in the target."""

    @property
    def num_bytes(self) -> int:
        """About how many bytes it has on disk."""

    @property
    def is_verified_alone(self) -> bool:
        """Whether ``write_file`` writes it and reads it back; others are verified with all of the target."""

    def is_done(self, folder: Path) -> bool:
        """Whether it is whole and on disk in ``folder``."""

    def write(self, source: Source, opened: Opened, folder: Path, verify: bool, tell: Callable[[int], object]) -> None:
        """Writes it into ``folder``.

        Args:
            source: What is converted.
            opened: The same, opened in this process.
            folder: Folder of what was not published yet.
            verify: Whether to read it back and compare, if it can be verified by itself.
            tell: Called with the bytes that were written so far.

        Raises:
            CheckpointError: It could not be read or written.
            CorruptCheckpointError: What was read back is not what was written.
        """


class Target(Protocol):
    """All that is written."""

    @property
    def is_file(self) -> bool:
        """Whether the target is the one file that its one piece writes, and not a folder."""

    @property
    def pieces(self) -> Sequence[TargetPiece]:
        """What the processes share."""

    def check(self, opened: Opened) -> None:
        """Refuses what this target cannot hold, before anything is written.

        Raises:
            ConfigError: Keys have no place together in its nested state dict.
        """

    def identity(self) -> bytes:
        """Returns bytes that differ for targets of which pieces must not be mixed."""

    def finish(self, opened: Opened, folder: Path, target: Path, verify: bool) -> None:
        """Writes what makes one checkpoint of the pieces, all of which are done, and removes what does not belong.

        Args:
            opened: What was converted.
            folder: Folder of the pieces.
            target: The path that it will have.
            verify: Whether to verify all that was not verified piece by piece.
        """
