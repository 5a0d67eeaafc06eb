# SPDX-License-Identifier: Apache-2.0
"""Values that will not load without opting in, named when they are saved."""

from __future__ import annotations

import io
from collections.abc import Mapping

import torch
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType

from bytecheckpoint import _core
from bytecheckpoint.config import Config
from bytecheckpoint.dcp._calls import SAVE, local_of_call
from bytecheckpoint.dcp.save_planner import as_plain
from bytecheckpoint.errors import UnsafeObjectError

__all__ = ["UnsafeObjects", "describe_unsafe", "refuse_unsafe"]

# More are not named, and in a warning not looked for: torch takes half as long to look as to pickle.
_MOST_NAMED = 8


class UnsafeObjects:
    """What one rank has found among the records that it writes in one save.

    Args:
        config: Its ``unsafe_objects`` says what to do. With ``allow_pickle`` there are no warnings.

    Attributes:
        found: Keys, each with the classes and functions that a load would refuse.
    """

    def __init__(self, config: Config) -> None:
        mode = config.unsafe_objects
        self._refuses = mode == "error"
        self._looks = self._refuses or (mode == "warn" and not config.allow_pickle)
        self.found: dict[str, str] = {}

    def look(self, fqn: str, record: bytes | memoryview) -> None:
        """Looks at the bytes of an object, which nobody changes.

        Raises:
            UnsafeObjectError: ``unsafe_objects="error"``, and a load would refuse it.
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
    """What torch's ``weights_only`` rules refuse in a record, now; None if nothing."""
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(record))
    except Exception:  # torch raises what it likes for what it cannot read
        return "bytes that torch.load cannot read"
    return ", ".join(sorted(names)) or None


def describe_unsafe(found: Mapping[str, str]) -> str:
    """Names keys and types, and says what to do."""
    named = ", ".join(f"'{fqn}' ({names})" for fqn, names in list(found.items())[:_MOST_NAMED])
    more = " and maybe more" if len(found) >= _MOST_NAMED else ""
    return (
        f"these objects will not load without opting in: {named}{more}; either load them with "
        "Config(allow_pickle=True), which may run code of the checkpoint, or save values of other types: builtin ones, "
        "the standard types that the README lists, or types that the loading program adds with "
        "torch.serialization.add_safe_globals"
    )


def refuse_unsafe(plan: SavePlan, config: Config) -> None:
    """Looks at all objects of a rank before the save has begun, if ``unsafe_objects="error"``.

    Objects that are not made of builtin values are pickled for it, and once more when they are written. Nothing is
    looked at where nobody knows the planner: outside DCP's call.

    Raises:
        UnsafeObjectError: A load would refuse an object.
    """
    if config.unsafe_objects != "error":
        return
    planner = local_of_call(*SAVE, "planner")
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
