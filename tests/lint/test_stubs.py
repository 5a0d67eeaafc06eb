# SPDX-License-Identifier: Apache-2.0
"""The stubs of the extension modules name what the modules have, no more and no less."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch  # noqa: F401  # _C links against it

import bytecheckpoint

PACKAGE = Path(bytecheckpoint.__file__).parent


def names_in_stub(path: Path) -> dict[str, set[str]]:
    """Public names of a stub: "" for the module, class names for their public members."""
    names: dict[str, set[str]] = {"": set()}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module == "bytecheckpoint._both":
            (imported,) = (alias.name for alias in node.names)
            names[""].add(imported)
            names[imported] = names_in_stub(PACKAGE / "_both.pyi")[imported]
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names[""].add(node.name)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names[""].add(node.target.id)
        if isinstance(node, ast.ClassDef):
            members = {member.name for member in node.body if isinstance(member, ast.FunctionDef)}
            names[node.name] = {member for member in members if not member.startswith("_")}
    return names


def names_in_module(module: ModuleType) -> dict[str, set[str]]:
    names = {"": {name for name in vars(module) if not name.startswith("_")}}
    for name in names[""]:
        value = getattr(module, name)
        if isinstance(value, type):
            names[name] = {member for member in vars(value) if not member.startswith("_")}
    return names


@pytest.mark.parametrize("name", ["_core", "_C", "_testing"])
def test_stub_matches_module(name: str) -> None:
    module = import_module(f"bytecheckpoint.{name}")
    assert names_in_stub(PACKAGE / f"{name}.pyi") == names_in_module(module)


def test_everything_public_is_there() -> None:
    for name in bytecheckpoint.__all__:
        assert getattr(bytecheckpoint, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        _ = bytecheckpoint.absent
