# SPDX-License-Identifier: Apache-2.0
"""Hands out the extension modules: ``from bytecheckpoint.native import _C, _core``.

A module is imported when it is asked for. If it was built for another torch or Python, the error says what to do.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bytecheckpoint import _C as _C
    from bytecheckpoint import _core as _core

__all__ = ["REBUILD", "extension", "other_package", "torch_mismatch"]

REBUILD = (
    "build it again for the installed versions: run pip install --no-build-isolation --no-deps --force-reinstall . in "
    "the source checkout"
)


def __getattr__(name: str) -> ModuleType:
    if name in ("_C", "_core"):
        module = globals()[name] = extension(name)  # the next access comes no more here
        return module
    raise AttributeError(f"module 'bytecheckpoint.native' has no attribute {name!r}")


def extension(name: str) -> ModuleType:
    """Imports and returns ``bytecheckpoint._core``, or ``bytecheckpoint._C``, which links against torch.

    Raises:
        ImportError: The module cannot be imported. The message says for which torch it was built, which torch is
            installed, and how to build it again.
    """
    if name == "_C":
        import_module("torch")  # an ImportError of torch itself says what is wrong with that
        mismatch = torch_mismatch()
        if mismatch:
            raise ImportError(f"bytecheckpoint._C: {mismatch}; {REBUILD}")
    try:
        return import_module(f"bytecheckpoint.{name}")
    except ImportError as error:
        why = other_package() or f"{_built_for()}; {REBUILD}"
        raise ImportError(f"bytecheckpoint.{name} cannot be imported ({error}): {why}") from error


def other_package() -> str:
    """Returns what is wrong if the other package of this import name is installed, too, otherwise ""."""
    try:
        theirs = version("bytecheckpoint")
    except PackageNotFoundError:
        return ""
    return (
        f"the package bytecheckpoint {theirs} is installed beside bytecheckpoint-dcp, under the same import name, and "
        "each replaces files of the other: pip uninstall both, and install the one that is wanted again"
    )


def torch_mismatch() -> str:
    """Returns what is wrong if the extension was built for another torch than the installed one, otherwise "".

    Patch releases of one version (2.7.0, 2.7.1) are compatible. Other versions may have other functions and another
    layout of tensors: if the extension can be linked against one nevertheless, it would write arbitrary bytes.
    """
    built, installed = _torch_of_build(), _torch_installed()
    if not built or not installed or built.split(".")[:2] == installed.split(".")[:2]:
        return ""
    return f"it was built for torch {built}, and torch {installed} is installed"


def _built_for() -> str:
    built, python = _torch_of_build() or "(unknown version)", sys.version.split()[0]
    return (
        f"it was built for torch {built}, and torch {_torch_installed() or '(none)'} and Python {python} are installed"
    )


def _torch_of_build() -> str:
    """Returns the torch that the extension was built for; "" if ``_core`` cannot be imported."""
    try:
        return str(import_module("bytecheckpoint._core").build_info().get("torch", ""))
    except ImportError:
        return ""


def _torch_installed() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""
