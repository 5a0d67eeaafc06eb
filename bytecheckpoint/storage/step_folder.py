# SPDX-License-Identifier: Apache-2.0
"""The step folders of a run, and ``StepFolder``: what one of them holds. Needs no torch."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bytecheckpoint.errors import ConfigError
from bytecheckpoint.report.text import size_text
from bytecheckpoint.storage.folders import folder_at, known
from bytecheckpoint.storage.parts import PARTS
from bytecheckpoint.storage.paths import Place, below, location
from bytecheckpoint.storage.step_names import DEFAULT_PATTERN, compile_pattern, step_number, what_it_counts

__all__ = ["StepFolder", "folder_of", "step_paths", "steps_there"]


@dataclass(frozen=True, kw_only=True)
class StepFolder:
    """One step folder, as it was when it was looked at.

    Attributes:
        step: Number in the name of the folder.
        path: Path of the folder.
        state: One of the following; only ``complete`` may be trusted.
            ``complete``: a checkpoint that loads. Its commit mark opens, all files are there with the sizes and
            trailers that the mark says (for another writer's checkpoint: all files are there and long enough), and no
            tensor lacks an element, unless it was saved with ``Config(allow_partial_tensors=True)``.
            ``saving``: no checkpoint yet, and a live save of this host is writing it.
            ``half``: no checkpoint, and no live save is seen. A dead save or an unfinished removal left it, or a save
            on another host writes it, or a save has not begun to write.
            ``corrupt``: there is a commit mark, but the mark or a file differs from what was written.
            ``incomplete``: everything is as it was written, but elements of a tensor are in no chunk, or in two.
            ``reason`` names the tensor; what is there can be loaded.
            ``part``: of several machines each has a disk of its own at this place (see ``Tiers``); all have committed,
            and this one has its part. A load of all of them finds the rest.
            ``unknown``: the folder holds nothing of a checkpoint (``has_mark`` is False), or it cannot be looked at:
            it is not readable, has a newer format, or metadata of another writer that we do not read.
        reason: Why it is not ``complete``; "" if it is.
        is_being_saved: Whether a live save holds the folder. A ``complete`` checkpoint is then about to be replaced,
            and loads until that happens.
        is_foreign: Whether it is another writer's checkpoint, without our checksums.
        save_ids: Ids of the save, 32 hex digits each: one, or one for each part or component. Empty for another
            writer's checkpoint.
        parts: Ranks that saved without collectives, each of which has a part of its own; otherwise empty.
        num_files: Number of data files that the metadata name.
        num_bytes: Bytes of these files.
        components: For a checkpoint of ``bytecheckpoint.save``, the folders in it that are checkpoints of their own:
            ``extra_state``, ``optimizer``, ``model``. ``state`` is then that of all of them together, and ``half`` if
            they are of different saves. Otherwise empty.
        has_mark: Whether there is a commit mark, that of the model if there are components. Also True if that is not
            known.
        tiers: With ``Tiers``, the state of the step in each of its places: ``memory``, ``near``, ``durable``. Besides
            the states above: ``waits`` and ``draining`` of a durable copy that is to come, or under way; ``another
            save`` of one that this save replaces, or whose save was replaced near by; ``partial`` of one in memory, of
            which other machines have more than this process knows, or a part is lost.
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
    tiers: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the folder."""
        return Path(self.path).name

    @property
    def is_complete(self) -> bool:
        """Whether it holds a checkpoint that loads."""
        return self.state == "complete"

    @property
    def is_kept(self) -> bool:
        """Whether it holds a checkpoint that loads, or the part of this machine of one."""
        return self.state in ("complete", "part")

    @property
    def is_faulty(self) -> bool:
        """Whether it is not ``is_kept``, nor being saved, nor a folder with nothing of a checkpoint in it."""
        return not self.is_kept and self.state != "saving" and not (self.state == "unknown" and not self.has_mark)

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
        notes += [f"{tier}: {state}" for tier, state in self.tiers.items()]
        return f"{self.name}: {', '.join(notes)}" + (f": {self.reason}" if self.reason else "")

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields, by name, as plain data."""
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        """Returns all fields, by name, as a JSON object."""
        return json.dumps(self.to_dict(), allow_nan=False)


def folder_of(step: int, path: str, found: dict[str, Any]) -> StepFolder:
    """Makes a StepFolder of what ``inspect_step`` found."""
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


def step_paths(
    root: str | os.PathLike[str], pattern: str | None = None, *, follow_links: bool = False
) -> list[tuple[int, str]]:
    """Returns step and path of all step folders of a run folder, sorted by step, then by name. It does not look inside.

    Args:
        root: Folder of a run.
        pattern: See ``scan_steps``.
        follow_links: Whether to return symbolic links, too, wherever they lead.

    Raises:
        ConfigError: See ``scan_steps``. Or ``pattern`` fits names, and finds a number in none of them.
        StorageError: See ``scan_steps``.
    """
    expression = compile_pattern(pattern)
    folder = known(location(root))
    names = folder_at(folder).folders(follow_links=follow_links)
    matches = [match for name in names if (match := expression.fullmatch(name))]
    if pattern is None:
        of_one_kind = _of_one_kind(folder, [match[0] for match in matches])
        matches = [match for match in matches if match[0] in of_one_kind]
    numbers = [(step_number(match[1] or ""), match[0]) for match in matches]
    if numbers and all(step is None for step, _ in numbers) and pattern is not None:
        raise ConfigError(
            f"pattern={pattern!r}: of '{matches[0][0]}' in {folder} its first group is {matches[0][1]!r}, which is no "
            f"number of a step: put the group around the digits, as in {DEFAULT_PATTERN!r}"
        )
    return [
        (step, str(below(folder, name))) for step, name in sorted((n, name) for n, name in numbers if n is not None)
    ]


def _of_one_kind(run: Place, names: list[str]) -> set[str]:
    """Returns the names of step folders whose numbers count the same. Kinds without any checkpoint are left out.

    Raises:
        ConfigError: There are checkpoints of several kinds.
    """
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(what_it_counts(name), []).append(name)
    if len(kinds) < 2:
        return {*names}

    def has_mark(name: str) -> bool:
        return any(folder_at(below(run, name, *part)).has(".metadata") for part in ((), *zip(PARTS)))

    marked = {kind: found for kind, of_kind in kinds.items() if (found := [*filter(has_mark, of_kind)])}
    if len(marked) > 1:
        first, other = (min(of_kind) for of_kind in [*marked.values()][:2])
        raise ConfigError(
            f"{run}: it has steps of several kinds, as {first} and {other}, whose numbers count different things; pass "
            "pattern=, a regular expression for the names of one kind whose group is the number"
        )
    return {*kinds[next(iter(marked), "steps" if "steps" in kinds else min(kinds))]}


def steps_there(root: str | os.PathLike[str]) -> list[tuple[int, str]]:
    """Does what ``step_paths`` does, but leaves out steps of an object store of which only a removal's marks are left.

    Raises:
        StorageError: See ``scan_steps``.
    """
    steps, folder = step_paths(root), folder_at(known(location(root)))
    if not steps or not folder.lists_deep:
        return steps
    there = {file.name.partition("/")[0] for file in folder.files()}
    return [step for step in steps if step[1].rpartition("/")[2] in there]
