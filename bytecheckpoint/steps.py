# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of a run: its step folders, and what each of them holds. Needs no torch."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bytecheckpoint.config import Config
from bytecheckpoint.errors import CheckpointError, UnsupportedError
from bytecheckpoint.local_path import local_path
from bytecheckpoint.parts import inspect_step
from bytecheckpoint.report import size_text
from bytecheckpoint.step_names import step_paths
from bytecheckpoint.verification import verify

__all__ = ["StepFolder", "folder_of", "look_at_step", "scan_steps"]


@dataclass(frozen=True, kw_only=True)
class StepFolder:
    """One step folder, as it was when it was looked at.

    Attributes:
        step: Number in its name.
        path: Of the folder.
        state: ``complete``: a checkpoint that loads; its commit mark opens, and all files are there with the sizes and
            trailers that it says (of another writer's: all files, long enough), and no tensor lacks an element, unless
            it was saved with ``Config(allow_partial_tensors=True)``. ``saving``: none yet, and a live save
            of this host is at it. ``half``: none, and nobody is seen to make one: what a dead save or half a deletion
            left, a save on another host, or one that has not begun to write. ``corrupt``: a commit mark is there, but
            it or a file is not what was written. ``incomplete``: all is as it was written, but elements of a tensor are
            in no chunk, or in two, which ``reason`` names; what there is can be loaded. ``unknown``: nothing of a
            checkpoint is in it (``has_mark`` is False), or it cannot be looked at (not readable, a newer format,
            metadata of another writer that we do not read). Only ``complete`` may be trusted.
        reason: Why it is not ``complete``; "" if it is.
        is_being_saved: A live save holds it. Of a ``complete`` one: it is about to be replaced, and loads until then.
        is_foreign: Another writer's checkpoint, without checksums of ours.
        save_ids: 32 hex digits; one, or one a part or component; none of another writer's.
        parts: Ranks that saved without collectives, each of which has a part of its own; else none.
        num_files: Data files that the metadata name.
        num_bytes: Of them.
        components: Of ``bytecheckpoint.save``: the folders in it that are checkpoints of their own, ``extra_state``,
            ``optimizer``, ``model``; ``state`` is then that of all of them, and ``half`` if they are of different
            saves. Else none.
        has_mark: A commit mark is there, that of the model if there are components, or it cannot be told whether.
    """

    step: int
    path: str
    state: str
    reason: str = ""
    is_being_saved: bool = False
    is_foreign: bool = False
    save_ids: tuple[str, ...] = ()
    parts: tuple[int, ...] = ()
    num_files: int = 0
    num_bytes: int = 0
    components: tuple[str, ...] = ()
    has_mark: bool = True

    @property
    def name(self) -> str:
        """Of the folder."""
        return Path(self.path).name

    @property
    def is_complete(self) -> bool:
        """Whether it holds a checkpoint that loads."""
        return self.state == "complete"

    @property
    def is_faulty(self) -> bool:
        """Whether it is neither complete, nor being saved, nor a folder with nothing of a checkpoint in it."""
        return self.state not in ("complete", "saving") and not (self.state == "unknown" and not self.has_mark)

    def summary(self) -> str:
        """One line for people."""
        notes = [self.state + (", being saved" if self.is_being_saved and self.state != "saving" else "")]
        if self.num_files:
            notes.append(f"{size_text(self.num_bytes)} in {self.num_files} file{'s' if self.num_files > 1 else ''}")
        if self.components:
            notes.append(" and ".join(self.components))
        if self.parts:
            notes.append(f"parts of {len(self.parts)} ranks")
        if self.is_foreign:
            notes.append("by another writer")
        return f"{self.name}: {', '.join(notes)}" + (f": {self.reason}" if self.reason else "")

    def to_dict(self) -> dict[str, Any]:
        """Plain data: fields under their names."""
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        """The same as a JSON object."""
        return json.dumps(self.to_dict(), allow_nan=False)


def scan_steps(
    root: str | os.PathLike[str], *, pattern: str | None = None, deep: bool = False, config: Config | None = None
) -> list[StepFolder]:
    """Looks at all step folders of a run folder.

    Local; changes nothing, takes no lock, and reads no data unless ``deep``: a scan is never in the way of a save. Who
    saves meanwhile may have gone on when it returns. Symbolic links are left out.

    Args:
        root: Folder of a run.
        pattern: Regular expression that the whole name of a step folder matches, whose first group is the number, of
            18 digits at most. None: ``step-100``, ``step_100``, ``step100``, ``global_step_100``, ``checkpoint-100``
            and ``100``.
        deep: Verify every byte of the complete ones that are ours; what is damaged is ``corrupt``.
        config: For ``deep``, as of ``verify``.

    Returns:
        By step, then by name.

    Raises:
        ConfigError: ``pattern`` is no such expression, or ``root`` a URL.
        StorageError: ``root`` cannot be listed.
    """
    folders = []
    for step, path in step_paths(root, pattern):
        folder = look_at_step(step, path)
        if folder is not None:
            folders.append(_verified(folder, config) if deep and folder.is_complete else folder)
    return folders


def look_at_step(step: int, path: str) -> StepFolder | None:
    """One folder; None if it has gone meanwhile. Whatever is wrong with it is its state."""
    try:
        local_path(os.path.join(".", path))  # refuses names that are no text  # noqa: PTH118
        return folder_of(step, path, inspect_step(path))
    except CheckpointError as error:
        if _is_gone(path):
            return None
        return StepFolder(step=step, path=path, state="unknown", reason=str(error))


def _is_gone(path: str) -> bool:
    try:
        return not Path(path).is_dir()
    except OSError:  # whether it has cannot be told
        return False


def folder_of(step: int, path: str, found: dict[str, Any]) -> StepFolder:
    """What ``inspect_step`` found there."""
    return StepFolder(
        step=step,
        path=path,
        state=found["state"],
        reason=found["reason"],
        is_being_saved=found["is_being_saved"],
        is_foreign=found["is_foreign"],
        save_ids=tuple(found["save_ids"]),
        parts=tuple(found["parts"]),
        num_files=found["num_files"],
        num_bytes=found["num_bytes"],
        components=tuple(found["components"]),
        has_mark=found["has_mark"],
    )


def _verified(folder: StepFolder, config: Config | None) -> StepFolder:
    problems = []
    for path in [Path(folder.path, name) for name in folder.components] or [Path(folder.path)]:
        try:
            problems += verify(path, config=config).problems
        except UnsupportedError:
            continue  # another writer's has nothing to verify
        except CheckpointError:
            return look_at_step(folder.step, folder.path) or folder  # it changed meanwhile
    if not problems:
        return folder
    first = f"{problems[0].file}: {problems[0].message}"
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return dataclasses.replace(folder, state="corrupt", reason=first + more)
