# SPDX-License-Identifier: Apache-2.0
"""Saves that are committed in the memory of the machine before they go to a disk; see ``MemoryTier``."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import replace
from typing import TypeVar

from torch.distributed.checkpoint.api import CheckpointException

from bytecheckpoint.checkpoint.memory_states import keep_newest
from bytecheckpoint.dcp.metadata import SAVE_ID_PREFIX
from bytecheckpoint.dcp.writer import BcpWriter
from bytecheckpoint.errors import (
    CheckpointError,
    OutOfStepError,
    ProcessGroupChangedError,
    RankLostError,
    SaveCancelledError,
    UnsupportedError,
)
from bytecheckpoint.staging.background import forget_locals
from bytecheckpoint.storage.memory.client import HolderClient
from bytecheckpoint.storage.parts import PARTS, step_and_part
from bytecheckpoint.storage.paths import as_place, below, parent_of
from bytecheckpoint.storage.tiers import Tiers, go_without_memory, has_memory, note_save, tiers_of

__all__ = ["forget_in_memory", "is_in_memory", "save_by_tiers"]

T = TypeVar("T")

# Whatever is wrong with memory, the disk may be well; these would be the same there.
_FOR_ALL_TIERS = (OutOfStepError, ProcessGroupChangedError, RankLostError, SaveCancelledError)

_OF_MEMORY = (CheckpointError, CheckpointException)
# Whether this thread, or task, saves to one of several tiers.
_is_within: ContextVar[bool] = ContextVar("bytecheckpoint_by_tiers", default=False)

_logger = logging.getLogger("bytecheckpoint")


def is_in_memory(path: str) -> bool:
    """Whether saves to a path are committed in memory first."""
    found = tiers_of(path)
    return found is not None and has_memory(found[0])


def save_by_tiers(writer: BcpWriter, save: Callable[[BcpWriter], T], only: str = "") -> T | None:
    """Saves, in memory first if the path of a writer is in ``Tiers`` with memory. Collective.

    Args:
        writer: Writer of the save to the disk, which gets the save id of what is in memory, and knows afterwards
            whether the save goes on to the disk.
        save: Saves with a writer.
        only: ``memory`` or ``disk`` for that part of it.

    Returns:
        What ``save`` returned for the disk, or for memory if the save does not go on. None if it is not in memory, and
        that is what was asked for.

    Raises:
        CheckpointError: The save to the disk failed; or it was to be in memory alone, and is not; or a rank was lost.
    """  # noqa: DOC501
    found = tiers_of(str(writer.checkpoint_id))
    if found is None or not has_memory(found[0]) or only == "disk" or _is_within.get():
        return save(writer) if only != "memory" else None
    token = _is_within.set(True)  # a flow within a flow is the same save
    memory = _MemorySave(writer, *found)
    try:
        if only != "memory" and not writer.overwrite and found[0].disks:
            saved = save(writer)  # first: it may be refused, and then nothing may be changed
            memory.save(save)
            return saved
        in_memory = memory.save(save)
        return in_memory if only == "memory" or not writer.goes_on else save(writer)
    except SaveCancelledError:
        memory.take_back()
        raise
    finally:
        _is_within.reset(token)


def forget_in_memory(path: str) -> None:
    """Frees a step in memory of which a part is missing.

    Args:
        path: Its path on the disk.
    """
    found = tiers_of(path)
    if found is not None and found[0].memory is not None:
        _forget(HolderClient(str(below(found[0].in_memory, *found[1].split("/")))))


def _forget(held: HolderClient) -> None:
    with suppress(OSError):
        held.delete([each.name for each in held.everything("")])


class _MemorySave:
    """The part of a save that goes to memory.

    Args:
        writer: Writer of the save to the disk.
        tiers: Places of the run.
        rest: Path of the step, or of a part of it, in them.
    """

    def __init__(self, writer: BcpWriter, tiers: Tiers, rest: str) -> None:
        self._disk, self._tiers = writer, tiers
        # What may not be replaced may be on the disk alone.
        writer.goes_on = note_save(tiers, str(writer.checkpoint_id)) or (bool(tiers.disks) and not writer.overwrite)
        if writer.in_memory.done():  # of an earlier save
            writer.in_memory = Future()
        self._path = str(below(tiers.in_memory, *rest.split("/")))
        self._memory = memory = BcpWriter(
            self._path,
            overwrite=writer.overwrite or writer.goes_on,
            config=replace(writer.config, journal="off", digest=False),
        )
        memory.user_metadata = writer.user_metadata
        memory.cancels_with(writer)

    def save(self, save: Callable[[BcpWriter], T]) -> T | None:
        """Saves to memory; see ``save_by_tiers``."""
        writer, memory = self._disk, self._memory
        begin = time.monotonic()
        if writer.last_report is not None and not writer.overwrite:
            memory.same_save_as = writer.save_id.removeprefix(SAVE_ID_PREFIX)
        try:
            saved = save(memory)
        except BaseException as error:
            writer.in_memory.set_exception(error)
            with suppress(OSError):  # the coordinator has freed what it knows of, on its own machine
                HolderClient(self._path).discard()
            if not writer.goes_on or not isinstance(error, _OF_MEMORY) or isinstance(error, _FOR_ALL_TIERS):
                raise
            _logger.warning("%s is not in memory: %s", writer.checkpoint_id, str(error))
            if isinstance(error, UnsupportedError):  # on all ranks
                go_without_memory(self._tiers)
            error.__traceback__ = None if error.__traceback__ is None else error.__traceback__.tb_next  # of this frame
            forget_locals(error)  # whoever keeps the future must not keep the state
            return None
        report = memory.last_report
        assert report is not None
        if writer.overwrite:
            writer.memory_s = time.monotonic() - begin
            writer.same_save_as = memory.save_id.removeprefix(SAVE_ID_PREFIX)
        if not writer.goes_on:
            writer.last_report = report
        if report.save_id:  # this rank has committed
            self._free_older()
        writer.in_memory.set_result(report)
        return saved

    def take_back(self) -> None:
        """Frees what is in memory, if this rank has committed it: the save to the disk was cancelled."""
        report = self._memory.last_report
        if report is None or not report.save_id:
            return
        _forget(HolderClient(self._path))

    def _free_older(self) -> None:
        """Frees older states, once the last part of a newer one is committed."""
        step, part = step_and_part(as_place(self._path))
        if self._tiers.memory is None or part not in ("", PARTS[-1]):
            return
        try:
            keep_newest(str(parent_of(step)), self._tiers.memory.keep)
        except CheckpointError as error:
            _logger.warning("Tiers(%s): older states in memory are not freed: %s", self._tiers.place, str(error))
