# SPDX-License-Identifier: Apache-2.0
"""The cases of saves that end at a named point: at which hit, what was at the path before, and what must load then."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

from support.fork_server import ForkServer
from support.jobs import run_job
from support.saves import CONFIG, SaveRequest, names_in, save

from faults.rehearsal import NEW, OLD

__all__ = ["CASES", "Case", "Start", "Starts", "prepare"]


class Start(Enum):
    """The content of the path before a save."""

    NOTHING = "nothing"
    CHECKPOINT = "checkpoint"
    REMAINS = "remains"  # a checkpoint, and the tmp and data files of a killed save
    PARTS = "parts"  # a checkpoint whose ranks each saved their part, without collectives


@dataclass(frozen=True)
class Case:
    """The end of a save at the ``hit``-th hit of ``point``.

    Attributes:
        survives: Generation that must load afterwards, if there was a checkpoint before.
        file_a_record: True if the save writes several files and slots, so that it is in the middle of a loop at a hit.
        fails: True if the save fails when all is written, and is undone.
    """

    point: str
    survives: int = OLD
    hit: int = 1
    start: Start = Start.CHECKPOINT
    file_a_record: bool = False
    fails: bool = False

    def __str__(self) -> str:
        over = f"-{self.start.value}" * (self.start != Start.CHECKPOINT)
        return f"{self.point}:{self.hit}{over}" + "-file_a_record" * self.file_a_record

    @property
    def found_after(self) -> int | None:
        """Returns the generation that is there afterwards, or None if there is no checkpoint."""
        return self.survives if self.survives == NEW or self.start != Start.NOTHING else None

    def phase(self) -> str:
        """Returns the phase of the save: the first word of the point, and whether it is before or after the commit."""
        return f"{self.point.partition('_')[0]} {self.survives}"

    @property
    def told(self) -> list[str]:
        """Returns the phases that are known of the saves that were killed, as ``read_failures`` tells them."""
        before = ["write"] * (self.start == Start.REMAINS)
        if self.survives == NEW or self.point.startswith(("begin_directory", "begin_tmp_created", "abort_")):
            return before
        if self.point.startswith(("begin_", "sweep_")):
            return [*before, "begin"]
        has_metadata = self.point.startswith("commit_") and self.point != "commit_checked"
        return [*before, "commit" if has_metadata else "write"]

    @property
    def is_of_every_rank(self) -> bool:
        """Whether every rank reaches the point; otherwise only the coordinator does."""
        return self.point.startswith("write_")

    @property
    def all_have_written(self) -> bool:
        """Whether the coordinator needs no other rank any more when it reaches the point."""
        return self.survives == NEW or self.point.startswith(("commit_", "abort_"))

    def env(self, action: str = "") -> dict[str, str]:
        return {"BCP_FAILPOINT": f"{self.point}:{self.hit}{action}"}

    def request(self, path: Path) -> SaveRequest:
        """Returns a request for generation NEW. A first save has overwrite=False and commits by another system call."""
        return SaveRequest(
            path,
            NEW,
            writer={"single_file_per_rank": not self.file_a_record, "overwrite": self.start != Start.NOTHING},
            config=replace(CONFIG, commit_deadline_s=0.0) if self.fails else CONFIG,
        )


_BEFORE_COMMIT = (
    "begin_directory",
    "begin_tmp_created",
    "begin_locked",
    "begin_looked",
    "begin_swept",
    "begin_done",
    "write_file_created",
    "write_file_reserved",
    "write_records_done",
    "write_data",
    "write_data_done",
    "write_file_cut",
    "write_file_synced",
    "write_files_synced",
    "write_directory_synced",
    "commit_checked",
    "commit_metadata_filled",
    "commit_metadata_written",
    "commit_metadata_synced",
    "commit_decided",
)
_AFTER_COMMIT = ("commit_renamed", "commit_directory_synced", "commit_done")
_ANYWHERE = (
    *(Case(point) for point in _BEFORE_COMMIT),
    *(Case(point, survives=NEW) for point in _AFTER_COMMIT),
    # A sweep runs twice: at begin, and after the commit.
    Case("sweep_listed"),
    Case("sweep_listed", survives=NEW, hit=2),
    Case("abort_tmp_removed", fails=True),
    Case("abort_file_removed", fails=True),
    Case("write_file_created", hit=3, file_a_record=True),
    Case("write_records_done", hit=2, file_a_record=True),
    Case("write_data", hit=2, file_a_record=True),
    Case("write_file_cut", hit=2, file_a_record=True),
    Case("write_file_synced", hit=2, file_a_record=True),
)
CASES = (
    *_ANYWHERE,
    *(replace(case, start=Start.NOTHING) for case in _ANYWHERE),
    Case("begin_directory_made", start=Start.NOTHING),
    Case("begin_directory_made", start=Start.NOTHING, hit=2),
    # The sweep at the beginning has something to remove only if an earlier save died.
    Case("sweep_listed", start=Start.REMAINS),
    Case("sweep_tmp_removed", start=Start.REMAINS),
    Case("sweep_directory_synced", start=Start.REMAINS),
    Case("sweep_file_removed", start=Start.REMAINS),
    Case("sweep_directory_synced", survives=NEW),
    Case("sweep_directory_synced", survives=NEW, hit=2, start=Start.REMAINS),
    Case("sweep_file_removed", survives=NEW),
    Case("sweep_file_removed", survives=NEW, hit=2, start=Start.REMAINS),
    Case("rank_metadata_removed", survives=NEW, start=Start.PARTS),
)


def prepare(start: Start, path: Path, server: ForkServer, failpoint_server: ForkServer, num_ranks: int = 1) -> None:
    """Makes at ``path`` what a save is to find there: generation OLD of ``num_ranks``, and the rest of ``start``."""
    if start == Start.NOTHING:
        return
    run_job(server, SaveRequest(path, OLD, use_collectives=start != Start.PARTS), num_ranks)
    if start == Start.REMAINS:
        before = names_in(path)
        dies_at = Case("commit_checked").env()
        assert failpoint_server.run(save, SaveRequest(path, 77), env=dies_at).was_killed
        assert len(names_in(path)) >= len(before) + 2


@dataclass
class Starts:
    """Does what ``prepare`` does, but makes each start once and copies it, which takes less time than a save."""

    server: ForkServer
    failpoint_server: ForkServer
    directory: Path
    _made: dict[tuple[Start, int], Path] = field(default_factory=dict)

    def copy(self, start: Start, root: Path, num_ranks: int = 1) -> Path:
        """Returns the path of the checkpoint below ``root``. For Start.NOTHING its parent is missing too."""
        path = root / "new" / "ckpt"
        if (start, num_ranks) not in self._made:
            template = self.directory / f"{start.value}{num_ranks}"
            prepare(start, template, self.server, self.failpoint_server, num_ranks)
            self._made[start, num_ranks] = template
        if start != Start.NOTHING:
            shutil.copytree(self._made[start, num_ranks], path)
        return path
