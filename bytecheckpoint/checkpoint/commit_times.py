# SPDX-License-Identifier: Apache-2.0
"""When the checkpoint of a step folder was committed. Needs no torch.

No format says it, so the storage does: it is the time of the last change of the commit mark, which a save writes last
and nobody changes afterwards. Of several marks it is that of the model, which is committed last, or the latest of the
ranks that committed by themselves.

A copy (``cp -r``, ``rsync`` without ``-t``, an upload) has the times of the copying. It is known by a commit mark that
is older than a file that it names: no save writes in that order.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

from bytecheckpoint import _core
from bytecheckpoint.checkpoint.folders import below
from bytecheckpoint.checkpoint.small_files import storage_errors
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.object_store.entries import is_tombstone
from bytecheckpoint.object_store.names import is_mark, rank_of_mark
from bytecheckpoint.object_store.stores import place_in_store
from bytecheckpoint.object_store.urls import is_store_url, joined

__all__ = ["commit_times", "with_copies"]

_MARK = ".metadata"
_PART_COMMITTED_LAST = "model"
_MOST_REQUESTS = 16  # at once
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def commit_times(paths: Sequence[str]) -> dict[str, int]:
    """Returns when the checkpoints in step folders were committed, in nanoseconds since 1970; without those of none.

    Args:
        paths: Step folders: paths, or URLs of one store.

    Raises:
        StorageError: The store refused to say.
    """
    if paths and is_store_url(paths[0]):
        with ThreadPoolExecutor(min(len(paths), _MOST_REQUESTS), "bytecheckpoint-times") as pool:
            times = [*pool.map(_time_in_store, paths)]
    else:
        times = [_time_on_disk(path) for path in paths]
    return {path: time for path, time in zip(paths, times, strict=True) if time is not None}


def with_copies(times: Mapping[str, int]) -> dict[str, int]:
    """Returns the times with one and the same for all steps that were copied, since theirs say nothing of their order.

    It is the end of the copying: they were committed before that. A step whose time lies between the begin and the end
    of the copying was copied, too, though its mark came last.

    Args:
        times: What ``commit_times`` returned.
    """
    copied = {path: last for path, time in times.items() if (last := _last_named_file(path)) > time}
    if not copied:
        return {**times}
    begin, end = min(times[path] for path in copied), max(copied.values())
    return {path: end if begin <= time <= end else time for path, time in times.items()}


def _time_on_disk(path: str) -> int | None:
    for folder in (path, os.path.join(path, _PART_COMMITTED_LAST)):  # noqa: PTH118
        try:
            return os.stat(os.path.join(folder, _MARK)).st_mtime_ns  # noqa: PTH116, PTH118
        except OSError:
            continue
    return max((time for name, time in _times_in(path).items() if is_mark(name)), default=None)


def _time_in_store(url: str) -> int | None:
    client, folder = place_in_store(url)
    with storage_errors("head", url):
        for mark in (joined(folder, _MARK), joined(folder, _PART_COMMITTED_LAST, _MARK)):
            found = client.head(mark)
            if found is not None and not is_tombstone(found):
                return _nanoseconds(found["last_modified"])
        return max((time for name, time in _times_in(url).items() if is_mark(name)), default=None)


def _last_named_file(path: str) -> int:
    """Returns when the last of the data files was changed that the marks of a step name; 0 if that is not known."""
    last = 0
    for folder in (path, str(below(path, _PART_COMMITTED_LAST)) if is_store_url(path) else f"{path}/model"):
        try:
            times = _times_in(folder)
            for mark in filter(is_mark, times):
                files = _core.Checkpoint.open(folder, rank=rank_of_mark(mark)).files()
                last = max([last, *(times.get(name, 0) for name, *_ in files)])
        except (CheckpointError, OSError):
            continue
    return last


def _times_in(folder: str) -> dict[str, int]:
    """Returns when the files right in a folder were last changed, by name."""
    if is_store_url(folder):
        client, name = place_in_store(folder)
        entries = [entry for entry in client.entries(name) if not entry.is_tombstone]
        return {entry.name: _nanoseconds(entry.last_modified) for entry in entries}
    try:
        with os.scandir(folder) as entries_of_folder:
            return {entry.name: entry.stat().st_mtime_ns for entry in entries_of_folder if entry.is_file()}
    except OSError:
        return {}


def _nanoseconds(time: datetime) -> int:
    return (time - _EPOCH) // timedelta(microseconds=1) * 1000
