# SPDX-License-Identifier: Apache-2.0
"""Names of the files that make a checkpoint. Needs no torch."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

__all__ = [
    "OF_OTHER_LIBRARIES",
    "RECORDS",
    "is_data",
    "is_mark",
    "is_of_other_library",
    "is_own_data",
    "is_own_file",
    "rank_of_data",
    "rank_of_mark",
    "save_of_tmp",
]

RECORDS = ".bcp"
"""Folder in a checkpoint, or in a store beside those of a run, for journal, traces and notes. No load needs it."""

OF_OTHER_LIBRARIES = (
    # tensors in formats of their own
    *("*.safetensors", "*.safetensors.index.json", "*.gguf", "*.ckpt", "*.nemo", "*.pdparams", "*.pdopt"),
    *("*.flashpack", "*.tensors", "*.msgpack", "*.h5", "*.onnx", "[0-9]*_[0-9]*.distcp"),
    # files of torch.save
    *("*model*.bin", "*model*.pt", "*model*.pth", "*optim*.bin", "*optim*.pt", "*lora*.bin", "consolidated*.pth"),
    *("fp32.pt", "*_world_size_*_rank_*.pt", "*-rank[0-9]*.pt"),
    # what describes a checkpoint
    *("metadata.pkl", "_METADATA", "*CHECKPOINT_METADATA", "manifest.ocdbt", ".zarray", ".zgroup", "zarr.json"),
    *("checkpoint_metadata.json", ".snapshot_metadata", "[0-9]*.metadata"),
)
"""Globs for names of files that only checkpoints of other libraries have. Where one is, no sweep may remove it."""


_DATA = re.compile(r"(.*/)?__\d+_\d+(\.[0-9a-f]{16})?\.distcp")
_OWN_DATA = re.compile(r"(.*/)?__\d+_\d+\.[0-9a-f]{16}\.distcp")
_RANK = re.compile(r"__(\d{1,10})_\d+(\.[0-9a-f]{16})?\.distcp")  # of ours, and of stock DCP
_TMP = re.compile(r"(__\d+)?\.metadata\.([0-9a-f]{32})\.tmp")
_MARK = re.compile(r"(.*/)?(__(\d+))?\.metadata")


def is_data(name: str) -> bool:
    """Whether it is the name of a data file, of ours or of stock DCP."""
    return _DATA.fullmatch(name) is not None


def is_own_data(name: str) -> bool:
    """Whether it is the name of a data file of ours: ``__{rank}_{n}.{16 hex digits}.distcp``."""
    return _OWN_DATA.fullmatch(name) is not None


def is_of_other_library(name: str) -> bool:
    """Whether a file of this name, without folders, is of a checkpoint in a format of another library than DCP."""
    return any(fnmatchcase(name, glob) for glob in OF_OTHER_LIBRARIES)


def is_mark(name: str) -> bool:
    """Whether it is the name of a commit mark: of a save, or of one rank."""
    return _MARK.fullmatch(name) is not None


def rank_of_mark(name: str) -> int | None:
    """Returns the rank whose commit mark it is; None for the mark of a whole save."""
    found = _MARK.fullmatch(name)
    return int(found[3]) if found is not None and found[3] is not None else None


def is_own_file(name: str) -> bool:
    """Whether it is the name of anything that a save of ours uploads."""
    return is_own_data(name) or is_mark(name)


def rank_of_data(name: str) -> int | None:
    """Returns the rank that wrote the data file of this name, of ours or of stock DCP; None if it is none."""
    found = _RANK.fullmatch(name)
    return int(found[1]) if found is not None else None


def save_of_tmp(name: str) -> str | None:
    """Returns the id of the save whose right to commit has this name; None if it is none."""
    found = _TMP.fullmatch(name)
    return found[2] if found is not None else None
