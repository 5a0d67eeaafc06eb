# SPDX-License-Identifier: Apache-2.0
"""Which checkpoints a run keeps besides the newest: pinned ones, the best by a metric, young ones. Needs no torch.

A pin is a small file, ``.bcp/pin.txt``, in the folder of a step. No load needs it, and copies of the folder have it.
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
from bytecheckpoint.storage.parts import inspect_step, parsed_user_metadata
from bytecheckpoint.storage.paths import below, location
from bytecheckpoint.storage.small_files import made_folder
from bytecheckpoint.storage.step_folder import StepFolder

__all__ = ["KeepBest", "best_of", "check_keep_best", "pin", "pins_of", "unpin", "young_of"]

KeepBest = tuple[str, int] | tuple[str, int, str]
"""A metric in the user metadata, how many to keep, and ``min`` (the default) or ``max``."""

_PIN = f"{RECORDS}/pin.txt"
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
    place = known(location(path), config)
    found = inspect_step(place)
    if not found["has_mark"] or not (found["marks"] or found["components"]):  # else of a run that holds checkpoints
        raise CheckpointNotFoundError(f"pin({place}): no checkpoint there", str(place))
    if isinstance(place, Path):
        made_folder(place / RECORDS)
    folder_at(place).write_file(_PIN, f"{why}\n".encode(errors="replace"))


def unpin(path: str | os.PathLike[str], *, config: Config | None = None) -> bool:
    """Removes the pin of a checkpoint. Returns whether there was one.

    Args:
        path: See ``pin``.
        config: See ``pin``.

    Raises:
        StorageError: The file system or the store refused.
    """
    place = known(location(path), config)
    was_pinned = bool(pins_of([str(place)]))
    if was_pinned:
        folder_at(place).remove_file(_PIN)
    return was_pinned


def pins_of(paths: Iterable[str]) -> dict[str, str]:
    """Returns why step folders are pinned, by path, as one line; without those that are not.

    Raises:
        StorageError: A pin cannot be read.
    """
    found = {path: folder_at(path).read_file(_PIN, _MOST_BYTES) for path in paths}
    texts = {path: " ".join(pin.decode(errors="replace").split()) for path, pin in found.items() if pin is not None}
    return {path: f"{_PINNED}: {text}" if text else _PINNED for path, text in texts.items()}


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
