# SPDX-License-Identifier: Apache-2.0
"""The parts of a checkpoint of ``bytecheckpoint.save``, each of which is a checkpoint of its own. Needs no torch."""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bytecheckpoint.errors import CorruptCheckpointError, UnsupportedError
from bytecheckpoint.native import _core
from bytecheckpoint.storage.checkpointing_steps import WITHOUT_MARK, inspected_step, is_without_mark
from bytecheckpoint.storage.folders import folder_at
from bytecheckpoint.storage.names import RECORDS
from bytecheckpoint.storage.olmo_steps import MODEL_AND_OPTIM
from bytecheckpoint.storage.own_parts import ranks_of_own_part
from bytecheckpoint.storage.paths import Place, as_place, name_of, parent_of
from bytecheckpoint.storage.stored_digest import without_stored

__all__ = [
    "PARTS",
    "REFERENCE",
    "checkpoints_in",
    "description_in",
    "description_of",
    "different_saves",
    "inspect_step",
    "is_bare",
    "is_of_reference",
    "json_of",
    "parsed_user_metadata",
    "parts_in",
    "step_and_part",
]

# In the order in which they are committed: if the model of a new folder is there, all of it is.
PARTS = ("extra_state", "optimizer", "model")

REFERENCE = (
    "ByteCheckpoint 0.0.2 or 0.0.3 wrote it, in a format of its own: load its parts one by one with load_state_dict or "
    "BcpReader, as '.../model', or convert them with bcp convert, and save what you loaded to a new folder"
)

_KEY = "bytecheckpoint"
_MOST_SHOWN = 80
# What the engine says of a folder of ByteCheckpoint contains this.
_OF_REFERENCE = "metadata of ByteCheckpoint 0.0.x"


# If parts are not complete, the first of their states in this order is the state of the whole.
_WORST_FIRST = ("corrupt", "incomplete", "unknown", "saving", "half", "part")
_IS_PART = "machines with disks of their own have the other parts"


def step_and_part(place: Place) -> tuple[Place, str]:
    """Returns the step of a path, and which part of it the path is; "" if it is the step itself. Looks at the path.

    The checkpoint in a step of OLMo-core is a part, too.
    """
    name = name_of(place)
    return (parent_of(place), name) if name in (*PARTS, MODEL_AND_OPTIM) else (place, "")


def _is_list_of(kind: type, value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, kind) for each in value)


# Checks of the fields of a description that something depends on. They are needed because checksums are not signatures:
# anybody may have written the description.
_FIELDS: dict[str, Callable[[Any], bool]] = {
    "save": lambda value: isinstance(value, str),
    "parts": lambda value: _is_list_of(str, value),
    "global_step": lambda value: value is None or isinstance(value, int),
    "world_size": lambda value: isinstance(value, int) and value > 0,
    "extra_state_policy": lambda value: isinstance(value, str | dict),
    "tied": lambda value: _is_list_of(list, value) and all(_is_list_of(str, names) for names in value),
}


def parts_in(folder: str | os.PathLike[str]) -> tuple[str, ...]:
    """Returns which of ``PARTS`` are folders in ``folder``, whatever they contain. Symbolic links are left out.

    Raises:
        StorageError: The file system refused to look into ``folder``.
    """
    there = folder_at(folder).folders()
    return tuple(part for part in PARTS if part in there)


def checkpoints_in(folder: str | os.PathLike[str]) -> list[str]:
    """Returns the names of the folders in ``folder`` that have a ``.metadata``.

    Raises:
        StorageError: The file system refused to look into ``folder``.
    """
    names = folder_at(folder).folders(follow_links=True)
    return sorted(name for name in names if folder_at(os.path.join(folder, name)).has(".metadata"))  # noqa: PTH118


def parsed_user_metadata(text: str, path: str | os.PathLike[str]) -> Any:
    """Returns what was passed to ``BcpWriter(user_metadata=...)``, or None. See ``json_of`` for errors."""
    return without_stored(json_of(text, path))


def json_of(text: str, path: str | os.PathLike[str]) -> Any:
    """Returns the user metadata of a checkpoint, with what the save has added to them.

    Args:
        text: The user metadata of a checkpoint; "" if it has none.
        path: Path of the checkpoint, for messages.

    Raises:
        CorruptCheckpointError: The text is not JSON.
        UnsupportedError: Python cannot read this JSON: it has a number of thousands of digits, or thousands of nested
            brackets.
    """
    try:
        return json.loads(text) if text else None
    except json.JSONDecodeError as error:
        raise CorruptCheckpointError(f"open({path}): user_metadata is not JSON: {error}", os.fspath(path)) from error
    except (ValueError, RecursionError) as error:
        raise UnsupportedError(f"open({path}): user_metadata cannot be read: {error}", os.fspath(path)) from error


def description_in(user_metadata: Any, path: str | os.PathLike[str] = "") -> dict[str, Any]:
    """Returns the description of the save that ``bytecheckpoint.save`` stores in each part.

    It is empty if another writer made the part.

    Args:
        user_metadata: User metadata of the part.
        path: Path of the part, for messages.

    Raises:
        CorruptCheckpointError: The description is not one that ``bytecheckpoint.save`` writes.
    """
    found = user_metadata.get(_KEY) if isinstance(user_metadata, Mapping) else None
    if not isinstance(found, dict):
        return {}
    for name, value in found.items():
        if name in _FIELDS and not _FIELDS[name](value):
            where = f"open({path}): " if path else ""
            raise CorruptCheckpointError(
                f"{where}the description of the save has {name}={reprlib.repr(value)}, which no save writes",
                os.fspath(path),
            )
    return found


def description_of(part: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the description of the save that the part in the folder ``part`` has; see ``description_in``.

    Raises:
        CheckpointError: The folder holds no checkpoint that can be opened, or its description is not valid.
    """
    return description_in(parsed_user_metadata(_core.Checkpoint.open(os.fspath(part)).user_metadata, part), part)


def different_saves(descriptions: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns a text that names the saves of the parts of one folder if they are of different saves; otherwise "".

    Args:
        descriptions: Descriptions by part. Parts of another writer fit every save. So do parts that an older save left
            and that the newer save does not have.
    """
    listed = descriptions.get("model", {}).get("parts", PARTS)
    ours = {part: of_part for part, of_part in descriptions.items() if "save" in of_part and part in listed}
    if len({of_part["save"] for of_part in ours.values()}) <= 1:
        return ""
    return ", ".join(
        f"{part} of a save of step {_shown(of_part.get('global_step'))} ({_shown(of_part['save'], 8)})"
        for part, of_part in ours.items()
    )


def is_of_reference(reason: str) -> bool:
    """Whether ``reason`` is the engine's refusal of metadata of ByteCheckpoint 0.0.2 or 0.0.3."""
    return _OF_REFERENCE in reason


def is_bare(found: Mapping[str, Any]) -> bool:
    """Whether ``inspect_step``, or ``_core.inspect_folder``, found no file of a checkpoint."""
    return not any(found[kind] for kind in ("marks", "tmps", "data_files", "num_files"))


def inspect_step(folder: str | os.PathLike[str], tmps: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Returns what ``_core.inspect_folder`` finds in a step folder or, if that holds parts, in all of its parts.

    Args:
        folder: A step folder.
        tmps: Names of this process's own tmps, by part; under the key "" for a folder without parts.

    Returns:
        The keys of ``_core.inspect_folder``, and three more. ``records``: the folder of journals and traces, which is
        not among the others. ``components``: what was found in each part, empty if there are no parts. ``has_mark``:
        whether there is a commit mark, in the folder itself, in the model if there are parts, or in a folder of another
        name.
    """
    tmps = tmps or {}
    found = _inspected(folder, tmps.get("", ""))
    found.update(components={}, has_mark=bool(found["marks"]))
    if is_of_reference(found["reason"]):
        found["reason"] = REFERENCE
    of_another = inspected_step(folder, found)
    if of_another or found["state"] != "unknown" or found["marks"] or found["data_files"]:
        return {**found, **of_another}
    there = parts_in(folder)
    components = {part: _inspected(os.path.join(folder, part), tmps.get(part, "")) for part in there}  # noqa: PTH118
    for part in there:
        if is_bare(components[part]) and folder_at(os.path.join(folder, part)).is_removed():  # noqa: PTH118
            del components[part]
    if all(map(is_bare, components.values())):  # others have a `model`, too
        within = checkpoints_in(folder)
        if within:
            found.update(has_mark=True, reason=f"it holds checkpoints in an unknown layout: {_names(within)}")
        elif is_without_mark(found["others"]):
            found.update(has_mark=True, reason=WITHOUT_MARK)
        return found
    state, reason = _state_of(folder, components)
    found.update(state=state, reason=reason, others=[name for name in found["others"] if name not in components])
    for kind in ("is_being_saved", "is_foreign"):
        found[kind] = any(of_part[kind] for of_part in components.values())
    for kind in ("num_files", "num_bytes"):
        found[kind] = sum(of_part[kind] for of_part in components.values())
    found["save_ids"] = [save_id for of_part in components.values() for save_id in of_part["save_ids"]]
    found.update(components=components, has_mark=bool(components.get("model", {}).get("marks")))
    return found


def _inspected(folder: str | os.PathLike[str], tmp: str) -> dict[str, Any]:
    found = _core.inspect_folder(os.fspath(folder), tmp)
    at = as_place(folder)
    if found["state"] == "corrupt" and RECORDS in found["others"] and isinstance(at, Path) and found["save_ids"]:
        ranks = ranks_of_own_part(at, found["save_ids"][0])
        of_these = None if ranks is None else _core.inspect_folder(str(at), tmp, ranks)
        if of_these is not None and of_these["state"] == "complete":
            found.update(state="part", reason=_IS_PART)
    found["records"] = [name for name in found["others"] if name == RECORDS]
    found["others"] = [name for name in found["others"] if name != RECORDS]
    if found["records"] and not found["others"] and is_bare(found):  # a save failed that kept a trace
        found.update(state="half", reason="empty")
    return found


def _state_of(folder: str | os.PathLike[str], components: Mapping[str, Mapping[str, Any]]) -> tuple[str, str]:
    """Returns state and reason of all parts together.

    The state is the worst of any part. It is ``half``, or ``saving``, if all parts are complete but do not belong
    together.
    """
    states = {of_part["state"] for of_part in components.values()} - {"complete"}
    if states == {"part"}:
        return "part", _IS_PART
    for state in sorted(states, key=lambda state: (*_WORST_FIRST, state).index(state)):
        reasons = [f"{part}: {of['reason'] or state}" for part, of in components.items() if of["state"] == state]
        return state, REFERENCE if any(map(is_of_reference, reasons)) else "; ".join(reasons)
    is_being_saved = any(of_part["is_being_saved"] for of_part in components.values())
    if "model" not in components:
        return "saving" if is_being_saved else "half", "there is no model"
    descriptions = {part: description_of(os.path.join(folder, part)) for part in components}  # noqa: PTH118
    missing = [part for part in descriptions["model"].get("parts", ()) if part not in components]
    mixed = different_saves(descriptions)
    if missing or mixed:
        reason = f"there is no {_shown(missing[0])}" if missing else f"parts of different saves: {mixed}"
        return "saving" if is_being_saved else "half", reason
    return "complete", ""


def _names(names: list[str]) -> str:
    return ", ".join(map(_shown, names[:4])) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _shown(value: object, most: int = _MOST_SHOWN) -> str:
    """Returns a name or number as UTF-8 text of limited length. Anybody may have written it."""
    return str(value)[:most].encode(errors="backslashreplace").decode()
