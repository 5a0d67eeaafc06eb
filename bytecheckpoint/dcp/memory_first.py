# SPDX-License-Identifier: Apache-2.0
"""Saves that are committed in the memory of the machine before they go to a disk; see ``MemoryTier``."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import replace
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from bytecheckpoint.checkpoint.memory_states import keep_newest
from bytecheckpoint.dcp.memory_machines import Machines
from bytecheckpoint.dcp.metadata import SAVE_ID_PREFIX
from bytecheckpoint.dcp.near_disks import save_near
from bytecheckpoint.dcp.writer import BcpWriter
from bytecheckpoint.distributed.agreement import agree
from bytecheckpoint.errors import (
    CheckpointError,
    ConfigError,
    OutOfStepError,
    ProcessGroupChangedError,
    RankLostError,
    SaveCancelledError,
    UnsupportedError,
)
from bytecheckpoint.staging.background import forget_frames
from bytecheckpoint.storage.memory.client import HolderClient
from bytecheckpoint.storage.olmo_steps import MODEL_AND_OPTIM
from bytecheckpoint.storage.parts import PARTS, step_and_part
from bytecheckpoint.storage.paths import as_place, below, parent_of
from bytecheckpoint.storage.tiers import Tiers, go_without_memory, has_memory, note_save, tiers_of

__all__ = ["forget_in_memory", "is_in_memory", "is_in_tiers", "save_by_tiers"]

T = TypeVar("T")

# Whatever is wrong with memory, the disk may be well; these would be the same there, or are the user's to mend.
_FOR_ALL_TIERS = (ConfigError, OutOfStepError, ProcessGroupChangedError, RankLostError, SaveCancelledError)

_OF_MEMORY = (CheckpointError, CheckpointException)
# Whether this thread, or task, saves to one of several tiers.
_is_within: ContextVar[bool] = ContextVar("bytecheckpoint_by_tiers", default=False)

_logger = logging.getLogger("bytecheckpoint")


def is_in_tiers(path: str) -> bool:
    """Whether saves to a path go by tiers: see ``save_by_tiers``."""
    return tiers_of(path) is not None


def is_in_memory(path: str) -> bool:
    """Whether saves to a path are committed in memory first."""
    found = tiers_of(path)
    return found is not None and has_memory(found[0])


def save_by_tiers(
    writer: BcpWriter, save: Callable[[BcpWriter], T], group: dist.ProcessGroup | None, only: str = ""
) -> T | None:
    """Saves, in memory first if the path of a writer is in ``Tiers`` with memory. Collective.

    On a near place that is not shared, each machine commits on its disk; see ``near_disks``.

    Args:
        writer: Writer of the save to the disk, which gets the save id of what is in memory, and knows afterwards
            whether the save goes on to the disk.
        save: Saves with a writer.
        group: A group of our own of the ranks that save; None for this one alone.
        only: ``memory`` or ``disk`` for that part of it.

    Returns:
        What ``save`` returned for the disk, or for memory if the save does not go on. None if it is not in memory, and
        that is what was asked for.

    Raises:
        CheckpointError: The save to the disk failed; or it was to be in memory alone, and is not; or a rank was lost.
        ConfigError: There are too few machines for the replicas of the tier; or ranks have other tiers, or another
            ``overwrite``.
    """  # noqa: DOC501
    found = tiers_of(str(writer.checkpoint_id))
    if found is None or _is_within.get():  # a flow within a flow is the same save
        return save(writer) if only != "memory" else None
    tiers, rest = found

    def save_to_disk(writer: BcpWriter) -> T:
        return save_near(writer, save, tiers, group)

    if group is not None:  # what differs here would have ranks wait for one another in different places
        agree(group, "save", str(writer.checkpoint_id), {"overwrite": writer.overwrite, "tiers": tiers.names})
    token = _is_within.set(True)
    try:
        if not has_memory(tiers) or only == "disk":
            return save_to_disk(writer) if only != "memory" else None
        memory = _MemorySave(writer, tiers, rest, group)
        try:
            if only != "memory" and not writer.overwrite and tiers.disks:
                saved = save_to_disk(writer)  # first: it may be refused, and then nothing may be changed
                memory.save(save)
                return saved
            in_memory = memory.save(save)
            return in_memory if only == "memory" or not writer.goes_on else save_to_disk(writer)
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
        group: The ranks; see ``save_by_tiers``.
    """

    def __init__(self, writer: BcpWriter, tiers: Tiers, rest: str, group: dist.ProcessGroup | None) -> None:
        self._disk, self._tiers, self._group = writer, tiers, group
        self._machines: Machines | None = None
        self._written: list[str] = []  # names of this rank's files
        self._is_committed = False
        # What may not be replaced may be on the disk alone.
        writer.goes_on = note_save(tiers, str(writer.checkpoint_id)) or (bool(tiers.disks) and not writer.overwrite)
        if writer.in_memory.done() or writer.in_memory.running():  # of an earlier save
            writer.in_memory = Future()
        writer.in_memory.set_running_or_notify_cancel()  # from here on nobody can cancel it
        self._path = str(below(tiers.in_memory, *rest.split("/")))
        self._memory = memory = BcpWriter(
            self._path,
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
            saved = self._save(save)
        except BaseException as error:
            writer.in_memory.set_exception(error)
            self._leave(error)
            if not writer.goes_on or not isinstance(error, _OF_MEMORY) or isinstance(error, _FOR_ALL_TIERS):
                raise
            _logger.warning("%s is not in memory: %s", writer.checkpoint_id, str(error))
            if isinstance(error, UnsupportedError):  # on all ranks
                go_without_memory(self._tiers)
            forget_frames(error)  # whoever keeps the future must not keep the state
            return None
        report = memory.last_report
        assert report is not None
        if writer.overwrite:
            writer.memory_s = time.monotonic() - begin
            writer.same_save_as = memory.save_id.removeprefix(SAVE_ID_PREFIX)
        if not writer.goes_on:
            writer.last_report = report
        if self._acts:
            self._free_older()
        writer.in_memory.set_result(report)
        return saved

    def _save(self, save: Callable[[BcpWriter], T]) -> T:
        """Writes on this machine and to copies on others, commits where the coordinator is, then on all machines."""
        stall_timeout_s = self._memory.config.stall_timeout_s
        call = "save", self._path
        goes_on = self._disk.goes_on
        machines = self._machines = Machines(self._tiers, self._group, call, stall_timeout_s, goes_on=goes_on)
        self._disk.goes_on = machines.goes_on
        self._memory.overwrite = self._disk.overwrite or machines.goes_on

        def after_write(names: Sequence[str]) -> None:
            self._written = [*names]
            machines.copy_files(self._path, names)

        self._memory.after_write = after_write
        saved = save(self._memory)
        self._is_committed = True
        machines.commit(self._path, self._written)
        return saved

    @property
    def _acts(self) -> bool:
        """Whether this rank has committed on its machine."""
        report, machines = self._memory.last_report, self._machines
        if not self._is_committed or report is None or machines is None:
            return False
        return machines.acts if machines.peers is not None else bool(report.save_id)

    def _leave(self, error: BaseException) -> None:
        """Frees what this rank has of a save that failed; the coordinator has freed what is on its own machine.

        What is committed here is freed only if a rank has said that it failed: of a rank that is lost, others may have
        heard that all is well, and have freed what is older.
        """
        if self._machines is not None:
            self._machines.end()
        with suppress(OSError):
            HolderClient(self._path).discard()
        if isinstance(error, CheckpointError) and not isinstance(error, (RankLostError, ProcessGroupChangedError)):
            self.take_back()

    def take_back(self) -> None:
        """Frees what is in memory, if this rank has committed it: the save to the disk was cancelled."""
        if self._acts:
            _forget(HolderClient(self._path))

    def _free_older(self) -> None:
        """Frees older states, once the last part of a newer one is committed."""
        step, part = step_and_part(as_place(self._path))
        if self._tiers.memory is None or part not in ("", PARTS[-1], MODEL_AND_OPTIM):
            return
        try:
            keep_newest(str(parent_of(step)), self._tiers.memory.keep)
        except CheckpointError as error:
            _logger.warning("Tiers(%s): older states in memory are not freed: %s", self._tiers.place, str(error))
