# SPDX-License-Identifier: Apache-2.0
"""Suites of tests import what is in `tests/support`, and nothing of each other; nobody imports a file of tests."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
SUITES = {path.name for path in TESTS.iterdir() if path.is_dir()} - {"support"}
# The inputs that fuzzing found are for everybody, and what every place must do is one list for stores and file systems.
FOR_ALL = {"fuzz.corpus", "storage.contract", "storage.places"}


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_no_suite_imports_another_and_support_imports_none() -> None:
    found = [
        f"{path.relative_to(TESTS)} imports {module}"
        for path in sorted(TESTS.rglob("*.py"))
        for module in imports(path)
        if module.split(".")[0] in SUITES - {path.relative_to(TESTS).parts[0]} and module not in FOR_ALL
    ]
    assert not found, found


def test_no_file_of_tests_is_imported() -> None:
    found = [
        f"{path.relative_to(TESTS)} imports {module}"
        for path in sorted(TESTS.rglob("*.py"))
        for module in imports(path)
        if module.split(".")[-1].startswith("test_") and module.split(".")[0] in SUITES
    ]
    assert not found, found
