# SPDX-License-Identifier: Apache-2.0
"""Imports point down: a folder of the package imports only folders that stand below it, and no modules form a circle.

An import within a function counts like any other. A module whose name begins with an underscore is for its own folder.
"""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = "bytecheckpoint"
# From the bottom to the top: what each layer is for, and its folders. A folder imports those of lower layers, and those
# that stand before it in its own. A module that stands in no folder is named itself.
LAYERS = (
    ("what all need", ("errors", "listing", "native", "near_names", "_reference_names")),
    ("settings and reports", ("reference_variables", "config", "report", "load_spec", "transforms", "model_specs")),
    ("processes, threads, and the calls that they are in", ("runtime", "calls")),
    ("torch: its tensors, and what we rely on", ("tensors", "probes", "compat")),
    ("places, what is in them, what is done with it", ("storage", "contents", "checkpoint")),
    ("the end of a call: what stands out in it, and its line in a journal", ("findings", "journal")),
    ("ranks", ("distributed",)),
    ("plans, shared reading, staging", ("planning", "sharing", "staging")),
    ("the hooks of DCP", ("dcp",)),
    ("calls of ours", ("groups", "per_rank", "state_dicts", "publishing", "convert", "training_state")),
    ("what reads journals, and exporters", ("observability",)),
    ("frameworks", ("registration", "_olmo_tiers", "olmo", "torchtitan", "integrations")),
    ("the command line", ("cli", "__main__")),
)
LEVEL = {name: level for level, name in enumerate(name for _, names in LAYERS for name in names)}
# Of the package itself. The extension modules come from `native`, which alone may name them.
OF_THE_PACKAGE = {"__version__"}
EXTENSIONS = {"_C", "_core"}


def imported(tree: ast.AST) -> Iterator[str]:
    """What of the package is imported, below its name: modules, or names in them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            found = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name.removeprefix(f"{PACKAGE}.") for name in found if name.startswith(f"{PACKAGE}."))


def faults(place: str, source: str) -> list[str]:
    """What is wrong with the imports of a module, whose ``place`` is relative to the package."""
    own = place.removesuffix(".py").split("/")[0]
    if own == "__init__":  # names what is below for type checkers, and imports it when it is asked for
        return []
    if own not in LEVEL:
        return [f"{place}: {own} is in no layer"]
    others = {name.split(".")[0] for name in imported(ast.parse(source))} - OF_THE_PACKAGE - {own}
    others -= EXTENSIONS if own == "native" else set()
    return [
        f"{place} may not import {other}"
        for other in sorted(others)
        if other not in LEVEL or LEVEL[other] >= LEVEL[own]
    ]


def test_imports_point_down() -> None:
    places = sorted((ROOT / PACKAGE).rglob("*.py"))
    assert len(places) > 100, "the package is not where this test looks"
    found = [
        fault for path in places for fault in faults(path.relative_to(ROOT / PACKAGE).as_posix(), path.read_text())
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("place", "line"),
    [
        ("planning/a.py", "from bytecheckpoint.dcp import writer"),
        ("runtime/a.py", "def f():\n    from bytecheckpoint.checkpoint.steps import scan_steps"),
        ("dcp/a.py", "import bytecheckpoint.cli.app"),
        ("staging/a.py", "from bytecheckpoint import state_dicts"),
        ("config.py", "from bytecheckpoint.report import SaveReport"),
        ("other/a.py", ""),
        ("dcp/a.py", "from bytecheckpoint import _C"),
        ("io.py", "import bytecheckpoint._core"),
    ],
)
def test_others_do_not(place: str, line: str) -> None:
    assert faults(place, line)


def module_of(place: str) -> str:
    """Returns the name below the package of the module at ``place``; a package has that of its folder."""
    return place.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def order_of(sources: dict[str, str]) -> list[str]:
    """Returns the modules, each behind those that it imports; raises ``graphlib.CycleError`` if there is no such order.

    Args:
        sources: Text of each module, by name.
    """

    def module_in(name: str) -> str | None:
        return next((module for module in (name, name.rpartition(".")[0]) if module in sources), None)

    found = {name: {module_in(other) for other in imported(ast.parse(source))} for name, source in sources.items()}
    graph = {name: sorted(filter(None, others - {name})) for name, others in found.items()}
    return list(graphlib.TopologicalSorter(graph).static_order())


def test_no_modules_form_a_circle() -> None:
    places = {path.relative_to(ROOT / PACKAGE).as_posix(): path for path in (ROOT / PACKAGE).rglob("*.py")}
    sources = {module_of(place): path.read_text() for place, path in places.items() if place != "__init__.py"}
    assert set(order_of(sources)) == set(sources)


def test_a_circle_is_found() -> None:
    lower = "from bytecheckpoint.dcp.b import x"
    with pytest.raises(graphlib.CycleError):
        order_of({"dcp.a": lower, "dcp.b": "def f():\n    from bytecheckpoint.dcp import a"})
    assert order_of({"dcp.a": lower, "dcp.b": ""}) == ["dcp.b", "dcp.a"]


def private_imports(place: str, source: str) -> list[str]:
    """Returns the private modules of other folders that the module at ``place`` imports."""
    folder = place.rpartition("/")[0].replace("/", ".")
    found = []
    for name in imported(ast.parse(source)):
        parts = name.split(".")
        for depth, part in enumerate(parts[:-1], 1):  # the last may be a name in a module
            is_module = (ROOT / PACKAGE / "/".join(parts[:depth])).with_suffix(".py").exists()
            if part.startswith("_") and is_module and ".".join(parts[: depth - 1]) not in ("", folder):
                found.append(f"{place} imports {name}")
    return found


def test_private_modules_stay_in_their_folders() -> None:
    places = {path.relative_to(ROOT / PACKAGE).as_posix(): path for path in (ROOT / PACKAGE).rglob("*.py")}
    found = [fault for place, path in places.items() for fault in private_imports(place, path.read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("place", "line", "is_fault"),
    [
        ("cli/a.py", "from bytecheckpoint.dcp._execute_plan import execute_plan", True),
        ("registration.py", "def f():\n    import bytecheckpoint.dcp._hooks.Hooks", True),
        ("dcp/a.py", "from bytecheckpoint.dcp._execute_plan import execute_plan", False),
        ("dcp/a.py", "from bytecheckpoint._reference_names import name", False),
    ],
)
def test_a_private_import_is_found(place: str, line: str, is_fault: bool) -> None:
    assert bool(private_imports(place, line)) == is_fault


def all_of(module: str) -> list[str]:
    """Returns the names that a module of the package lists as public."""
    path = ROOT / PACKAGE / module.replace(".", "/")
    tree = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())
    lists = [
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    return [name for each in lists for name in ast.literal_eval(each)]


def not_public(place: str, source: str) -> list[str]:
    """Returns what the module at ``place`` imports from other folders that is not in the ``__all__`` of its module."""
    own = place.split("/")[0]
    names = [name.rpartition(".") for name in imported(ast.parse(source)) if name.split(".")[0] not in (own, "native")]
    return [f"{place} imports {module}.{name}" for module, _, name in names if name not in all_of(module)]


def test_what_reads_journals_imports_public_names_only() -> None:
    """So it can be changed, and left out, without a look at what saves and loads."""
    places = sorted((ROOT / PACKAGE / "observability").rglob("*.py"))
    assert places
    found = [fault for path in places for fault in not_public(f"observability/{path.name}", path.read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("line", "is_fault"),
    [
        ("from bytecheckpoint.journal.lines import _STEP", True),
        ("from bytecheckpoint.journal.lines import compile_pattern", True),
        ("from bytecheckpoint.journal import lines", True),
        ("from bytecheckpoint.journal.lines import append", False),
        ("from bytecheckpoint.report import SaveReport", False),
        ("from bytecheckpoint.native import _core", False),
    ],
)
def test_an_import_of_what_is_not_public_is_found(line: str, is_fault: bool) -> None:
    assert bool(not_public("observability/a.py", line)) == is_fault


def test_only_storage_tells_a_url_from_a_path() -> None:
    """Everything else asks the folder at a place (``storage.folders.folder_at``), whatever its kind is."""
    places = [path for path in sorted((ROOT / PACKAGE).rglob("*.py")) if path.parent.parts[-1] != "object_store"]
    importing = {
        path.relative_to(ROOT / PACKAGE).as_posix()
        for path in places
        for name in imported(ast.parse(path.read_text()))
        if name.startswith("storage.object_store.urls")
    }
    assert importing
    assert {name.split("/")[0] for name in importing} == {"storage"}, importing
