# SPDX-License-Identifier: Apache-2.0
"""What a writer is told: where to save, and how. And the methods by which ``dcp.async_save`` stages through it."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.storage import StorageWriter

from bytecheckpoint.calls.frames import is_called_by_executor
from bytecheckpoint.compat import private_names as _compat
from bytecheckpoint.config import Config
from bytecheckpoint.dcp._cancelling import Cancelling
from bytecheckpoint.dcp._hooks import Hooks
from bytecheckpoint.dcp._save_steps import SaveOptions
from bytecheckpoint.dcp.metadata import SAVE_ID_PREFIX
from bytecheckpoint.dcp.stager import BcpStager
from bytecheckpoint.dcp.stateful import speed_up_dcp
from bytecheckpoint.errors import ConfigError
from bytecheckpoint.native import _C
from bytecheckpoint.probes.of_torch import SAVE_AND_LOAD
from bytecheckpoint.probes.probe import require
from bytecheckpoint.report import SaveReport
from bytecheckpoint.runtime.descriptions import described
from bytecheckpoint.staging.content_hash import load_content_hash
from bytecheckpoint.staging.staged_state import note_upload
from bytecheckpoint.storage.paths import can_be_place, location, working_directory
from bytecheckpoint.storage.stored_hashes import refuse_other_metadata

__all__ = ["WriterBase"]


class WriterBase(StorageWriter):
    """``BcpWriter`` without the hooks of a save. See there for the arguments and attributes."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        _extensions: Sequence[Any] | None = None,
        serialization_format: Any = _compat.TORCH_SAVE,
        *,
        config: Config | None = None,
        user_metadata: Mapping[str, Any] | None = None,
        unsafe_objects: str | None = None,
        digest: bool | None = None,
    ) -> None:
        super().__init__()
        require(SAVE_AND_LOAD)
        speed_up_dcp()
        if _extensions:
            raise ValueError("_extensions: stream transforms are not supported; leave them out")
        if serialization_format != _compat.TORCH_SAVE:
            raise ValueError(f"serialization_format={serialization_format}: only TORCH_SAVE is supported")
        if not isinstance(thread_count, int) or not 1 <= thread_count <= 16:
            raise ConfigError(f"thread_count={thread_count!r}: must be an int from 1 to 16")
        self.path = location(path)
        self.save_id = SAVE_ID_PREFIX + _C.draw_save_id()
        self.rank: int | None = None
        self.use_collectives = True
        self.thread_count = thread_count
        self.per_thread_copy_ahead = per_thread_copy_ahead
        self.cache_staged_state_dict = cache_staged_state_dict
        self.type_check = False
        self.state_dict_cache = None
        self.serialization_format = serialization_format
        self._directory = working_directory()  # relative paths refer to the caller's working directory
        self.single_file_per_rank = single_file_per_rank
        self.sync_files = sync_files
        self.overwrite = overwrite
        given: dict[str, Any] = {"unsafe_objects": unsafe_objects, "digest": digest}
        given = {name: value for name, value in given.items() if value is not None}
        config = dataclasses.replace(config or Config.from_env(), **given)
        self.config = dataclasses.replace(config, io_threads=thread_count) if thread_count > 1 else config
        if self.config.link_unchanged:
            load_content_hash()
            refuse_other_metadata(user_metadata)
        self.user_metadata = "" if user_metadata is None else json.dumps(user_metadata)
        self.last_report: SaveReport | None = None
        self._init_threads()

    def _init_threads(self) -> None:
        # Two saves that run at once on one writer run in two threads, so the state of a save is kept per thread.
        self._of_thread = threading.local()
        self._cancelling = Cancelling()
        # Of a save that is committed in memory first; see `memory_first`.
        self.in_memory: Future[SaveReport] = Future()
        self.goes_on = True
        self.memory_s = 0.0
        self.same_save_as = ""
        self.after_write: Callable[[Sequence[str]], None] | None = None  # with the names of this rank's files
        # The ranks that write to the disk of the coordinator, if others write to others; see `near_disks`.
        self.ranks_here: Set[int] | None = None

    def __getstate__(self) -> dict[str, Any]:
        of_a_save = ("in_memory", "goes_on", "memory_s", "same_save_as", "after_write", "ranks_here")
        own = ("_of_thread", "_cancelling", *of_a_save)
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._init_threads()

    def __repr__(self) -> str:
        return described(self, str(self.path), single_file_per_rank=True, sync_files=True, overwrite=True)

    @property
    def fs(self) -> FileSystem:
        """DCP's ``FileSystem``, for code that calls its methods. The engine does not use it."""
        return FileSystem()

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The directory that the next save of this thread writes to."""
        path: Path | str = getattr(self._of_thread, "path", self.path)
        return path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Returns whether ``checkpoint_id`` is a local path, or a URL of an object store that obstore can write to."""
        return can_be_place(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Directs the next save to ``checkpoint_id``, if given.

        A relative path is relative to the current working directory. A background save of DCP calls ``reset`` later,
        when the working directory may have changed. Then the path is relative to the working directory at the last of
        these calls from outside the background: the constructor, ``reset``, and ``stage``.
        """
        if checkpoint_id:
            if not is_called_by_executor():
                self._directory = working_directory()
            self.path = self._of_thread.path = location(checkpoint_id, self._directory)
        self.save_id = SAVE_ID_PREFIX + _C.draw_save_id()

    def cancel(self) -> None:
        """Cancels the running save, and every later save of this writer. Any thread may call it; it returns at once.

        The save fails on all ranks with a ``SaveCancelledError`` and leaves no files. The previous checkpoint stays. A
        save that is already being committed is not cancelled.
        """
        self._cancelling.cancel()

    def cancels_with(self, other: WriterBase) -> None:
        """Has saves of this writer cancelled with those of another one."""
        self._cancelling = other._cancelling

    # The methods of DCP's AsyncStager: `async_save` stages through the writer if it is given no stager.

    _synchronize_after_execute: bool = True

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Whether ``async_save`` is to call ``synchronize_staging``, as in DCP's ``AsyncStager``."""
        return self._synchronize_after_execute

    def stage(self, state_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Stages ``state_dict`` as ``BcpStager.stage`` does, with the settings of this writer."""
        self._directory = working_directory()
        return BcpStager(config=self.config)._stage(state_dict, self, is_own=_hooks.are_own(self, "stage"))

    def synchronize_staging(self) -> None:
        """Does what ``BcpStager.synchronize_staging`` does."""
        note_upload()

    def close(self) -> None:
        """Does nothing: a writer holds nothing between saves, and the arena belongs to the process."""

    @property
    def _options(self) -> SaveOptions:
        return SaveOptions(
            config=self.config,
            overwrite=self.overwrite,
            sync=self.sync_files,
            one_file_a_record=not self.single_file_per_rank,
            user_metadata=self.user_metadata,
            after_write=self.after_write,
            ranks_here=self.ranks_here,
        )


_hooks = Hooks(WriterBase)
