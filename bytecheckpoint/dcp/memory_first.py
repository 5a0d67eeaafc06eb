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
)
from bytecheckpoint.report import SaveReport
from bytecheckpoint.staging.background import forget_locals
from bytecheckpoint.storage.memory.client import HolderClient
from bytecheckpoint.storage.parts import PARTS
from bytecheckpoint.storage.paths import as_place, below, name_of, parent_of
from bytecheckpoint.storage.tiers import Tiers, note_save, tiers_of

__all__ = ["is_in_memory", "save_by_tiers"]

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
    return found is not None and found[0].memory is not None


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
    """
    found = tiers_of(str(writer.checkpoint_id))
    if found is None or found[0].memory is None or only == "disk" or _is_within.get():
        return save(writer)
    token = _is_within.set(True)  # a flow within a flow is the same save
    try:
        saved = _save_in_memory(writer, *found, save)
        return saved if only == "memory" or not writer.goes_on else save(writer)
    finally:
        _is_within.reset(token)


def _save_in_memory(writer: BcpWriter, tiers: Tiers, rest: str, save: Callable[[BcpWriter], T]) -> T | None:
    writer.goes_on = note_save(tiers, str(writer.checkpoint_id))
    begin = time.monotonic()
    memory = _writer_of(tiers, rest, writer)
    done: Future[SaveReport] = writer.in_memory
    try:
        saved = save(memory)
    except BaseException as error:
        done.set_exception(error)
        with suppress(OSError):  # the coordinator has freed what it knows of, on its own machine
            HolderClient(str(memory.checkpoint_id)).discard()
        if not writer.goes_on or not isinstance(error, _OF_MEMORY) or isinstance(error, _FOR_ALL_TIERS):
            raise
        _logger.warning("%s is not in memory: %s", writer.checkpoint_id, str(error))
        error.__traceback__ = None if error.__traceback__ is None else error.__traceback__.tb_next  # of this frame
        forget_locals(error)  # whoever keeps the future must not keep the state
        return None
    report = memory.last_report
    assert report is not None
    writer.memory_s = time.monotonic() - begin
    writer.same_save_as = memory.save_id.removeprefix(SAVE_ID_PREFIX)
    if not writer.goes_on:
        writer.last_report = report
    if report.save_id:  # this rank has committed
        _free_older(tiers, str(memory.checkpoint_id))
    done.set_result(report)
    return saved


def _writer_of(tiers: Tiers, rest: str, writer: BcpWriter) -> BcpWriter:
    if writer.in_memory.done():  # of an earlier save
        writer.in_memory = Future()
    memory = BcpWriter(
        str(below(tiers.in_memory, *rest.split("/"))),
        overwrite=writer.overwrite,
        config=replace(writer.config, journal="off", digest=False),
    )
    memory.user_metadata = writer.user_metadata
    memory.cancels_with(writer)
    return memory


def _free_older(tiers: Tiers, path: str) -> None:
    """Frees older states, once the last part of a newer one is committed."""
    place = as_place(path)
    name = name_of(place)
    if tiers.memory is None or (name in PARTS and name != PARTS[-1]):
        return
    run = parent_of(parent_of(place)) if name in PARTS else parent_of(place)
    try:
        keep_newest(str(run), tiers.memory.keep)
    except CheckpointError as error:
        _logger.warning("Tiers(%s): older states in memory are not freed: %s", tiers.place, error)
