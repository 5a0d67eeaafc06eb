# SPDX-License-Identifier: Apache-2.0
"""Where in a nested state dict each key is, and nested state dicts made of keys again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bytecheckpoint.convert.source import Opened
from bytecheckpoint.errors import ConfigError

__all__ = ["nested", "paths_of", "refuse_clashes", "refuse_gaps"]

_Path = tuple[Any, ...]
_REMEDY = "rename or exclude one of them"


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


def refuse_clashes(paths: Mapping[str, _Path]) -> None:
    """Refuses keys that no nested state dict can have together.

    Args:
        paths: The path of each key.

    Raises:
        ConfigError: One key is where others lie below, two have one path, or some make a list and others a dict of
            what is above them. The message names two such keys.
    """
    leaves: dict[_Path, str] = {}
    for name, path in paths.items():
        first = leaves.setdefault(path, name)
        if first != name:
            raise ConfigError(f"keys '{first}' and '{name}' have one place in the nested state dict: {_REMEDY}")
    containers: dict[_Path, tuple[bool, str]] = {}  # each with whether it is a list, and the first key below it
    for name, path in paths.items():
        for depth in range(len(path) - 1, -1, -1):
            above, in_list = path[:depth], isinstance(path[depth], int)
            if above in leaves:
                raise ConfigError(
                    f"key '{leaves[above]}' is a value where key '{name}' needs a dict or list: no nested state dict "
                    f"has both: {_REMEDY}"
                )
            is_list, first = containers.setdefault(above, (in_list, name))
            if is_list != in_list:
                raise ConfigError(
                    f"keys '{first}' and '{name}': one is in a list where the other one needs a dict: {_REMEDY}"
                )
            if first != name:
                break  # all that is above has been looked at


def refuse_gaps(paths: Mapping[str, _Path]) -> None:
    """Refuses lists of which some elements are left out, since the others would move.

    Args:
        paths: The path of each key, of which no two clash.

    Raises:
        ConfigError: There is such a list. The message names the element that is missing, and one that would move.
    """
    lists: dict[_Path, dict[int, str]] = {}
    for name, path in paths.items():
        for depth, step in enumerate(path):
            if isinstance(step, int):
                lists.setdefault(path[:depth], {}).setdefault(step, name)
    for above, elements in lists.items():
        gap = next((index for index in range(len(elements)) if index not in elements), None)
        if gap is not None:
            missing = ".".join(map(str, (*above, gap)))
            moved = elements[min(index for index in elements if index > gap)]
            raise ConfigError(
                f"key '{missing}' is an element of a list, and left out, while '{moved}' is not, which would move: "
                "take all elements of the list or none, or rename those that you want"
            )


def nested(values: Mapping[tuple[str | int, ...], Any]) -> dict[Any, Any]:
    """Makes dicts and lists again of flattened values, which are by path.

    Their paths must be such as ``refuse_clashes`` and ``refuse_gaps`` let pass.
    """
    below: dict[str | int, dict[tuple[str | int, ...], Any]] = {}
    for (step, *further), value in values.items():
        below.setdefault(step, {})[tuple(further)] = value
    return {step: of_step[()] if () in of_step else _container(of_step) for step, of_step in below.items()}


def _container(values: Mapping[tuple[str | int, ...], Any]) -> Any:
    container = nested(values)
    is_list = all(isinstance(step, int) for step in container)
    return [container[step] for step in sorted(container)] if is_list else container
