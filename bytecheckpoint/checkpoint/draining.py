# SPDX-License-Identifier: Apache-2.0
"""Copies the committed steps of a run from a near place to durable storage, behind the training."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import PurePath

from bytecheckpoint.checkpoint.commit_order import commit_order
from bytecheckpoint.checkpoint.copying import CopyReport, copy_checkpoint, is_copied
from bytecheckpoint.checkpoint.drain_records import note_copied, note_dropped, note_failed
from bytecheckpoint.checkpoint.keeping import IS_DRAINED, drains_of, note_drain
from bytecheckpoint.checkpoint.newest import refuse_a_checkpoint
from bytecheckpoint.checkpoint.steps import look_at_step
from bytecheckpoint.checkpoint.tracker_text import TRACKER, tracker_text
from bytecheckpoint.config import Config
from bytecheckpoint.errors import CheckpointError, ConfigError
from bytecheckpoint.report.text import size_text
from bytecheckpoint.storage.folders import folder_at, known
from bytecheckpoint.storage.olmo_steps import (
    MODEL_AND_OPTIM,
    WRITTEN_LAST,
    copy_files_beside,
    has_checkpoint,
    is_whole,
)
from bytecheckpoint.storage.paths import Place, as_place, below, location, name_of, parent_of
from bytecheckpoint.storage.step_folder import step_paths
from bytecheckpoint.storage.tiers import lent_path

__all__ = ["DrainReport", "copy_step", "drain"]

_logger = logging.getLogger("bytecheckpoint")


@dataclass(kw_only=True)
class DrainReport:
    """What a drain did.

    Attributes:
        near: Folder of the run.
        durable: Folder that it was drained to.
        drained: Steps that were copied, by their folders there, in the order in which they were committed.
        dropped: Folders of steps that were left out since newer ones waited.
        failed: For each folder of a step that was not copied, the reason.
        num_bytes: Bytes that were copied.
        seconds: Seconds that it took.
    """

    near: str
    durable: str
    drained: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    num_bytes: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        return self.summary()

    def summary(self) -> str:
        """Returns one line for people."""
        notes = [f"drained {len(self.drained)}"]
        notes += [f"dropped {len(self.dropped)}"] if self.dropped else []
        notes += [f"{len(self.failed)} failed"] if self.failed else []
        return f"{self.durable}: {', '.join(notes)}; {size_text(self.num_bytes)} in {self.seconds:.2f} s"


def drain(
    near: str | os.PathLike[str],
    durable: str | os.PathLike[str],
    *,
    every: int = 1,
    most_waiting: int = 2,
    bytes_per_s: int = 0,
    pattern: str | None = None,
    watch_s: float | None = None,
    stop: threading.Event | None = None,
    config: Config | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> DrainReport:
    """Copies the steps of a run that are committed near by, and not yet in durable storage, oldest first.

    Local, for one process beside the training, or a thread of it. It takes no part in saves: these are committed near
    by, and a durable place that hangs, is full or is gone stops nothing but the drain. Each step is copied by
    ``copy_checkpoint``: every byte is compared, and the step is there whole or not at all. The one that is being copied
    is pinned near by, so that no prune removes it.

    What waits is what was committed behind the newest step that is in both places: later in the order of the saves, not
    of higher number. If more than ``most_waiting`` steps wait, the oldest of them are dropped. A step that failed is
    tried again by the next call, unless it was dropped by then. So a drain that was killed goes on where it was.

    Args:
        near: Folder of the run, as for ``latest``.
        durable: Folder or URL; its steps get the names that they have near by.
        every: Only steps that this number divides.
        most_waiting: Most steps that wait for the one under way.
        bytes_per_s: Most bytes that are written in a second; 0 is no limit.
        pattern: Pattern of the names of step folders; see ``scan_steps``.
        watch_s: Goes on looking for new steps every so many seconds, until ``stop``; None ends when nothing waits.
        stop: Ends a drain behind the step under way.
        config: Settings; None reads ``BYTECHECKPOINT_*`` variables.
        progress: Called with the bytes that were copied of the part under way, and all bytes of it.

    Returns:
        What was drained, dropped, or failed. A step of which another process is copying the same is among the failed.

    Raises:
        ConfigError: An argument is out of range, or a URL is of an unknown kind.
        StorageError: ``near`` cannot be listed.
    """
    for name, value in (("every", every), ("most_waiting", most_waiting)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name}={value!r}: must be an int >= 1")
    if watch_s is not None and not watch_s > 0:
        raise ConfigError(f"watch_s={watch_s!r}: must be above 0, or None")
    config = config or Config.from_env()
    from_, to = known(location(near), config), known(location(durable), config)
    report = DrainReport(near=str(from_), durable=str(to))
    stop = stop or threading.Event()
    if folder_at(to).is_same(from_):
        raise ConfigError(f"drain({from_}): near and durable are one folder")
    if not folder_at(from_).is_gone() and not step_paths(from_, pattern):
        refuse_a_checkpoint(from_, "drain")
    begin = time.monotonic()
    drained: set[tuple[str, int | None]] = set()  # known to be there, so that a watch does not look at all files again
    _unpin_left(from_, pattern)
    while True:
        for path in _waiting(from_, to, every, pattern, most_waiting, drained, config, report):
            if stop.is_set():
                break
            _drain_step(path, from_, to, bytes_per_s, config, progress, report)
        report.seconds = time.monotonic() - begin
        if watch_s is None or stop.wait(watch_s):
            return report


def _unpin_left(near: Place, pattern: str | None) -> None:
    """Removes the pins of a drain that was killed."""
    if folder_at(near).is_gone():
        return
    with contextlib.suppress(CheckpointError):
        for path, text in drains_of([path for _, path in step_paths(near, pattern)]).items():
            if text == IS_DRAINED:
                note_drain(path, "")


def _waiting(
    near: Place,
    durable: Place,
    every: int,
    pattern: str | None,
    most_waiting: int,
    drained: set[tuple[str, int | None]],
    config: Config,
    report: DrainReport,
) -> list[str]:
    """Returns the folders of the steps to drain, the oldest first, and notes which are dropped."""
    if folder_at(near).is_gone():  # the first save has not made it yet
        return []
    waiting: list[str] = []
    for step, path in commit_order(near, step_paths(near, pattern)).by_time:
        if step % every:
            continue
        place, copy = as_place(path), below(durable, name_of(as_place(path)))
        if is_of_olmo := has_checkpoint(place):
            if not is_whole(place):  # OLMo-core has not written its own files
                continue
            place, copy = below(place, MODEL_AND_OPTIM), below(copy, MODEL_AND_OPTIM)
        folder = look_at_step(step, str(place))
        if folder is None or not folder.is_complete:
            if folder is not None and (folder.is_faulty or folder.is_kept):  # or a part of what machines have together
                report.failed[path] = f"{folder.state}: {folder.reason}"
            continue
        this = path, folder_at(place).changed(".metadata" if not folder.components else "model/.metadata")
        if this in drained or (is_copied(place, copy, config) and (not is_of_olmo or is_whole(parent_of(copy)))):
            drained.add(this)
            break
        waiting.append(path)
    waiting.reverse()
    most = most_waiting + 1  # with the one that is copied next
    for path in waiting[:-most]:
        if path not in report.dropped:
            report.dropped.append(path)
            note_dropped(path, durable, f"{most} newer steps wait", config)
            _logger.warning("drain(%s): %s is dropped: %d newer steps wait", near, PurePath(path).name, most)
    return waiting[-most:]


def copy_step(
    path: str,
    near: Place,
    durable: Place,
    bytes_per_s: int,
    config: Config,
    progress: Callable[[int, int], object] | None,
) -> CopyReport:
    """Copies one step of a run, which is pinned meanwhile, and the tracker if that names it.

    Of a step of OLMo-core, the files beside the checkpoint are copied, too.

    Raises:
        CheckpointError: See ``copy_checkpoint``; its pin is then what it was.
    """
    before = drains_of([path]).get(path, "")
    note_drain(path, IS_DRAINED)
    after = before
    try:
        place, copy = as_place(path), below(durable, name_of(as_place(path)))
        is_of_olmo = has_checkpoint(place)
        source, target = (below(each, MODEL_AND_OPTIM) if is_of_olmo else each for each in (place, copy))
        if is_of_olmo and not is_copied(as_place(lent_path(str(source))), target, config):
            folder_at(copy).remove_file(WRITTEN_LAST)  # what is there is no step to OLMo-core until all is copied
        copied = copy_checkpoint(
            lent_path(str(source)), target, overwrite=True, bytes_per_s=bytes_per_s, config=config, progress=progress
        )
        if is_of_olmo:
            copy_files_beside(place, copy)
            copied = replace(copied, source=path, target=str(copy))
        _copy_tracker(path, near, durable)
        after = ""
    finally:
        with contextlib.suppress(CheckpointError):  # it was removed meanwhile
            note_drain(path, after)
    return copied


def _copy_tracker(path: str, near: Place, durable: Place) -> None:
    """Writes the tracker of ``bytecheckpoint.save`` in durable storage, if the one near by names the step."""
    text = tracker_text(near)
    if text and name_of(as_place(path)) == f"global_step_{text}":
        folder_at(durable).write_file(TRACKER, text.encode())


def _drain_step(
    path: str,
    near: Place,
    durable: Place,
    bytes_per_s: int,
    config: Config,
    progress: Callable[[int, int], object] | None,
    report: DrainReport,
) -> None:
    before, begun_at = report.failed.pop(path, ""), time.time()
    try:
        copied = copy_step(path, near, durable, bytes_per_s, config, progress)
    except CheckpointError as error:
        if folder_at(as_place(path)).is_gone():  # pruned while it waited
            report.dropped.append(path)
            _logger.warning("drain(%s): %s is dropped: it was removed while it waited", report.near, path)
            return
        report.failed[path] = str(error)
        if report.failed[path] != before:
            note_failed(path, durable, str(error), begun_at, config)
        _logger.warning("drain(%s): %s", report.near, report.failed[path])
        return
    note_copied(path, copied, begun_at, config)
    if copied.is_new:  # else another drain has copied it
        report.drained.append(copied.target)
    report.num_bytes += copied.num_bytes
    _logger.info("drain(%s): %s", report.near, copied.summary())
