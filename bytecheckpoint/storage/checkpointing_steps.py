# SPDX-License-Identifier: Apache-2.0
"""The step folders of torch_checkpointing: ``ITEM_R.pt`` of each item and rank, and ``metadata.pkl``. Needs no torch.

Its manager writes into ``tmp_NAME`` and renames that. Not every manager does (``write_to_temp_dir=False``), and
``metadata.pkl``, which says what ranks have written, is there only if an item can be resharded. So a step counts if it
has this file, and what this file names is whole. torchtitan's manager looks for it, too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from bytecheckpoint.errors import CheckpointError, CorruptCheckpointError
from bytecheckpoint.native import _core
from bytecheckpoint.storage.paths import as_place

__all__ = ["FIRST_FILE_OF_A_MODEL", "MARK", "WITHOUT_MARK", "inspected_step", "is_without_mark"]

MARK = "metadata.pkl"
"""The commit mark of such a step."""

WITHOUT_MARK = (
    f"files of ranks, as torch_checkpointing writes them, without {MARK}, so nobody knows whether all are there: give "
    "an ItemSpec of its manager a resharder; what is there is read as 'FOLDER/model_*.pt'"
)

FIRST_FILE_OF_A_MODEL = r"(?!.*_world_size_\d+_rank_).*(model|optim).*_0\.pt"  # verl has others
"""Regular expression: without the mark only names tell, so that a user's own ``rng_0.pt`` is no checkpoint."""

_FIRST_FILE = re.compile(r".+_0\.pt")


def is_without_mark(names: Collection[str]) -> bool:
    """Whether a folder of these names may be a step of torch_checkpointing that lacks its mark."""
    return MARK not in names and any(re.fullmatch(FIRST_FILE_OF_A_MODEL, name) for name in names)


def inspected_step(folder: str | os.PathLike[str], found: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what differs from ``found`` if a folder is a step of torch_checkpointing; else nothing.

    Args:
        folder: A step folder. Only those of a file system are known.
        found: What the engine found in it; see ``inspect_step``.
    """
    is_ours = found["marks"] or found["is_being_saved"]
    is_step = MARK in found["others"] and any(map(_FIRST_FILE.fullmatch, found["others"]))
    if is_ours or not is_step or not isinstance(as_place(folder), Path):
        return {}
    step: dict[str, Any] = {"marks": [MARK], "has_mark": True, "is_foreign": True, "state": "complete", "reason": ""}
    files: list[str] = []
    try:
        files = [name for name, *_ in _core.Checkpoint.open(os.fspath(folder)).files()]
        step["num_bytes"] = sum(Path(folder, name).stat().st_size for name in files)
    except (CheckpointError, OSError) as error:
        is_corrupt = isinstance(error, CorruptCheckpointError | FileNotFoundError)
        step |= {"state": "corrupt" if is_corrupt else "unknown", "reason": str(error)}
    others = [name for name in found["others"] if name not in {MARK, *files}]
    # What a save of DCP has left there, which never was committed, goes with the step.
    return {**step, "data_files": [*files, *found["data_files"]], "num_files": len(files), "others": others}
