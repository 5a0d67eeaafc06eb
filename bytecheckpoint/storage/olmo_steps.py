# SPDX-License-Identifier: Apache-2.0
"""The step folders of OLMo-core's trainer: a checkpoint in a folder of its own, and the trainer's files beside it.

``step100`` has ``model_and_optim``, which is the checkpoint, ``train/rank0.pt`` and so on, which OLMo-core needs to go
on, and ``.metadata.json``, which it writes last: without that the step is none to it. Needs no torch.
"""

from __future__ import annotations

import re
from pathlib import Path

from bytecheckpoint.storage.folders import folder_at
from bytecheckpoint.storage.names import RECORDS
from bytecheckpoint.storage.paths import Place, below, name_of, parent_of
from bytecheckpoint.storage.small_files import made_folder

__all__ = [
    "MODEL_AND_OPTIM",
    "WRITTEN_LAST",
    "copy_files_beside",
    "has_checkpoint",
    "in_final_folder",
    "is_whole",
]

MODEL_AND_OPTIM = "model_and_optim"
WRITTEN_LAST = ".metadata.json"

# A save that is waited for goes to a folder with this name, which is renamed when all is written.
_UNFINISHED = re.compile(r"^(step\d+)-tmp(?=/|$)")
# What Python calls a file that OLMo-core is about to rename.
_TMP = re.compile(r"tmp[a-z0-9_]{8}")


def in_final_folder(rest: str) -> str:
    """Returns the path of what is saved, relative to its run, once OLMo-core has given the step its name."""
    return _UNFINISHED.sub(r"\1", rest)


def has_checkpoint(step: Place) -> bool:
    """Whether a step folder has the layout of OLMo-core, and a committed checkpoint in it."""
    return folder_at(below(step, MODEL_AND_OPTIM)).has(".metadata") and not folder_at(step).has(".metadata")


def is_whole(step: Place) -> bool:
    """Whether a step folder has the layout of OLMo-core, and OLMo-core has written all of it."""
    return has_checkpoint(step) and folder_at(step).has(WRITTEN_LAST)


def copy_files_beside(source: Place, target: Place) -> None:
    """Copies the trainer's files of a step whose checkpoint is copied already.

    If the target has no ``.metadata.json``, all are copied, what only the target has is removed, and ``.metadata.json``
    comes last. Else those are copied that are not there, or have another size: they were written later.

    Raises:
        StorageError: The storage refused.
    """
    sizes, there = _files_beside(source), _files_beside(target)
    is_begun = WRITTEN_LAST not in there
    for name in sorted(sizes, key=lambda name: (name == WRITTEN_LAST, name)):
        if not is_begun and there.get(name) == sizes[name]:
            continue
        content = folder_at(source).read_file(name, sizes[name])
        if content is None:  # it was renamed, or removed
            continue
        at = below(target, *name.split("/"))
        folder = parent_of(at)
        if isinstance(folder, Path):
            made_folder(folder)
        folder_at(folder).write_file(name_of(at), content)
    for name in there.keys() - sizes.keys() if is_begun else ():
        folder_at(target).remove_file(name)


def _files_beside(step: Place) -> dict[str, int]:
    """Returns the sizes of the trainer's files of a step, by name."""
    folder = folder_at(step)
    if folder.is_gone():
        return {}
    files = folder.files(without=(MODEL_AND_OPTIM, RECORDS))
    return {file.name: file.num_bytes for file in files if not _TMP.fullmatch(file.name)}
