# SPDX-License-Identifier: Apache-2.0
"""Keeps the names importable that public modules had before they were sorted into folders; importing one warns."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["MOVED", "install"]

_PACKAGE = "bytecheckpoint."
MOVED = {
    "bytecheckpoint.dcp.chunks": "bytecheckpoint.tensors.chunks",
    "bytecheckpoint.equality": "bytecheckpoint.tensors.equality",
    "bytecheckpoint.frameworks": "bytecheckpoint.training_state",
    "bytecheckpoint.local_path": "bytecheckpoint.checkpoint.local_path",
    "bytecheckpoint.merging": "bytecheckpoint.staging.merging",
    "bytecheckpoint.newest": "bytecheckpoint.training_state.latest",
    "bytecheckpoint.parts": "bytecheckpoint.checkpoint.parts",
    "bytecheckpoint.retention": "bytecheckpoint.checkpoint.retention",
    "bytecheckpoint.save_handle": "bytecheckpoint.staging.save_handle",
    "bytecheckpoint.small_files": "bytecheckpoint.checkpoint.small_files",
    "bytecheckpoint.step_names": "bytecheckpoint.checkpoint.step_names",
    "bytecheckpoint.steps": "bytecheckpoint.checkpoint.steps",
    "bytecheckpoint.verification": "bytecheckpoint.checkpoint.verification",
    "bytecheckpoint.wrong_path": "bytecheckpoint.checkpoint.wrong_path",
}


def _home_of(name: str) -> str | None:
    """Returns the present name of the module ``name``; None if it has not moved."""
    if name in MOVED:
        return MOVED[name]
    package, _, rest = name.rpartition(".")
    return f"{MOVED[package]}.{rest}" if package in MOVED else None


class _Finder(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(_PACKAGE) or _home_of(fullname) is None:
            return None
        return ModuleSpec(fullname, self, is_package=fullname == "bytecheckpoint.frameworks")

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        home = _home_of(spec.name)
        assert home is not None
        module = import_module(home)
        warnings.warn(f"{spec.name} has moved to {home}: import it from there", DeprecationWarning, stacklevel=2)
        # This must be a module object of its own, because the import system sets attributes on the module that it gets.
        alias = ModuleType(spec.name, module.__doc__)
        alias.__dict__["__getattr__"] = lambda name: getattr(module, name)
        return alias

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing: ``create_module`` has filled the module already."""


def install() -> None:
    """Makes the old names importable."""
    sys.meta_path.insert(0, _Finder())
