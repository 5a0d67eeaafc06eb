# SPDX-License-Identifier: Apache-2.0
"""Extra states of modules (``get_extra_state``): each is loaded as it was saved, whatever a new module has there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bytecheckpoint.convert.nesting import nested
from bytecheckpoint.training_state.stored import Stored

__all__ = ["extra_states_as_stored"]

_NAME = "_extra_state"


def extra_states_as_stored(stored: Stored, values: Mapping[str, Any], most_bytes: int) -> dict[str, Any]:
    """Returns what to load the extra states of a model into: empty tensors, and None in the place of objects.

    A tensor of the model that fits is kept. An extra state that was not saved is left out.

    Args:
        stored: What was saved.
        values: Values of the model, by name.
        most_bytes: The most bytes of a tensor, so that a checkpoint does not decide how much memory is taken.

    Raises:
        UnsupportedError: A tensor has more bytes, or a dtype that this torch does not have.
    """
    wanted = [name for name in values if name.rpartition(".")[2] == _NAME]
    below: dict[str, list[str]] = {}
    for key in stored if wanted else ():
        name, found, _ = key.partition(f"{_NAME}.")
        if found:
            below.setdefault(name + _NAME, []).append(key)

    def empty(key: str, value: Any = None) -> Any:
        found = stored[key]
        return None if found is None else found.as_stored(key, value, most_bytes, stored.path)

    loaded: dict[str, Any] = {}
    for name in wanted:
        if name in stored:
            loaded[name] = empty(name, values[name])
        elif name in below:
            loaded[name] = nested({stored.tree_path(key, f"{name}."): empty(key) for key in below[name]})
    return loaded
