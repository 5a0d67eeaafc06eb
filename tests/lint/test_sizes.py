# SPDX-License-Identifier: Apache-2.0
"""Files and functions have a size that can be read in one sitting; what is longer says why, and no longer than it is.

Functions of C++ are measured by clang-tidy (``.clang-tidy``).
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("bytecheckpoint", "csrc", "tests", "demo", "benchmarks", "docs")
MOST_LINES = {".py": 450, ".cpp": 450, ".cu": 450, ".h": 250, ".pyi": 450}
MOST_LINES_OF_TESTS = 500
MOST_LINES_OF_FUNCTION = 60

# path: why it may be longer.
LONG_FILES: dict[str, str] = {}
# path and function: why it may be longer.
LONG_FUNCTIONS = {
    "tests/support/titan.py:__post_init__": "one line for each option of the trainer",
    "tests/unit/test_config.py:test_from_env": "one row for each variable",
}


def lines_of(node: ast.AST) -> int:
    return (getattr(node, "end_lineno", 0) or 0) - getattr(node, "lineno", 1) + 1


def lines_of_functions(source: str) -> dict[str, int]:
    """Returns the lines of each function, by name, without its docstring and the functions in it."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    lines = {}
    for function in functions:
        inner = [node for node in ast.walk(function) if isinstance(node, ast.FunctionDef) and node is not function]
        outermost = [node for node in inner if not any(node in [*ast.walk(other)][1:] for other in inner)]
        docstring = [function.body[0]] if ast.get_docstring(function) is not None else []
        lines[function.name] = lines_of(function) - sum(map(lines_of, outermost + docstring))
    return lines


def sources() -> list[Path]:
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in MOST_LINES]
    assert len(found) > 400, "the sources are not where this test looks"
    return sorted(found)


def most_lines(path: Path) -> int:
    return MOST_LINES_OF_TESTS if path.is_relative_to(ROOT / "tests") else MOST_LINES[path.suffix]


def long_files() -> dict[str, int]:
    lines = {path: path.read_text().count("\n") for path in sources()}
    return {str(path.relative_to(ROOT)): n for path, n in lines.items() if n > most_lines(path)}


def long_functions() -> dict[str, int]:
    return {
        f"{path.relative_to(ROOT)}:{name}": lines
        for path in sources()
        if path.suffix == ".py"
        for name, lines in lines_of_functions(path.read_text()).items()
        if lines > MOST_LINES_OF_FUNCTION
    }


def test_files_are_short() -> None:
    assert {path: lines for path, lines in long_files().items() if path not in LONG_FILES} == {}


def test_functions_are_short() -> None:
    assert {name: lines for name, lines in long_functions().items() if name not in LONG_FUNCTIONS} == {}


@pytest.mark.parametrize(("found", "excused"), [(long_files, LONG_FILES), (long_functions, LONG_FUNCTIONS)])
def test_nothing_is_excused_in_vain(found, excused) -> None:  # type: ignore[no-untyped-def]
    assert excused.keys() - found().keys() == set()


def test_lines_are_counted_without_docstrings_and_inner_functions() -> None:
    source = 'def f():\n    """A\n\n    B."""\n    def g():\n        pass\n    return g\n'
    assert lines_of_functions(source) == {"f": 2, "g": 2}
