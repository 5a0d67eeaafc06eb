# SPDX-License-Identifier: Apache-2.0
"""DCP's ``Metadata`` to what the engine stores, and back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from bytecheckpoint.dcp import _compat
from bytecheckpoint.errors import InvalidPlanError

if TYPE_CHECKING:
    from bytecheckpoint import _C

__all__ = ["DCP_VERSION", "SAVE_ID_PREFIX", "metadata_of", "planned_items", "storage_data_of"]

DCP_VERSION = "1.0.0"
SAVE_ID_PREFIX = "bcp1-"

_MEMORY_FORMATS = (torch.contiguous_format, torch.channels_last, torch.preserve_format)


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def planned_items(metadata: Metadata) -> list[tuple[Any, ...]]:
    """Entries of ``metadata.state_dict_metadata`` as ``_C.Checkpoint.assemble`` takes them.

    Raises:
        InvalidPlanError: A layout or memory format that the format does not have; names the key.
    """
    items: list[tuple[Any, ...]] = []
    for fqn, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            items.append((fqn, "", False, False, 0, (), []))
            continue
        properties = entry.properties
        if properties.layout != torch.strided or properties.memory_format not in _MEMORY_FORMATS:
            raise InvalidPlanError(f"'{fqn}': {properties.layout}, {properties.memory_format} cannot be stored")
        items.append(
            (
                fqn,
                dtype_name(properties.dtype),
                properties.requires_grad,
                properties.pin_memory,
                _MEMORY_FORMATS.index(properties.memory_format),
                tuple(entry.size),
                [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks],
            )
        )
    return items


def storage_data_of(checkpoint: _C.Checkpoint) -> dict[MetadataIndex, Any]:
    """``Metadata.storage_data`` of a checkpoint: where each record lies."""
    data: dict[MetadataIndex, Any] = {}
    for fqn, dtype, _, _, _, _, chunks in checkpoint.items():
        for position, (offsets, _, file_name, offset, length) in enumerate(chunks):
            index = MetadataIndex(fqn, offsets, position) if dtype else MetadataIndex(fqn)
            data[index] = _compat.StorageInfo(file_name, offset, length)
    return data


def metadata_of(checkpoint: _C.Checkpoint) -> Metadata:
    """DCP's view of a checkpoint, equal to what its own reader would unpickle."""
    entries: dict[str, Any] = {}
    for fqn, dtype, requires_grad, pin_memory, memory_format, sizes, chunks in checkpoint.items():
        if not dtype:
            entries[fqn] = BytesStorageMetadata()
            continue
        entries[fqn] = TensorStorageMetadata(
            properties=TensorProperties(
                dtype=getattr(torch, dtype),
                layout=torch.strided,
                requires_grad=requires_grad,
                memory_format=_MEMORY_FORMATS[memory_format],
                pin_memory=pin_memory,
            ),
            size=torch.Size(sizes),
            chunks=[ChunkStorageMetadata(torch.Size(offsets), torch.Size(size)) for offsets, size, *_ in chunks],
        )
    return _compat.new_metadata(
        state_dict_metadata=entries,
        planner_data=checkpoint.planner_data,
        storage_data=storage_data_of(checkpoint),
        storage_meta=StorageMeta(
            checkpoint_id=Path(checkpoint.checkpoint_id), save_id=SAVE_ID_PREFIX + checkpoint.save_id
        ),
        version=DCP_VERSION,
    )
