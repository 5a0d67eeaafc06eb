# SPDX-License-Identifier: Apache-2.0
"""How step folders are removed, on whatever storage they are. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from bytecheckpoint.storage.step_folder import StepFolder

__all__ = ["Outcome", "StepRemoval"]

_MAX_FAILURES = 5


@dataclass
class Outcome:
    """What happened to a folder that was to be removed.

    Attributes:
        is_loadable: Whether its commit mark is still there.
        bytes_freed: Bytes of the files whose names were removed, without those that have other names left.
        skipped: Why the folder was left alone; "" if it was not.
        failures: The first few deletes that failed.
        stays: What was left in the folder on purpose.
    """

    is_loadable: bool = True
    bytes_freed: int = 0
    skipped: str = ""
    failures: list[str] = field(default_factory=list)
    stays: list[str] = field(default_factory=list)

    def fail(self, *failures: str) -> None:
        self.failures += failures[: _MAX_FAILURES - len(self.failures)]


class StepRemoval(Protocol):
    """Removes steps of one run. The calls of one prune come in the order in which they stand here."""

    def begin(self, newest: StepFolder) -> list[str]:
        """Notes the time up to which ages are counted.

        Args:
            newest: The newest complete checkpoint of the run.

        Returns:
            What failed. Nothing counts as dead then that only its age shows.
        """

    def is_dead(self, folder: StepFolder, newest: StepFolder) -> bool:
        """Whether nobody will finish a save that has left ``folder`` half."""

    def has_begun(self, folder: StepFolder) -> bool:
        """Whether an earlier removal of ``folder`` had begun, and was interrupted."""

    def bytes_of(self, folder: StepFolder) -> int:
        """Returns what ``remove`` would report as ``bytes_freed``."""

    def secure(self, kept: Sequence[StepFolder], going: Sequence[StepFolder]) -> list[str]:
        """Makes sure that a crash after ``remove`` loses nothing of what stays, and saves journals into the newest.

        Args:
            kept: What stays, the newest first.
            going: What is to be removed.

        Returns:
            What failed without any harm to checkpoints.

        Raises:
            CheckpointError: It is not sure.
        """

    def remove(self, folder: StepFolder) -> Outcome:
        """Removes a step folder that is as it was when it was looked at. What fails is in the outcome."""

    def end(self, paths: Iterable[str]) -> list[str]:
        """Removes what earlier removals have left of folders that nobody sees any more.

        Args:
            paths: Paths of all step folders that were not seen to hold anything.

        Returns:
            What failed.
        """
