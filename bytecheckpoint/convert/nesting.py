# SPDX-License-Identifier: Apache-2.0
"""Where in a nested state dict each key is, and nested state dicts made of keys again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bytecheckpoint.convert.source import Opened

__all__ = ["nested", "paths_of"]


def paths_of(opened: Opened, names: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """Returns the path of each key. A key keeps its place below what was renamed.

    Args:
        opened: A source, which has the names before.
        names: The keys, under their new names.
    """
    stored = opened.stored.planner_data
    paths = stored if isinstance(stored, dict) else {}
    old_names = {new: old for old, new in opened.new_names.items()}
    return {name: _path_of(name, old_names.get(name, name), paths) for name in names}


def _path_of(name: str, old_name: str, paths: Mapping[str, Any]) -> tuple[Any, ...]:
    stored = paths.get(old_name)
    if not isinstance(stored, tuple):
        return (name,)
    if name == old_name:
        return stored
    for begin in range(len(stored)):
        below = ".".join(map(str, stored[begin:]))
        if name == below:
            return stored[begin:]
        if name.endswith(f".{below}"):
            return (name.removesuffix(f".{below}"), *stored[begin:])
    return (name,)


def nested(values: Mapping[tuple[str | int, ...], Any]) -> dict[Any, Any]:
    """Makes dicts and lists again of flattened values, which are by path."""
    below: dict[str | int, dict[tuple[str | int, ...], Any]] = {}
    for (step, *further), value in values.items():
        below.setdefault(step, {})[tuple(further)] = value
    return {step: of_step[()] if () in of_step else _container(of_step) for step, of_step in below.items()}


def _container(values: Mapping[tuple[str | int, ...], Any]) -> Any:
    container = nested(values)
    is_list = all(isinstance(step, int) for step in container)
    return [container[step] for step in sorted(container)] if is_list else container
