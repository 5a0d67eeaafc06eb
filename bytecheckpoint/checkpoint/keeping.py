# SPDX-License-Identifier: Apache-2.0
"""Which checkpoints a run keeps besides the newest: pinned ones, the best by a metric, young ones. Needs no torch.

A pin is a small file, ``.bcp/pin.txt``, in the folder of a step. No load needs it, and copies of the folder have it.
``.bcp/drain.txt`` is the pin of a step that is to be copied to durable storage, beside one of a user.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bytecheckpoint.checkpoint.commit_times import commit_times
from bytecheckpoint.config import Config
from bytecheckpoint.errors import CheckpointNotFoundError, ConfigError
from bytecheckpoint.native import _core
from bytecheckpoint.storage.folders import folder_at, known
from bytecheckpoint.storage.names import RECORDS
from bytecheckpoint.storage.olmo_steps import has_checkpoint
from bytecheckpoint.storage.parts import inspect_step, parsed_user_metadata
from bytecheckpoint.storage.paths import Place, as_place, below, location
from bytecheckpoint.storage.small_files import made_folder
from bytecheckpoint.storage.step_folder import StepFolder

__all__ = [
    "IS_DRAINED",
    "WAITS",
    "KeepBest",
    "best_of",
    "check_keep_best",
    "drains_of",
    "note_drain",
    "pin",
    "pins_of",
    "unpin",
    "young_of",
]

KeepBest = tuple[str, int] | tuple[str, int, str]
"""A metric in the user metadata, how many to keep, and ``min`` (the default) or ``max``."""

IS_DRAINED = "is being drained"
"""What ``note_drain`` notes of a step that is being copied. A note that a killed drain has left is removed."""

WAITS = "waits to be drained"
"""What ``note_drain`` notes of a step that the process of a job is to copy."""

_PIN = f"{RECORDS}/pin.txt"
_DRAIN = f"{RECORDS}/drain.txt"
_MOST_BYTES = 1 << 16
_PINNED = "pinned"
_ORDERS = ("min", "max")


def pin(path: str | os.PathLike[str], why: str = "", *, config: Config | None = None) -> None:
    """Pins a checkpoint: no prune of any process removes it until ``unpin``.

    Local, and at once. It protects from nothing else, such as a save over it. A pin that is there is replaced.

    Args:
        path: Folder of a step, or its URL.
        why: What ``RetentionReport.protected`` and ``bcp prune`` say of it, such as ``released as v2``.
        config: Settings for the store; None reads ``BYTECHECKPOINT_*`` variables.

    Raises:
        CheckpointNotFoundError: There is no checkpoint.
        StorageError: The file system or the store refused.
    """
    _write(known(location(path), config), _PIN, why)


def unpin(path: str | os.PathLike[str], *, config: Config | None = None) -> bool:
    """Removes the pin of a checkpoint, also one of ``drain`` or ``Tiers``. Returns whether there was one.

    Args:
        path: See ``pin``.
        config: See ``pin``.

    Raises:
        StorageError: The file system or the store refused.
    """
    place = known(location(path), config)
    was_pinned = bool(pins_of([str(place)]))
    for name in (_PIN, _DRAIN) if was_pinned else ():
        folder_at(place).remove_file(name)
    return was_pinned


def note_drain(path: str, state: str) -> None:
    """Pins a step that is to be copied to durable storage, or is being copied; ``""`` says that it no longer is.

    Raises:
        CheckpointNotFoundError: There is no checkpoint.
        StorageError: The file system or the store refused.
    """
    place = as_place(path)
    if state:
        _write(place, _DRAIN, state)
    else:
        folder_at(place).remove_file(_DRAIN)


def drains_of(paths: Iterable[str]) -> dict[str, str]:
    """Returns what ``note_drain`` noted of step folders, by path.

    Raises:
        StorageError: A note cannot be read.
    """
    return _read(paths, _DRAIN)


def pins_of(paths: Iterable[str]) -> dict[str, str]:
    """Returns why step folders are pinned, by path, as one line; without those that are not.

    Raises:
        StorageError: A pin cannot be read.
    """
    paths = [*paths]
    texts = {**_read(paths, _DRAIN), **_read(paths, _PIN)}
    return {path: f"{_PINNED}: {text}" if text else _PINNED for path, text in texts.items()}


def _write(place: Place, name: str, text: str) -> None:
    found = inspect_step(place)
    is_step = bool(found["marks"] or found["components"]) or has_checkpoint(place)  # and not a run
    if not found["has_mark"] or not is_step:
        raise CheckpointNotFoundError(f"pin({place}): no checkpoint there", str(place))
    if isinstance(place, Path):
        made_folder(place / RECORDS)
    folder_at(place).write_file(name, f"{text}\n".encode(errors="replace"))


def _read(paths: Iterable[str], name: str) -> dict[str, str]:
    found = {path: folder_at(path).read_file(name, _MOST_BYTES) for path in paths}
    return {path: " ".join(text.decode(errors="replace").split()) for path, text in found.items() if text is not None}


def check_keep_best(keep_best: object) -> None:
    """Raises a ConfigError if ``keep_best`` is not a metric, a number and maybe an order."""
    is_valid = (
        isinstance(keep_best, tuple)
        and len(keep_best) in (2, 3)
        and isinstance(keep_best[0], str)
        and isinstance(keep_best[1], int)
        and not isinstance(keep_best[1], bool)
        and keep_best[1] >= 1
        and keep_best[2:] in ((), *((order,) for order in _ORDERS))
    )
    if not is_valid:
        raise ConfigError(
            f"keep_best={keep_best!r}: must be a metric of the user metadata and how many to keep, such as ('loss', 3) "
            "for the lowest three, or ('accuracy', 3, 'max')"
        )


def best_of(folders: Sequence[StepFolder], keep_best: KeepBest) -> set[str]:
    """Returns the paths of the best complete checkpoints by a metric. Those without the metric do not count.

    Args:
        folders: Complete checkpoints, the newest first: of equal ones the newer counts.
        keep_best: See ``KeepBest``. ``eval.loss`` is the value of ``loss`` in the dict ``eval``.

    Raises:
        CheckpointError: A commit mark cannot be read.
    """
    metric, count, *order = keep_best
    sign = -1.0 if order == ["max"] else 1.0
    values = [_number_at(_user_metadata(folder), metric) for folder in folders]
    ranked = sorted((sign * value, place) for place, value in enumerate(values) if value is not None)
    return {folders[place].path for _, place in ranked[:count]}


def young_of(folders: Sequence[StepFolder], keep_within_s: float) -> set[str]:
    """Returns the paths of the checkpoints that were committed within so many seconds before now.

    Raises:
        StorageError: The store does not say when.
    """
    since = time.time() - keep_within_s
    times = commit_times([folder.path for folder in folders])
    return {path for path, at in times.items() if at / 1e9 >= since}


def _user_metadata(folder: StepFolder) -> Any:
    path = str(below(location(folder.path), "model")) if folder.components else folder.path
    rank = folder.parts[0] if folder.parts else None
    return parsed_user_metadata(_core.Checkpoint.open(path, rank=rank).user_metadata, path)


def _number_at(user_metadata: Any, metric: str) -> float | None:
    value = user_metadata
    for name in [metric] if isinstance(value, Mapping) and metric in value else metric.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None
