# SPDX-License-Identifier: Apache-2.0
"""The parts of one checkpoint that a load wants: all there, and all of the same save."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bytecheckpoint.config import Config
from bytecheckpoint.errors import CheckpointChangedError, CheckpointNotFoundError
from bytecheckpoint.load_spec.spec import LoadSpec
from bytecheckpoint.storage.parts import description_in, different_saves
from bytecheckpoint.storage.paths import Place, below
from bytecheckpoint.training_state.stored import Stored

__all__ = ["StoredParts"]


class StoredParts(Mapping[str, Stored]):
    """Opens parts of a checkpoint. Local: each rank does it for itself.

    Args:
        folder: Folder of the parts.
        parts: Which are wanted; ``model`` is always opened.
        config: Settings.
        spec: What to take of the model; None takes it as it is.

    Attributes:
        description: What ``save`` wrote about itself into the model; empty if another writer made it.

    Raises:
        CheckpointNotFoundError: A part does not exist.
        CheckpointChangedError: The parts are of different saves.
        CheckpointError: A part cannot be opened.
    """

    def __init__(self, folder: Place, parts: Sequence[str], config: Config, spec: LoadSpec | None = None) -> None:
        self._folder = folder
        self._config = config
        self._parts = {"model": Stored(below(folder, "model"), config, spec)}
        self.description: dict[str, Any] = description_in(self._parts["model"].user_metadata)
        self._parts.update((part, self._open(part)) for part in parts if part != "model")
        mixed = different_saves({part: description_in(stored.user_metadata) for part, stored in self.items()})
        if mixed:
            raise CheckpointChangedError(
                f"load({folder}): the parts are of different saves: {mixed}. A save over this folder was interrupted, "
                "or is under way: load another step, or the model alone",
                str(folder),
            )

    def _open(self, part: str) -> Stored:
        path = below(self._folder, part)
        absent = CheckpointNotFoundError(
            f"load({self._folder}): it was saved without {part}: leave '{part}' out of checkpoint_state, or load a "
            "checkpoint that was saved with it",
            str(path),
        )
        try:
            stored = Stored(path, self._config)
        except CheckpointNotFoundError as error:
            raise absent from error
        # The folder may hold the part of an older save, while the newest save had no such part.
        if part not in self.description.get("parts", [part]) and description_in(stored.user_metadata):
            raise absent
        return stored

    @property
    def save_ids(self) -> dict[str, Any]:
        """The id of the save that wrote each part; None for a part of another writer."""
        return {part: description_in(stored.user_metadata).get("save") for part, stored in self.items()}

    def __getitem__(self, part: str) -> Stored:
        return self._parts[part]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)
