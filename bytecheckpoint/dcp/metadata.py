# SPDX-License-Identifier: Apache-2.0
"""DCP's ``Metadata`` of what the engine stores."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from bytecheckpoint import _C
from bytecheckpoint.dcp import _compat

__all__ = ["SAVE_ID_PREFIX", "complete_metadata", "metadata_of"]

DCP_VERSION = "1.0.0"
SAVE_ID_PREFIX = "bcp1-"


_filling = threading.RLock()


class _UnfilledMetadata(Metadata):
    """Builds ``storage_data`` when somebody looks at it, and is a plain ``Metadata`` from then on.

    No load and no save through us looks at it, and for a hundred thousand tensors it takes a good part of a second.
    """

    # A property, because the dataclass field has a class attribute that __getattr__ would never see.
    @property
    def storage_data(self) -> Any:
        return self._filled().storage_data

    @storage_data.setter
    def storage_data(self, value: Any) -> None:
        self._become_plain(value)

    def _filled(self) -> Metadata:
        with _filling:
            checkpoint = self.__dict__.get("_checkpoint")
            if checkpoint is not None:  # else another thread was faster, or `dataclasses.replace` made this object
                self._become_plain(_C.storage_data(checkpoint, _compat.StorageInfo))
        return self

    def _become_plain(self, storage_data: Any) -> None:
        self.__dict__.pop("_checkpoint", None)
        self.__dict__["storage_data"] = storage_data
        self.__class__ = Metadata  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return self._filled() == other

    __hash__ = None  # type: ignore[assignment]  # as of the dataclass

    def __repr__(self) -> str:
        return repr(self._filled())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._filled().__reduce_ex__(protocol)


def _fill_later(metadata: Metadata, checkpoint: _C.Checkpoint) -> Metadata:
    if type(metadata) not in (Metadata, _UnfilledMetadata):  # a planner's own
        metadata.storage_data = _C.storage_data(checkpoint, _compat.StorageInfo)
        return metadata
    metadata.__dict__.pop("storage_data", None)
    metadata.__dict__["_checkpoint"] = checkpoint
    metadata.__class__ = _UnfilledMetadata
    return metadata


def complete_metadata(metadata: Metadata, checkpoint: _C.Checkpoint) -> None:
    """Adds to the metadata of a plan what only the committed checkpoint knows."""
    metadata.version = DCP_VERSION
    metadata.storage_meta = _storage_meta(checkpoint)
    _fill_later(metadata, checkpoint)


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
    metadata = _compat.new_metadata(
        state_dict_metadata=_C.state_dict_metadata(checkpoint),
        planner_data=checkpoint.planner_data,
        storage_meta=storage_meta,
        version=version,
    )
    return _fill_later(metadata, checkpoint)


def _storage_meta(checkpoint: _C.Checkpoint) -> StorageMeta:
    return StorageMeta(checkpoint_id=Path(checkpoint.checkpoint_id), save_id=SAVE_ID_PREFIX + checkpoint.save_id)
