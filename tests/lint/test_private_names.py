# SPDX-License-Identifier: Apache-2.0
"""Private names of torch and of the frameworks: each stands in a probe, and they become fewer."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from bytecheckpoint.probes.of_integrations import INTEGRATION_FEATURES
from bytecheckpoint.probes.of_olmo import OLMO_FEATURES
from bytecheckpoint.probes.of_torch import TORCH_FEATURES
from bytecheckpoint.probes.of_torchtitan import TORCHTITAN_FEATURES
from bytecheckpoint.probes.probe import Feature

PACKAGE = Path(__file__).parents[2] / "bytecheckpoint"
PRIVATE = re.compile(r"_[A-Za-z]\w*")
# Lower it when there are fewer. Whoever needs one more has to take another away.
MOST_OF_TORCH = 77
# Of Python itself, of libc, and of our own where no definition shows it.
OTHERS = {"_getframe", "_current_frames", "_register_atexit", "_exception", "_exit", "_bcp_engine_of"}


def declared(*features: Feature) -> set[str]:
    return {name for feature in features for probe in feature.probes for name in probe.private_names()}


def is_own(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def names_defined(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            yield node.attr


def names_used(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Attributes, what is imported, and texts that are names, such as those of getattr."""
    for node in ast.walk(tree):
        found: list[str] = []
        if isinstance(node, ast.Attribute):
            found = [node.attr]
        elif isinstance(node, ast.ImportFrom):
            found = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found = re.split(r"[.:]", node.value) if re.fullmatch(r"[\w.:]+", node.value) else []
        yield from ((name, getattr(node, "lineno", 0)) for name in found if PRIVATE.fullmatch(name))


def foreign_names() -> dict[str, str]:
    """Private names in use that nobody here defines, and a place of each."""
    trees = {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    own = {name for tree in trees.values() for name in names_defined(tree)} | {path.stem for path in PACKAGE.rglob("*")}
    return {
        name: f"{path.relative_to(PACKAGE)}:{line}"
        for path, tree in trees.items()
        if path.parent.name != "probes"
        for name, line in names_used(tree)
        if name not in own | OTHERS
    }


def test_every_private_name_stands_in_a_probe() -> None:
    used = foreign_names()
    assert len(used) > 30, "the package is not where this test looks"
    all_features = (*TORCH_FEATURES, *TORCHTITAN_FEATURES, *OLMO_FEATURES, *INTEGRATION_FEATURES)
    missing = {name: place for name, place in used.items() if name not in declared(*all_features)}
    assert not missing, f"no probe says what these are for: {missing}"


def test_private_names_of_torch_become_fewer() -> None:
    names = declared(*TORCH_FEATURES)
    print(f"{len(names)} private names of torch: {', '.join(sorted(names))}")
    assert len(names) <= MOST_OF_TORCH
    assert len(names) == MOST_OF_TORCH, f"lower MOST_OF_TORCH to {len(names)}"


def test_the_scan_sees_what_it_is_for() -> None:
    code = "from torch._a import b\nx = torch._c.d\ngetattr(x, '_e')\nself._own = 1\nfind('torch.x:_f')"
    found = {name for name, _ in names_used(ast.parse(code))}
    assert found - {*names_defined(ast.parse(code))} == {"_a", "_c", "_e", "_f"}
