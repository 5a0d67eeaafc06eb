# SPDX-License-Identifier: Apache-2.0
"""The parts of a checkpoint of ``bytecheckpoint.save``, each of which is a checkpoint of its own. Needs no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bytecheckpoint import _core
from bytecheckpoint.errors import CheckpointError

__all__ = ["PARTS", "description_in", "description_of", "different_saves", "inspect_step", "is_whole", "parts_in"]

# In the order in which they are committed: who sees the model has all of a new folder.
PARTS = ("extra_state", "optimizer", "model")

_KEY = "bytecheckpoint"


def parts_in(folder: str | os.PathLike[str]) -> tuple[str, ...]:
    """Which of ``PARTS`` are folders there, whatever is in them. Symbolic links are left out."""
    paths = {part: Path(folder, part) for part in PARTS}
    return tuple(part for part, path in paths.items() if path.is_dir() and not path.is_symlink())


def description_in(user_metadata: Any) -> dict[str, Any]:
    """What ``bytecheckpoint.save`` says of a save in each part of it; empty if another writer made the part."""
    found = user_metadata.get(_KEY) if isinstance(user_metadata, Mapping) else None
    return found if isinstance(found, dict) else {}


def description_of(part: str | os.PathLike[str]) -> dict[str, Any]:
    """The same, of a folder that holds a part.

    Raises:
        CheckpointError: It holds no checkpoint that can be opened.
    """
    text = _core.Checkpoint.open(os.fspath(part)).user_metadata
    return description_in(json.loads(text) if text else None)


def different_saves(descriptions: Mapping[str, Mapping[str, Any]]) -> str:
    """Says of which saves the parts of one folder are, if they are of several; else "".

    Args:
        descriptions: By part. Parts that were put there by others go with all; so does what is left of an older save
            that had parts which the newer one has not.
    """
    listed = descriptions.get("model", {}).get("parts", PARTS)
    ours = {part: of_part for part, of_part in descriptions.items() if "save" in of_part and part in listed}
    if len({of_part["save"] for of_part in ours.values()}) <= 1:
        return ""
    return ", ".join(
        f"{part} of a save of step {of_part.get('global_step')} ({str(of_part['save'])[:8]})"
        for part, of_part in ours.items()
    )


def is_whole(folder: str | os.PathLike[str]) -> bool:
    """Has a folder a committed model, and all other parts that were saved with it, each with all of its tensors?"""
    there = parts_in(folder)
    if "model" not in there:
        return False
    try:
        model = description_of(Path(folder, "model"))
        wanted = [part for part in there if part in model.get("parts", there)]
        descriptions = {part: description_of(Path(folder, part)) for part in wanted}
        states = [_core.inspect_folder(os.path.join(folder, part))["state"] for part in wanted]  # noqa: PTH118
    except CheckpointError:
        return False
    if "incomplete" in states:
        return False
    return set(model.get("parts", ())) <= {*there} and not different_saves(descriptions)


def inspect_step(folder: str | os.PathLike[str], tmps: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What ``_core.inspect_folder`` finds in a step folder, or, if that holds parts, in all of them.

    Args:
        tmps: Names of tmps of this process, by part; "" of a folder without parts.

    Returns:
        The same keys, and ``components``, by part what was found in it; empty if there are no parts.
    """
    tmps = tmps or {}
    found = _core.inspect_folder(os.fspath(folder), tmps.get("", ""))
    there = parts_in(folder) if found["state"] == "unknown" and not found["data_files"] else ()
    components = {part: _core.inspect_folder(os.path.join(folder, part), tmps.get(part, "")) for part in there}  # noqa: PTH118
    of_ours = ("marks", "tmps", "data_files")
    if not any(of_part[kind] for of_part in components.values() for kind in of_ours):  # others have models, too
        return {**found, "components": {}}
    state, reason = _state_of(folder, components)
    found.update(state=state, reason=reason, others=[name for name in found["others"] if name not in components])
    for kind in ("is_being_saved", "is_foreign"):
        found[kind] = any(of_part[kind] for of_part in components.values())
    for kind in ("num_files", "num_bytes"):
        found[kind] = sum(of_part[kind] for of_part in components.values())
    found["save_ids"] = [save_id for of_part in components.values() for save_id in of_part["save_ids"]]
    return {**found, "components": components}


def _state_of(folder: str | os.PathLike[str], components: Mapping[str, Mapping[str, Any]]) -> tuple[str, str]:
    """Of a whole of parts: the worst of any, and ``half`` if they are all complete and do not belong together."""
    for state in ("corrupt", "incomplete", "unknown", "saving", "half"):
        reasons = [f"{part}: {of['reason'] or state}" for part, of in components.items() if of["state"] == state]
        if reasons:
            return state, "; ".join(reasons)
    is_being_saved = any(of_part["is_being_saved"] for of_part in components.values())
    if "model" not in components:
        return "saving" if is_being_saved else "half", "there is no model"
    descriptions = {part: description_of(Path(folder, part)) for part in components}
    missing = [part for part in descriptions["model"].get("parts", ()) if part not in components]
    mixed = different_saves(descriptions)
    if missing or mixed:
        reason = f"there is no {missing[0]}" if missing else f"parts of different saves: {mixed}"
        return "saving" if is_being_saved else "half", reason
    return "complete", ""
