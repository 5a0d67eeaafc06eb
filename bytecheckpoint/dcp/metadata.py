# SPDX-License-Identifier: Apache-2.0
"""Conversions between the engine's manifest and DCP's ``Metadata``."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from bytecheckpoint.compat import private_names as _compat
from bytecheckpoint.config import Config
from bytecheckpoint.errors import CheckpointChangedError, CheckpointNotFoundError
from bytecheckpoint.native import _C
from bytecheckpoint.runtime.fork_locks import ForkSafeLock
from bytecheckpoint.storage.folders import folder_at
from bytecheckpoint.storage.paths import absolute, as_place

__all__ = [
    "SAVE_ID_PREFIX",
    "assemble",
    "checkpoint_of",
    "complete_metadata",
    "fill_planned_metadata",
    "metadata_of",
    "plan_of",
    "planned_metadata",
    "stored_checkpoint",
]

DCP_VERSION = "1.0.0"
SAVE_ID_PREFIX = "bcp1-"


_filling = ForkSafeLock(threading.RLock)
_LATE = ("state_dict_metadata", "planner_data", "storage_data")


def _make_late(checkpoint: _C.Checkpoint, name: str) -> Any:
    if name == "state_dict_metadata":
        return _C.state_dict_metadata(checkpoint)
    if name == "planner_data":
        return checkpoint.planner_data
    return _C.storage_data(checkpoint, _compat.StorageInfo)


def _late(name: str) -> Any:
    """Returns a property for a field that is built at its first access.

    ``__getattr__`` would not do: the dataclass has a class attribute for each default, which is found first.
    """

    def get(self: _UnfilledMetadata) -> Any:
        with _filling:
            fields = self.__dict__
            if name not in fields:
                fields[name] = _make_late(self._manifest(), name)
            value = fields[name]
            self._settle()
        return value

    def set_(self: _UnfilledMetadata, value: Any) -> None:
        with _filling:
            self.__dict__[name] = value
            self._settle()

    return property(get, set_)


class _UnfilledMetadata(Metadata):
    """Metadata that builds each of its large fields at the first access.

    When it has all of them, it turns into a plain ``Metadata``. No load and no save through our planners reads these
    fields, and building them takes seconds for a hundred thousand tensors.
    """

    state_dict_metadata = _late("state_dict_metadata")
    planner_data = _late("planner_data")
    storage_data = _late("storage_data")

    def _filled(self) -> Metadata:
        with _filling:
            for name in _LATE:
                getattr(self, name)
        return self

    def _settle(self) -> None:
        if all(name in self.__dict__ for name in _LATE):
            self.__dict__.pop("_checkpoint", None)
            self.__dict__.pop("_place", None)
            self.__class__ = Metadata  # type: ignore[assignment]

    def _manifest(self) -> _C.Checkpoint:
        fields = self.__dict__
        if "_checkpoint" not in fields:
            fields["_checkpoint"] = fields["_place"].open()
        checkpoint: _C.Checkpoint = fields["_checkpoint"]
        return checkpoint

    def __eq__(self, other: object) -> bool:
        return self._filled() == other

    __hash__ = None  # type: ignore[assignment]  # as in the dataclass

    def __repr__(self) -> str:
        return repr(self._filled())

    def __reduce_ex__(self, protocol: Any) -> Any:
        fields = self.__dict__
        if "_place" in fields and not any(name in fields for name in _LATE):
            # DCP broadcasts the metadata that a save returns. The place of the manifest is enough for that.
            return _at_place, ({name: value for name, value in fields.items() if name != "_checkpoint"},)
        return self._filled().__reduce_ex__(protocol)


@dataclass(frozen=True)
class _Place:
    """The place where a committed manifest can be read again."""

    path: str
    rank: int | None
    save_id: str

    def open(self) -> _C.Checkpoint:
        folder_at(self.path).use(None, _C)
        try:
            checkpoint = _C.Checkpoint.open(self.path, rank=self.rank, io_timeout_s=Config().io_timeout_s)
        except CheckpointNotFoundError as error:
            raise self._changed("nothing") from error
        if checkpoint.save_id != self.save_id:
            raise self._changed(f"save {checkpoint.save_id}")
        return checkpoint

    def _changed(self, found: str) -> CheckpointChangedError:
        return CheckpointChangedError(
            f"open({self.path}): the metadata of save {self.save_id} were not read yet, and the path now holds {found}",
            self.path,
        )


def _at_place(fields: dict[str, Any]) -> Metadata:
    metadata = Metadata.__new__(_UnfilledMetadata)
    metadata.__dict__.update(fields)
    return metadata


def _fill_later(metadata: Metadata, checkpoint: _C.Checkpoint, fields: tuple[str, ...]) -> Metadata:
    # Lets `fields` of `metadata` be built from `checkpoint` at their first access.
    if type(metadata) not in (Metadata, _UnfilledMetadata):  # a subclass of a planner: fill it now
        for name in fields:
            setattr(metadata, name, _make_late(checkpoint, name))
        return metadata
    for name in fields:
        metadata.__dict__.pop(name, None)
    metadata.__dict__["_checkpoint"] = checkpoint
    metadata.__class__ = _UnfilledMetadata
    return metadata


def checkpoint_of(metadata: Metadata) -> _C.Checkpoint:
    """Returns what ``metadata`` says, as a manifest for C++.

    That is the manifest that the metadata come from. If somebody accessed the fields, and so may have changed them, or
    if another reader made the metadata, a manifest is made from the fields.
    """
    stored = stored_checkpoint(metadata)
    return _C.without_records(metadata.state_dict_metadata) if stored is None else stored


def stored_checkpoint(metadata: Metadata) -> _C.Checkpoint | None:
    """Returns the manifest that our reader made the metadata of; None if another reader did, or they may be changed."""
    if isinstance(metadata, _UnfilledMetadata) and "state_dict_metadata" not in metadata.__dict__:
        return metadata._manifest()
    return None


def planned_metadata(planned: _C.Checkpoint) -> Metadata:
    """Returns the metadata of a planned checkpoint, which is not written yet."""
    return _fill_later(Metadata({}), planned, ("state_dict_metadata", "planner_data"))


def fill_planned_metadata(metadata: Metadata, planned: _C.Checkpoint) -> None:
    """Fills empty metadata, which DCP already has, with those of a plan that was made later.

    Planner data that somebody has put there are kept.
    """
    of_plan = ("state_dict_metadata", "planner_data") if metadata.planner_data is None else ("state_dict_metadata",)
    _fill_later(metadata, planned, of_plan)


def plan_of(metadata: Metadata) -> _C.Checkpoint | None:
    """Returns the manifest that was passed to ``planned_metadata``.

    Returns None if somebody accessed the fields, and so may have changed them, or if another planner made them.
    """
    fields = metadata.__dict__
    if isinstance(metadata, _UnfilledMetadata) and not {"state_dict_metadata", "planner_data"} & fields.keys():
        return metadata._manifest()
    return None


def assemble(
    metadata: Metadata, *, save_id: str, checkpoint_id: str, results: list[bytes], user_metadata: str, gaps: str
) -> _C.Checkpoint:
    """Returns the manifest of a checkpoint, made of its plan and of what the ranks have written.

    Args:
        metadata: Metadata of the plan.
        save_id: Id of the save.
        checkpoint_id: Path of the checkpoint.
        results: What each rank has written, encoded.
        user_metadata: JSON text to store.
        gaps: What ``gaps_of_save`` returned.

    Raises:
        InvalidPlanError: The ranks have written something else than was planned.
    """
    common: dict[str, Any] = {
        "save_id": save_id,
        "checkpoint_id": checkpoint_id,
        "results": results,
        "user_metadata": user_metadata,
        "gaps": gaps,
    }
    planned = plan_of(metadata)
    if planned is not None:
        return _C.assemble_planned(planned, **common)
    return _C.assemble(state_dict_metadata=metadata.state_dict_metadata, planner_data=metadata.planner_data, **common)


def complete_metadata(metadata: Metadata, checkpoint: _C.Checkpoint, path: str, rank: int | None) -> None:
    """Adds to the metadata of a plan what is known only after the commit.

    Args:
        metadata: Metadata of the plan; changed in place.
        checkpoint: Manifest of the committed checkpoint.
        path: Directory of the checkpoint.
        rank: Rank that committed a part of its own; None if all ranks committed together.
    """
    metadata.version = DCP_VERSION
    metadata.storage_meta = _storage_meta(checkpoint)
    _fill_later(metadata, checkpoint, ("storage_data",))
    if isinstance(metadata, _UnfilledMetadata):
        metadata.__dict__["_place"] = _Place(absolute(path), rank, checkpoint.save_id)


def metadata_of(checkpoint: _C.Checkpoint, load_id: str) -> Metadata:
    """Returns DCP's metadata of a checkpoint, equal to what its own reader would return."""
    version: str | None = DCP_VERSION
    storage_meta = StorageMeta()  # stock DCP makes an empty one where a checkpoint has none
    if checkpoint.foreign is None:
        storage_meta = _storage_meta(checkpoint)
    else:
        fields, id_is_path, version = checkpoint.foreign
        if fields is not None:
            for name, value in fields.items():  # also those that this torch lacks, as its unpickler does
                setattr(storage_meta, name, value)
            if id_is_path:
                storage_meta.checkpoint_id = _checkpoint_id(str(storage_meta.checkpoint_id))
    storage_meta.load_id = load_id
    metadata = _compat.new_metadata(state_dict_metadata={}, storage_meta=storage_meta, version=version)
    return _fill_later(metadata, checkpoint, _LATE)


def _storage_meta(checkpoint: _C.Checkpoint) -> StorageMeta:
    checkpoint_id = _checkpoint_id(checkpoint.checkpoint_id)
    return StorageMeta(checkpoint_id=checkpoint_id, save_id=SAVE_ID_PREFIX + checkpoint.save_id)


def _checkpoint_id(stored: str) -> Path | str:
    """Returns the place of a checkpoint as DCP's own classes have it: a path, or the URL of a store."""
    return as_place(stored)
