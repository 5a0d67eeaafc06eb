# SPDX-License-Identifier: Apache-2.0
"""The keys of a checkpoint, with shapes and dtypes: enough to know what to load from it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from bytecheckpoint.config import Config
from bytecheckpoint.contents.opening import open_checkpoint, viewed
from bytecheckpoint.errors import UnsupportedError
from bytecheckpoint.load_spec.spec import LoadSpec
from bytecheckpoint.native import _core
from bytecheckpoint.storage.folders import folder_at
from bytecheckpoint.storage.parts import REFERENCE, description_in, parsed_user_metadata
from bytecheckpoint.tensors.stored_tensors import StoredTensor
from bytecheckpoint.tensors.subclass_parts import DESCRIPTION
from bytecheckpoint.training_state.layouts import LAYOUTS, parsed_layouts

__all__ = ["Stored", "StoredTensor", "names_below", "whole_states"]


class Stored(Mapping[str, "StoredTensor | None"]):
    """The keys of a checkpoint, each with its tensor's description; an object has None.

    Local: each rank reads ``.metadata`` for itself, as in a load.

    Args:
        path: Directory of a checkpoint of ours or of stock DCP.
        config: Settings; None reads ``BYTECHECKPOINT_*`` variables.
        spec: What to take of the checkpoint, under which names; None takes it as it is.

    Attributes:
        path: The directory, as text.
        user_metadata: The ``user_metadata`` that was passed to the writer, or None.
        layouts: Layouts of tensors that the save recorded, by key.
        renamed: Keys of the checkpoint to which ``spec`` gives another name, and that name.

    Raises:
        CheckpointError: The checkpoint cannot be opened; see ``load_state_dict``.
    """

    def __init__(
        self, path: str | os.PathLike[str], config: Config | None = None, spec: LoadSpec | None = None
    ) -> None:
        self.path = os.fspath(path)
        folder_at(self.path).use(config)
        opened = open_checkpoint(self.path, config or Config.from_env(), kind=_core.Checkpoint, is_known=True)
        if opened.stored.is_of_byte_checkpoint:
            raise UnsupportedError(f"load({self.path}): {REFERENCE}", self.path)
        if spec is not None:
            opened = viewed(opened.stored, spec)
        checkpoint, self.renamed = opened.wanted, opened.new_names
        self.user_metadata: Any = parsed_user_metadata(checkpoint.user_metadata, self.path)
        self.layouts = parsed_layouts(description_in(self.user_metadata, self.path).get(LAYOUTS))
        tree_paths = checkpoint.planner_data
        self._tree_paths: Mapping[str, tuple[Any, ...]] = tree_paths if isinstance(tree_paths, Mapping) else {}
        self._items: dict[str, StoredTensor | None] = {}
        for fqn, dtype, shape, _, record_bytes, *_ in checkpoint.contents():
            self._items[fqn] = StoredTensor.of(dtype, shape, record_bytes)
        # Keep the order in which keys were saved, as far as it is known, so that dicts are made again in this order.
        first = {key: self._items[key] for key in self._tree_paths if key in self._items}
        self._items = {**first, **self._items}

    def __getitem__(self, key: str) -> StoredTensor | None:
        return self._items[key]

    def empty(self, key: str, device: torch.device | str | None = "cpu") -> torch.Tensor | None:
        """Returns an empty tensor to load the stored one into; None for an object.

        Args:
            key: Key of the tensor.
            device: Device of the new tensor; None takes the default device.

        Raises:
            UnsupportedError: This torch does not have the dtype. Or the elements share memory in the record, as those
                of an expanded tensor do: a few stored bytes could then take any amount of memory.
        """
        found = self._items[key]
        return None if found is None else found.empty(key, device, self.path)

    def check_size(self, key: str) -> None:
        """Refuses tensors whose elements share memory in the record; see ``StoredTensor``."""
        found = self._items[key]
        if found is not None:
            found.check_size(key, self.path)

    def tree_path(self, key: str, prefix: str) -> tuple[str | int, ...]:
        """Returns the path from ``prefix`` to ``key``: a name, then the keys and indices through saved containers.

        Args:
            key: A key of the checkpoint that begins with ``prefix``.
            prefix: A prefix that ends with a dot.
        """
        path = self._tree_paths.get(key, (key,))
        first = ""
        for number, step in enumerate(path):
            first += f".{step}" if number else str(step)
            if first.startswith(prefix) and len(first) > len(prefix):
                return (first[len(prefix) :], *path[number + 1 :])
        return (key[len(prefix) :],)

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


def whole_states(names: Sequence[str]) -> list[str]:
    """Returns the names of the states of a parameter; a tensor that is stored by its parts has one name."""
    ends = f".{DESCRIPTION}"
    # Of a subclass within a subclass, the outer one alone has a description.
    by_parts = [name.removesuffix(ends) for name in names if name.endswith(ends)]
    wholes = (next((whole for whole in by_parts if name.startswith(f"{whole}.")), name) for name in names)
    return [*dict.fromkeys(wholes)]


def names_below(stored: Stored, prefix: str, fqns: set[str]) -> dict[str, list[str]]:
    """Returns the names that the checkpoint has below ``prefix``, by parameter, in the order of the checkpoint."""
    names: dict[str, list[str]] = {}
    for key in stored:
        if not key.startswith(prefix):
            continue
        end = key.rfind(".")
        while end > len(prefix) and key[len(prefix) : end] not in fqns:
            end = key.rfind(".", 0, end)
        if end > len(prefix):
            names.setdefault(key[len(prefix) : end], []).append(key[end + 1 :])
    return names
