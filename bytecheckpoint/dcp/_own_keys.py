# SPDX-License-Identifier: Apache-2.0
"""``OwnKeys``: the keys that a caller's containers have, by the text that a checkpoint keeps of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["OwnKeys"]


class OwnKeys:
    """Finds keys that are not text, such as the numbers in ``optimizer.state_dict()``, by their text.

    The paths of a flattened state dict have only the text, as DCP's have. ``flatten_state_dict`` has refused mappings
    of which two keys have the same text.
    """

    def __init__(self) -> None:
        # By the id of each mapping that was searched; the mapping is kept, so that no other gets its id.
        self._known: dict[int, tuple[Any, dict[str, Any]]] = {}

    def key_of(self, container: Any, step: str | int) -> Any:
        """Returns the key of ``container`` whose text is ``step``; ``step`` itself if it has none, or is a list."""
        # TensorDict is a Mapping whose `in` and iteration are not about keys.
        if not isinstance(step, str) or not isinstance(container, Mapping) or step in container.keys():  # noqa: SIM118
            return step
        _, by_text = self._known.setdefault(id(container), (container, {}))
        if not by_text:
            by_text.update((str(key), key) for key in container.keys())  # noqa: SIM118
        return by_text.get(step, step)

    def container_of(self, state_dict: Any, path: tuple[str | int, ...]) -> tuple[Any, Any]:
        """Returns the container in which a path of a state dict ends, and the key or position there."""
        *outer, last = path
        for step in outer:
            state_dict = state_dict[self.key_of(state_dict, step)]
        return state_dict, self.key_of(state_dict, last)
