# SPDX-License-Identifier: Apache-2.0
"""Finds values that will not load without opting in, when they are saved."""

from __future__ import annotations

import io
from collections.abc import Mapping

import torch
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType

from bytecheckpoint.config import Config
from bytecheckpoint.dcp.save_planner import as_plain
from bytecheckpoint.errors import UnsafeObjectError
from bytecheckpoint.native import _core

__all__ = ["UnsafeObjects", "describe_unsafe", "refuse_unsafe"]

# At most this many are looked for and named, because torch's check takes half as long as pickling.
_MOST_NAMED = 8


class UnsafeObjects:
    """Collects the objects of one rank and one save that a load would refuse.

    Args:
        config: Settings. ``unsafe_objects`` says whether to look, and whether to raise. ``allow_pickle`` turns off
            warnings.

    Attributes:
        found: Maps each key to the names of the classes and functions that a load would refuse.
    """

    def __init__(self, config: Config) -> None:
        mode = config.unsafe_objects
        self._refuses = mode == "error"
        self._looks = self._refuses or (mode == "warn" and not config.allow_pickle)
        self.found: dict[str, str] = {}

    def look(self, fqn: str, record: bytes | memoryview) -> None:
        """Checks the bytes of one object.

        Args:
            fqn: Key of the object.
            record: Bytes of the object. Nobody may change them during the call.

        Raises:
            UnsafeObjectError: A load would refuse the object, and ``unsafe_objects="error"``.
        """
        if not self._looks or len(self.found) >= _MOST_NAMED or _core.is_standard(record):
            return
        names = _names_refused(record)
        if names is None:
            return
        self.found[fqn] = names
        if self._refuses:
            raise UnsafeObjectError(describe_unsafe(self.found))


def _names_refused(record: bytes | memoryview) -> str | None:
    """Returns what torch's ``weights_only`` rules, as they are now, refuse in a record; None if nothing."""
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(record))
    except Exception:  # torch raises exceptions of many types for bytes that it cannot read
        return "bytes that torch.load cannot read"
    return ", ".join(sorted(names)) or None


def describe_unsafe(found: Mapping[str, str]) -> str:
    """Returns a message that names keys and types, and says what to do."""
    named = ", ".join(f"'{fqn}' ({names})" for fqn, names in list(found.items())[:_MOST_NAMED])
    more = " and maybe more" if len(found) >= _MOST_NAMED else ""
    return (
        f"these objects will not load without opting in: {named}{more}; either load them with "
        "Config(allow_pickle=True), which may run code of the checkpoint, or save values of other types: builtin ones, "
        "the standard types of docs/tensors_and_objects.md, or types that the loading program adds with "
        "torch.serialization.add_safe_globals"
    )


def refuse_unsafe(plan: SavePlan, config: Config, planner: object) -> None:
    """Checks all objects of a rank before anything is written, if ``unsafe_objects="error"``.

    Objects that are not made of builtin values are pickled for the check, and once more when they are written.

    Args:
        plan: Plan of this rank.
        config: Settings.
        planner: Planner of the save; None if it is not known, which happens outside of DCP's call. Then nothing is
            checked here.

    Raises:
        UnsafeObjectError: A load would refuse an object.
    """
    if config.unsafe_objects != "error":
        return
    if not isinstance(planner, SavePlanner):
        return
    unsafe = UnsafeObjects(config)
    plain = as_plain(planner)
    if plain is None:
        for item in plan.items:
            if item.type is WriteItemType.BYTE_IO:
                record = planner.resolve_data(item)
                if isinstance(record, io.BytesIO):
                    with record.getbuffer() as data:
                        unsafe.look(item.index.fqn, data)
        return
    for fqn, value in plain.state_dict.items():
        if not isinstance(value, torch.Tensor) and _core.dump_builtin(value) is None:
            with _pickled(value) as data:
                unsafe.look(fqn, data)


def _pickled(value: object) -> memoryview:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getbuffer()
