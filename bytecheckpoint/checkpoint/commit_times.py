# SPDX-License-Identifier: Apache-2.0
"""When the checkpoint of a step folder was committed. Needs no torch.

No format says it, so the storage does: it is the time of the last change of the commit mark, which a save writes last
and nobody changes afterwards. Of several marks it is that of the model, which is committed last, or the latest of the
ranks that committed by themselves. torch_checkpointing writes its mark before the ranks have met; no other time is
better.

A copy (``cp -r``, ``rsync`` without ``-t``, an upload) has the times of the copying. It is known by a commit mark that
is older than a file that it names, since no save writes in that order; or by marks in another order than that in which
the saves began, which their ids say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.native import _core
from bytecheckpoint.storage import checkpointing_steps
from bytecheckpoint.storage.folders import folder_at
from bytecheckpoint.storage.names import is_mark, rank_of_mark
from bytecheckpoint.storage.olmo_steps import MODEL_AND_OPTIM
from bytecheckpoint.storage.paths import as_place, below
from bytecheckpoint.storage.save_ids import begin_of_save

__all__ = ["Committed", "commit_times", "in_spite_of_copies", "may_be_a_copy"]

_MARK = ".metadata"
_COMMITTED_LAST = ("model", MODEL_AND_OPTIM)  # of a step in parts, and of one of OLMo-core
_AN_HOUR = 3_600 * 10**9  # nanoseconds: no save takes longer, and the clocks of hosts agree better


def commit_times(paths: Sequence[str]) -> dict[str, int]:
    """Returns when the checkpoints in step folders were committed, in nanoseconds since 1970; without those of none.

    Args:
        paths: Step folders: paths, or URLs of one store.

    Raises:
        StorageError: The store refused to say.
    """
    num_at_once = min(len(paths), folder_at(paths[0]).num_at_once) if paths else 0
    if num_at_once > 1:
        with ThreadPoolExecutor(num_at_once, "bytecheckpoint-times") as pool:
            times = [*pool.map(_time_of_commit, paths)]
    else:
        times = [*map(_time_of_commit, paths)]
    return {path: time for path, time in zip(paths, times, strict=True) if time is not None}


@dataclass(frozen=True, order=True)
class Committed:
    """Place of a step in the order of commits.

    Attributes:
        by: When it was committed at the latest, in nanoseconds since 1970: of a copy, the end of the copying.
        began: When its save began, if it is a copy and all that were copied with it say that; 0 otherwise.
        is_by_files: Whether the times of files show that it is a copy, and not only the clocks of hosts.
    """

    by: int
    began: int = 0
    is_by_files: bool = field(default=False, compare=False)


def in_spite_of_copies(times: Mapping[str, int]) -> dict[str, Committed]:
    """Returns the order of commits without regard to the times of copies, which say nothing of it.

    They were committed before the end of the copying. A step whose time lies between the begin and the end of the
    copying was copied, too, though its mark came last.

    Args:
        times: What ``commit_times`` returned.
    """
    saves = {path: _save_in(path) for path in times}
    by_files = [path for path, time in times.items() if saves[path].last_file > time]
    of_files = (
        [(min(times[path] for path in by_files), max(saves[path].last_file for path in by_files))] if by_files else []
    )
    of_begins = _in_another_order(times, {path: save.began for path, save in saves.items() if save.began})
    committed = {path: Committed(time) for path, time in times.items()}
    for begin, end in _joined([*of_files, *of_begins]):
        copies = [path for path, time in times.items() if begin <= time <= end]
        is_known = all(saves[path].began for path in copies if saves[path].can_be_read)
        for path in copies:
            is_by_files = any(first <= times[path] <= last for first, last in of_files)
            committed[path] = Committed(end, saves[path].began if is_known else 0, is_by_files)
    return committed


def may_be_a_copy(path: str, time: int) -> bool:
    """Whether the commit mark of a step may be younger than its commit; one look at this step alone.

    Args:
        path: The step folder.
        time: What ``commit_times`` returned for it.
    """
    save = _save_in(path)
    return save.last_file > time or 0 < save.began < time - _AN_HOUR


def _in_another_order(times: Mapping[str, int], began: Mapping[str, int]) -> list[tuple[int, int]]:
    """Returns the first and the last time of commit of each group of steps whose saves began in another order."""
    paths = sorted(began, key=lambda path: (times[path], began[path]))
    begins = [began[path] for path in paths]
    latest = [*accumulate(begins, max)]
    earliest = [*accumulate(reversed(begins), min)][::-1]
    groups: list[tuple[int, int]] = []
    first = 0
    for last, path in enumerate(paths):
        if last + 1 < len(paths) and latest[last] > earliest[last + 1]:
            continue  # a later one began earlier
        if last > first:
            groups.append((times[paths[first]], times[path]))
        first = last + 1
    return groups


def _joined(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the spans of time, those as one that overlap."""
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def _time_of_commit(path: str) -> int | None:
    place = as_place(path)
    for folder in (place, *(below(place, name) for name in _COMMITTED_LAST)):
        changed = folder_at(folder).changed(_MARK)
        if changed is not None:
            return changed
    of_another = folder_at(place).changed(checkpointing_steps.MARK) if isinstance(place, Path) else None
    if of_another is not None:
        return of_another
    return max((time for name, time in folder_at(place).file_times().items() if is_mark(name)), default=None)


@dataclass(frozen=True)
class _SaveTimes:
    """The save of a step.

    Attributes:
        last_file: When the last of the data files was changed that the marks name; 0 if that is not known.
        began: When it began, by the clock of its coordinator; 0 if that is not known. Both in nanoseconds since 1970.
        can_be_read: Whether a mark can be read.
    """

    last_file: int = 0
    began: int = 0
    can_be_read: bool = False


def _save_in(path: str) -> _SaveTimes:
    save = _SaveTimes()
    for folder in (path, *(f"{path}/{name}" for name in _COMMITTED_LAST)):
        try:
            times = folder_at(folder).file_times()
            for mark in filter(is_mark, times):
                checkpoint = _core.Checkpoint.open(folder, rank=rank_of_mark(mark))
                last_file = max((times.get(name, 0) for name, *_ in checkpoint.files()), default=0)
                began = begin_of_save(checkpoint.save_id)
                save = _SaveTimes(max(save.last_file, last_file), max(save.began, began), can_be_read=True)
        except (CheckpointError, OSError, TypeError):  # TypeError: a path that is no UTF-8
            continue
    return save
