# SPDX-License-Identifier: Apache-2.0
"""What a reader is told, and what it keeps from one hook to the next: its checkpoint, and its hold on it."""

from __future__ import annotations

import os
import uuid
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.storage import StorageReader

from bytecheckpoint.calls.phases import Phases
from bytecheckpoint.calls.trace import CallTrace
from bytecheckpoint.config import Config
from bytecheckpoint.dcp._load_steps import open_to_load
from bytecheckpoint.dcp._loaded_keys import LoadedKeys
from bytecheckpoint.dcp._places import SavesSeen
from bytecheckpoint.dcp.call_context import CallContext
from bytecheckpoint.dcp.metadata import metadata_of
from bytecheckpoint.dcp.stateful import speed_up_dcp
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.native import _C
from bytecheckpoint.probes.of_torch import SAVE_AND_LOAD
from bytecheckpoint.probes.probe import require
from bytecheckpoint.report import LoadReport
from bytecheckpoint.runtime.descriptions import described
from bytecheckpoint.storage.folders import folder_at
from bytecheckpoint.storage.in_use import Hold, hold_directory
from bytecheckpoint.storage.parts import parsed_user_metadata
from bytecheckpoint.storage.paths import can_be_place, location_to_read

__all__ = ["ReaderBase"]

# If `.metadata` is larger than this, each rank reads only the parts of it that its state asks for: 10,000 ranks write a
# `.metadata` of half a gigabyte.
_MAX_WHOLE_METADATA_BYTES = 32 << 20


class ReaderBase(StorageReader):
    """``BcpReader`` without the hooks of a load. See there for the arguments and attributes."""

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        _extension_registry: object | None = None,
        *,
        config: Config | None = None,
    ) -> None:
        super().__init__()
        require(SAVE_AND_LOAD)
        speed_up_dcp()
        if _extension_registry is not None:
            raise ValueError("_extension_registry: stream transforms are not supported; leave it out")
        self.path = location_to_read(path)
        self.rank: int | None = None
        self.use_collectives = True
        self.config = config or Config.from_env()
        self.last_report: LoadReport | None = None
        self.load_id = str(uuid.uuid4())
        self._hold: Hold | None = None
        self._call = CallContext()  # the load that began last
        self._saves_seen = SavesSeen()
        self._has_begun = False  # `read_metadata` began the load; a caller may also keep metadata for later loads
        self._forget()

    def _forget(self) -> None:
        self._let_go()
        self._checkpoint: _C.Checkpoint | None = None
        self._folder = folder_at(self.path)
        self._directory: tuple[int, int] | None = None  # its id when the metadata were read
        self._rank: int | None = None  # the rank whose part is read, if it was saved without collectives
        self._error: CheckpointError | None = None
        self._is_coordinator = False
        self._number = 0  # number of this rank in the load
        self._phases = Phases()
        self._keys = LoadedKeys()

    def __getstate__(self) -> dict[str, Any]:
        of_process = dict.fromkeys(("_checkpoint", "_error", "_hold", "_directory"))
        return {**self.__dict__, **of_process, "_call": CallContext(), "_has_begun": False}

    def __repr__(self) -> str:
        return described(self, str(self.path))

    @property
    def fs(self) -> FileSystem:
        """DCP's ``FileSystem``, for code that calls its methods. The engine does not use it."""
        return FileSystem()

    @property
    def storage_data(self) -> dict[Any, Any]:
        """DCP's ``storage_data`` of the checkpoint opened last. It is built at each access, since no load needs it."""
        if self._checkpoint is None:
            return {}
        places: dict[Any, Any] = metadata_of(self._checkpoint, self.load_id).storage_data
        return places

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The directory that is read."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Returns whether ``checkpoint_id`` is a local path, or a URL of an object store that obstore can read."""
        return can_be_place(checkpoint_id)

    @property
    def user_metadata(self) -> Any:
        """The value passed to ``BcpWriter(user_metadata=...)``, or None. Reads ``.metadata`` if no load has."""
        return parsed_user_metadata(self._opened().user_metadata, self.path)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Directs the next load to ``checkpoint_id``, if given, and forgets what was read."""
        if checkpoint_id:
            self.path = location_to_read(checkpoint_id)
        self.load_id = str(uuid.uuid4())
        self._forget()

    def _begin_trace(self) -> None:
        call = self._call
        self._phases = Phases(CallTrace(self.config, "load", str(self.path), call.rank_or({}), call.size), call.call)

    def _hold_in_call(self) -> None:
        """Keeps this process from deleting the checkpoint that it reads, until DCP's call of this thread has ended."""
        self._let_go()
        call = self._call.call
        if call is not None:
            self._hold = hold_directory(self._directory, call.is_running)

    def _hold_until_read(self) -> None:
        """The same for a caller that runs the hooks by hand: it will read in the end, or drop the reader."""
        if self._hold is None:
            self._directory = self._directory or self._directory_id()
            self._hold = hold_directory(self._directory)

    def _directory_id(self) -> tuple[int, int] | None:
        return folder_at(self.path).key(self.config.io_timeout_s)

    def _let_go(self) -> None:
        hold, self._hold = self._hold, None
        if hold is not None:
            hold.end()

    def _opened(self) -> _C.Checkpoint:
        if self._checkpoint is None:
            self._checkpoint = self._open(None)
        return self._checkpoint

    def _open(self, rank: int | None) -> _C.Checkpoint:
        self._folder = folder_at(self.path)
        self._folder.use(self.config, _C, self._phases.trace.note_request)
        return open_to_load(self._folder, self.config, rank, _MAX_WHOLE_METADATA_BYTES)

    @property
    def num_ranks(self) -> int:
        """How many ranks take part in the latest load."""
        return max(1, self._call.size)
