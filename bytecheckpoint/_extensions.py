# SPDX-License-Identifier: Apache-2.0
"""Imports the extension modules. One that was built for another torch or Python is an error that says what to do."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

__all__ = ["REBUILD", "extension", "torch_mismatch"]

REBUILD = (
    "build it again for what is installed: pip install --no-build-isolation --no-deps --force-reinstall . in its "
    "checkout"
)


def extension(name: str) -> ModuleType:
    """``bytecheckpoint._core``, or ``bytecheckpoint._C``, which links against torch.

    Raises:
        ImportError: Says for which torch it was built, which is installed, and how to build it again.
    """
    if name == "_C":
        import_module("torch")  # an ImportError of torch itself says what is wrong with that
        mismatch = torch_mismatch()
        if mismatch:
            raise ImportError(f"bytecheckpoint._C: {mismatch}; {REBUILD}")
    try:
        return import_module(f"bytecheckpoint.{name}")
    except ImportError as error:
        raise ImportError(f"bytecheckpoint.{name} cannot be imported ({error}): {_built_for()}; {REBUILD}") from error


def torch_mismatch() -> str:
    """What is wrong if the extension was built for another torch than the one that is installed; else empty.

    Patches of one version go together. Of others C++ knows neither functions nor the layout of tensors: where they can
    be linked nevertheless, what is written would be anything.
    """
    built, installed = _torch_of_build(), _torch_installed()
    if not built or not installed or built.split(".")[:2] == installed.split(".")[:2]:
        return ""
    return f"it was built for torch {built}, and torch {installed} is installed"


def _built_for() -> str:
    built, python = _torch_of_build() or "that cannot be told", sys.version.split()[0]
    return (
        f"it was built for torch {built}, and torch {_torch_installed() or '(none)'} and Python {python} are installed"
    )


def _torch_of_build() -> str:
    """Empty if the build cannot be asked."""
    try:
        return str(import_module("bytecheckpoint._core").build_info().get("torch", ""))
    except ImportError:
        return ""


def _torch_installed() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""
