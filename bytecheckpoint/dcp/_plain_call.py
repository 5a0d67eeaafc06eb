# SPDX-License-Identifier: Apache-2.0
"""Calls of DCP with our writer or reader, and no planner or DCP's own, untouched one: our planners plan them.

DCP's function keeps its planner in a variable that the functions inside it share. The first hook of ours that it calls,
before it has asked the planner for anything, puts a planner of ours there. Neither DCP nor an object of the caller
changes: this call alone has another planner.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import typing
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

from bytecheckpoint.calls.of_dcp import cell_of
from bytecheckpoint.config import Config
from bytecheckpoint.dcp.load_planner import BcpLoadPlanner
from bytecheckpoint.dcp.save_planner import BcpSavePlanner
from bytecheckpoint.probes.of_torch import PLAIN_CALLS
from bytecheckpoint.probes.probe import holds

__all__ = ["plan_load", "plan_save"]


class _AsImported:
    """A planner class of DCP and all that it calls, as they were when this module was imported.

    Args:
        of: The class.
        options: Attributes that its constructor sets from arguments of the same name, and ours as well.
    """

    def __init__(self, of: type, options: tuple[str, ...]) -> None:
        self._of, self._options = of, options
        holders: tuple[type | ModuleType, ...] = (*of.__mro__[:-1], *_modules_behind(default_planner))
        self._found = [(holder, _members(holder)) for holder in holders]
        foreign = (name for _, found in self._found for name, value in found.items() if not _may_be_of_dcp(value))
        self._foreign = next(foreign, "")

    def why_touched(self, planner: object) -> str:
        """Returns how ``planner`` differs from a new planner of DCP; empty if it does not, but for its options."""
        if type(planner) is not self._of:
            return f"it is a {type(planner).__name__}"
        if self._foreign:
            return f"{self._foreign} of DCP was replaced before this package was imported"
        for holder, found in self._found:
            now = _members(holder)
            for name in found.keys() | now.keys():
                if now.get(name, self) is not found.get(name, self):
                    return f"{name} of DCP was replaced"
        new, has = vars(self._of()), vars(planner)
        names = [name for name in {**new, **has} if name not in self._options]
        changed = [name for name in names if name not in new or name not in has or not _equal(new[name], has[name])]
        changed += [name for name in self._options if type(has.get(name)) is not bool]
        return f"its attribute {changed[0]} was set" if changed else ""

    def options(self, planner: object) -> dict[str, Any]:
        return {name: getattr(planner, name) for name in self._options}


def _modules_behind(module: ModuleType) -> list[ModuleType]:
    """Returns a module of DCP and those whose functions it has imported, and so on."""
    modules = [module]
    for each in modules:  # grows meanwhile
        for value in vars(each).values():
            name = (value.__module__ or "") if isinstance(value, FunctionType) else ""
            found = sys.modules.get(name) if name.startswith("torch.distributed.checkpoint.") else None
            if found is not None and found not in modules:
                modules.append(found)
    return modules


def _members(holder: type | ModuleType) -> dict[str, Any]:
    """Returns what a caller would find there and call."""
    return {name: value for name, value in vars(holder).items() if callable(value) and not name.startswith("__")}


def _may_be_of_dcp(value: Any) -> bool:
    """Whether DCP may have put a callable there: not a mock, a partial, or a function of code outside torch."""
    if isinstance(value, type) or type(value).__module__ in ("builtins", "types", "typing", "typing_extensions"):
        return not isinstance(value, FunctionType) or value.__code__.co_filename.startswith(_OF_TORCH)
    return type(value) is type(functools.lru_cache(_members))


def _equal(new: object, has: object) -> bool:
    """Whether an attribute has the value that a new planner has there. It asks no object for its opinion."""
    return has is new or (type(has) is type(new) and type(new) in _PLAIN and has == new)


# A function of the standard library that DCP has imported, or decorated one of its own with.
_OF_TORCH = (os.path.dirname(torch.__file__) + os.sep, typing.__file__, contextlib.__file__, functools.__file__)  # noqa: PTH120
_PLAIN = (bool, int, str, dict)
_FLATTEN = ("flatten_state_dict", "flatten_sharded_tensors")
_OF_SAVE = _AsImported(DefaultSavePlanner, (*_FLATTEN, "dedup_save_to_lowest_rank"))
_OF_LOAD = _AsImported(DefaultLoadPlanner, (*_FLATTEN, "allow_partial_load"))


def plan_save(writer: object, variables: dict[str, Any], config: Config) -> str:
    """Lets a ``BcpSavePlanner`` plan the save of ``writer``, if its planner is DCP's own and nobody has touched it.

    Args:
        writer: The writer, one of whose hooks runs.
        variables: Those of DCP's function that runs the save. ``planner`` becomes the planner of the save.
        config: Settings of the writer.

    Returns:
        Why the save keeps the planner that it has; empty if it has one of ours.
    """
    return _plan(
        writer, "storage_writer", variables, config, _OF_SAVE, functools.partial(BcpSavePlanner, config=config)
    )


def plan_load(reader: object, variables: dict[str, Any], config: Config) -> str:
    """Does for a load what ``plan_save`` does for a save, with a ``BcpLoadPlanner``."""
    return _plan(reader, "storage_reader", variables, config, _OF_LOAD, BcpLoadPlanner)


def _plan(
    asking: object,
    storage: str,
    variables: dict[str, Any],
    config: Config,
    theirs: _AsImported,
    ours: Callable[..., Any],
) -> str:
    planner = variables.get("planner")
    if isinstance(planner, (BcpSavePlanner, BcpLoadPlanner)):
        return ""
    if config.planning == "as given":
        return "Config(planning='as given')"
    if variables.get(storage) is not asking:
        return f"another {storage} is around ours"
    if not holds(PLAIN_CALLS):
        return "DCP of this torch does not keep its planner where we look for it"
    if why := theirs.why_touched(planner):
        return f"planner: {why}"
    cell = cell_of(variables.get("local_step"), "planner")
    if cell is None or cell.cell_contents is not planner:
        return "DCP's function keeps its planner elsewhere"
    cell.cell_contents = variables["planner"] = ours(**theirs.options(planner))
    return ""
