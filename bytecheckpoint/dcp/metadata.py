# SPDX-License-Identifier: Apache-2.0
"""DCP's ``Metadata`` of what the engine stores."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from bytecheckpoint import _C
from bytecheckpoint.dcp import _compat

__all__ = ["SAVE_ID_PREFIX", "checkpoint_of", "complete_metadata", "metadata_of", "plan_of", "planned_metadata"]

DCP_VERSION = "1.0.0"
SAVE_ID_PREFIX = "bcp1-"


_filling = threading.RLock()
_LATE = ("state_dict_metadata", "planner_data", "storage_data")


def _make_late(checkpoint: _C.Checkpoint, name: str) -> Any:
    if name == "state_dict_metadata":
        return _C.state_dict_metadata(checkpoint)
    if name == "planner_data":
        return checkpoint.planner_data
    return _C.storage_data(checkpoint, _compat.StorageInfo)


def _late(name: str) -> Any:
    """A field that is made when somebody looks at it.

    A property, because the dataclass field has a class attribute that ``__getattr__`` would never see.
    """

    def get(self: _UnfilledMetadata) -> Any:
        with _filling:
            fields = self.__dict__
            if name not in fields:
                fields[name] = _make_late(fields["_checkpoint"], name)
            value = fields[name]
            self._settle()
        return value

    def set_(self: _UnfilledMetadata, value: Any) -> None:
        with _filling:
            self.__dict__[name] = value
            self._settle()

    return property(get, set_)


class _UnfilledMetadata(Metadata):
    """Builds each of its large fields when somebody looks at it, and is a plain ``Metadata`` once it has them all.

    No load and no save through our planners looks at any, and for a hundred thousand tensors they take seconds.
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
            self.__class__ = Metadata  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return self._filled() == other

    __hash__ = None  # type: ignore[assignment]  # as of the dataclass

    def __repr__(self) -> str:
        return repr(self._filled())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._filled().__reduce_ex__(protocol)


def _fill_later(metadata: Metadata, checkpoint: _C.Checkpoint, fields: tuple[str, ...]) -> Metadata:
    if type(metadata) not in (Metadata, _UnfilledMetadata):  # a planner's own
        for name in fields:
            setattr(metadata, name, _make_late(checkpoint, name))
        return metadata
    for name in fields:
        metadata.__dict__.pop(name, None)
    metadata.__dict__["_checkpoint"] = checkpoint
    metadata.__class__ = _UnfilledMetadata
    return metadata


def checkpoint_of(metadata: Metadata) -> _C.Checkpoint:
    """What ``metadata`` says, for C++: the manifest that it will be made of, unless somebody looked at it and may have
    changed it, or it is another reader's."""
    fields = metadata.__dict__
    if isinstance(metadata, _UnfilledMetadata) and "state_dict_metadata" not in fields:
        checkpoint: _C.Checkpoint = fields["_checkpoint"]
        return checkpoint
    return _C.without_records(metadata.state_dict_metadata)


def planned_metadata(planned: _C.Checkpoint) -> Metadata:
    """What a plan says of a checkpoint that is not written yet."""
    return _fill_later(Metadata({}), planned, ("state_dict_metadata", "planner_data"))


def plan_of(metadata: Metadata) -> _C.Checkpoint | None:
    """What ``planned_metadata`` was given, unless somebody looked at it and may have changed it."""
    fields = metadata.__dict__
    if isinstance(metadata, _UnfilledMetadata) and not {"state_dict_metadata", "planner_data"} & fields.keys():
        planned: _C.Checkpoint = fields["_checkpoint"]
        return planned
    return None


def complete_metadata(metadata: Metadata, checkpoint: _C.Checkpoint) -> None:
    """Adds to the metadata of a plan what only the committed checkpoint knows."""
    metadata.version = DCP_VERSION
    metadata.storage_meta = _storage_meta(checkpoint)
    _fill_later(metadata, checkpoint, ("storage_data",))


def metadata_of(checkpoint: _C.Checkpoint, load_id: str) -> Metadata:
    """DCP's view of a checkpoint, equal to what its own reader would give."""
    version: str | None = DCP_VERSION
    storage_meta = StorageMeta()  # as stock makes one for a checkpoint that has none
    if checkpoint.foreign is None:
        storage_meta = _storage_meta(checkpoint)
    else:
        fields, id_is_path, version = checkpoint.foreign
        if fields is not None:
            for name, value in fields.items():  # also what this torch does not know, as its unpickler would
                setattr(storage_meta, name, value)
            if id_is_path:
                storage_meta.checkpoint_id = Path(str(storage_meta.checkpoint_id))
    storage_meta.load_id = load_id
    metadata = _compat.new_metadata(state_dict_metadata={}, storage_meta=storage_meta, version=version)
    return _fill_later(metadata, checkpoint, _LATE)


def _storage_meta(checkpoint: _C.Checkpoint) -> StorageMeta:
    return StorageMeta(checkpoint_id=Path(checkpoint.checkpoint_id), save_id=SAVE_ID_PREFIX + checkpoint.save_id)
