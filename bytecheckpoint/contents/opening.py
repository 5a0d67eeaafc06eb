# SPDX-License-Identifier: Apache-2.0
"""Opens the checkpoint at a path or URL, of whatever format, and what a ``LoadSpec`` takes of it. Needs no torch."""

from __future__ import annotations

import os
import sys
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from bytecheckpoint.config import Config
from bytecheckpoint.contents.wrong_path import explaining
from bytecheckpoint.load_spec.spec import LoadSpec
from bytecheckpoint.load_spec.view import view_of
from bytecheckpoint.native import _core
from bytecheckpoint.storage.folders import folder_at

if TYPE_CHECKING:
    from bytecheckpoint.native import _C

__all__ = ["Opened", "open_checkpoint", "viewed"]

K = TypeVar("K", "_core.Checkpoint", "_C.Checkpoint")


@dataclass(frozen=True)
class Opened(Generic[K]):
    """A checkpoint that was opened.

    Attributes:
        stored: What is there.
        wanted: What is taken of it; ``stored`` itself without a spec.
        new_names: The name in ``wanted`` of each key that has another one in ``stored``.
    """

    stored: K
    wanted: K
    new_names: dict[str, str]


def open_checkpoint(
    place: str | os.PathLike[str],
    config: Config,
    *,
    kind: type[K],
    spec: LoadSpec | None = None,
    rank: int | None = None,
    is_known: bool = False,
    explain: bool = True,
    **limits: Any,
) -> Opened[K]:
    """Opens the commit mark of a checkpoint. Local.

    Args:
        place: Its path or URL.
        config: Settings; ``accept_rewritten_metadata`` and ``io_timeout_s`` are used, and those for the store.
        kind: Class ``Checkpoint`` of the extension module that will do further work with the checkpoint.
        spec: What to take of it, under which names; None takes it as it is.
        rank: The rank whose part is opened, if ranks saved without collectives.
        is_known: Whether the engine knows the storage there already; see ``Folder.use``.
        explain: Whether the error says what is there instead, and what to call.
        limits: More arguments of ``Checkpoint.open``.

    Raises:
        CheckpointNotFoundError: There is none.
        CheckpointError: The commit mark cannot be read (``CorruptCheckpointError``, ``FormatVersionError``,
            ``UnsupportedError``, ``StorageError``).
        ConfigError: ``spec`` does not fit the checkpoint.
    """
    if not is_known:
        folder_at(place).use(config, sys.modules[kind.__module__])
    with explaining(place) if explain else nullcontext():
        stored = kind.open(
            os.fspath(place),
            rank=rank,
            accept_rewritten=config.accept_rewritten_metadata,
            io_timeout_s=config.io_timeout_s,
            **limits,
        )
    if stored.note:
        warnings.warn(f"bytecheckpoint: {stored.note}", RuntimeWarning, stacklevel=3)
    return Opened(stored, stored, {}) if spec is None else viewed(stored, spec)


def viewed(stored: K, spec: LoadSpec) -> Opened[K]:
    """Returns what ``spec`` takes of a checkpoint.

    Raises:
        ConfigError: It does not fit the checkpoint.
    """
    wanted, new_names = view_of(stored, spec, sys.modules[type(stored).__module__])
    return Opened(stored, wanted, new_names)
