# SPDX-License-Identifier: Apache-2.0
"""Which step of a run is the newest, for everything that asks. Needs no torch.

The newest is the step that the tracker names, if the run has one. Then comes the step that was committed last (see
``commit_times``), and among those that were committed at the same time the one of the highest number. So a run that
went back to an earlier step and saved from there goes on from what it saved, not from the steps that it gave up.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from bytecheckpoint.checkpoint.commit_times import Committed, commit_times, in_spite_of_copies, may_be_a_copy
from bytecheckpoint.checkpoint.tracker_text import tracker_text
from bytecheckpoint.listing import listed
from bytecheckpoint.storage.folders import folder_at
from bytecheckpoint.storage.paths import Place
from bytecheckpoint.storage.step_names import step_number

__all__ = ["CommitOrder", "Step", "commit_order"]

# Number and path of a step folder.
Step = tuple[int, str]

# The name that the tracker stands for, if folders of several names have the number.
_TRACKED_NAME = "global_step_{}"


@dataclass(frozen=True)
class CommitOrder:
    """The steps of a run, the newest first.

    Attributes:
        steps: The steps that have a commit mark.
        by_time: The same steps, without regard to the tracker.
        unmarked: The others, the highest number first: nothing is committed there.
        tracked: The step that the tracker names, if it is one of ``steps``.
        by_mark: The same steps, those with the youngest commit marks first, whether they were copied or not.
        by_begin: Whether the begins of saves alone, by the clocks of their hosts, decided which is the first of
            ``by_time``.
    """

    steps: tuple[Step, ...]
    by_time: tuple[Step, ...]
    unmarked: tuple[Step, ...]
    tracked: Step | None
    by_mark: tuple[Step, ...]
    by_begin: bool

    def is_newer(self, step: Step, than: Step) -> bool:
        """Whether a step is newer than another; by their numbers if either has no commit mark."""
        if step in self.steps and than in self.steps:
            return self.steps.index(step) < self.steps.index(than)
        return step[0] > than[0]

    def doubts_about(self, newest: Step) -> str:
        """Returns which steps another order would take for newer than ``newest``, and why that is taken; "" if none.

        Args:
            newest: The newest of ``steps`` that is whole.
        """
        behind = self.steps[self.steps.index(newest) + 1 :]
        higher = [_name(step) for step in sorted(behind) if step[0] > newest[0]]
        is_tracked = newest == self.tracked
        doubts = []
        if higher:
            doubts.append(
                f"{listed(higher)} {'has a higher number' if len(higher) == 1 else 'have higher numbers'}: a run "
                "went back to an earlier step and gave that up, or it is of another run"
            )
        if is_tracked and self.by_time[0] != newest:
            doubts.append(f"{_name(self.by_time[0])} was committed last")
        if self.by_begin and not is_tracked and self.by_mark[0] in behind:
            doubts.append(
                f"the commit mark of {_name(self.by_mark[0])} is younger, though its save began earlier: the steps "
                "were copied, or the clocks of hosts differ"
            )
        time = "the begin of its save" if self.by_begin else "the time of its commit"
        by = "because the tracker names it" if is_tracked else f"by {time}"
        return f"{_name(newest)} is the newest, {by}, but {', and '.join(doubts)}" if doubts else ""


def commit_order(run: Place, folders: Iterable[Step], tracker: str | None = None) -> CommitOrder:
    """Returns the order of step folders of ``run``.

    If the numbers ascend, too, it looks into the newest only: unless that was copied, it is the newest.

    Args:
        run: Folder of the run.
        folders: Its step folders.
        tracker: What the tracker says; None reads it.

    Raises:
        StorageError: The tracker, or the times in a store, cannot be read.
    """
    by_number = sorted(folders, key=lambda step: (step[0], os.path.basename(step[1])), reverse=True)  # noqa: PTH119
    times = commit_times([path for _, path in by_number])
    marked = tuple(step for step in by_number if step[1] in times)
    unmarked = tuple(step for step in by_number if step[1] not in times)

    def in_order(key: Mapping[str, int] | Mapping[str, Committed]) -> tuple[Step, ...]:
        return tuple(sorted(marked, key=lambda step: key[step[1]], reverse=True))  # of equal keys, the order stays

    by_mark = by_time = in_order(times)
    by_begin = False
    in_doubt = by_mark != marked or (len(marked) > 1 and may_be_a_copy(marked[0][1], times[marked[0][1]]))
    if in_doubt and not folder_at(run).orders_commits:
        committed = in_spite_of_copies(times)
        by_time = in_order(committed)
        youngest, newest = committed[by_mark[0][1]], committed[by_time[0][1]]
        by_begin = not youngest.is_by_files and 0 < youngest.began < newest.began
    number = step_number(tracker_text(run) if tracker is None else tracker)
    named = [step for step in by_time if step[0] == number]
    tracked = next((step for step in named if _name(step) == _TRACKED_NAME.format(number)), named[0] if named else None)
    steps = by_time if tracked is None else (tracked, *(step for step in by_time if step != tracked))
    return CommitOrder(steps, by_time, unmarked, tracked, by_mark, by_begin)


def _name(step: Step) -> str:
    return step[1].rpartition("/")[2]
