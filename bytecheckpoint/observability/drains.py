# SPDX-License-Identifier: Apache-2.0
"""What became of the copies of a run to durable storage: what waits, what was copied, what was not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bytecheckpoint.checkpoint.keeping import IS_DRAINED, drains_of
from bytecheckpoint.checkpoint.steps import look_at_step
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.findings.figures import number, text_of
from bytecheckpoint.report.text import duration_text, ratio, size_text, utc_text
from bytecheckpoint.storage.paths import as_place, name_of
from bytecheckpoint.storage.step_folder import step_paths

__all__ = ["Drains", "Waiting", "drain_text", "drains_in"]


@dataclass(frozen=True)
class Waiting:
    """A step that waits for its copy, or is being copied."""

    name: str
    num_bytes: int
    is_under_way: bool


@dataclass(frozen=True)
class Drains:
    """The copies of a run.

    Attributes:
        waiting: Steps that wait now, the lowest number first.
        copied: Records of the steps that were copied, oldest first.
        num_failed: How many tries failed.
        left_out: The newest record of each step that was not copied in the end, oldest first.
    """

    waiting: tuple[Waiting, ...] = ()
    copied: tuple[Mapping[str, Any], ...] = ()
    num_failed: int = 0
    left_out: tuple[Mapping[str, Any], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.waiting or self.copied or self.num_failed or self.left_out)

    @property
    def num_bytes(self) -> int:
        """Bytes that were copied."""
        return sum(_bytes_of(record) for record in self.copied)

    @property
    def seconds(self) -> float:
        """Seconds that it took."""
        return sum(_seconds_of(record) for record in self.copied)

    def summary(self) -> str:
        """Returns one line for people."""
        notes = [f"{_steps_text(len(self.copied))} copied"]
        if self.copied:
            notes[0] += f", {_how_fast(self.num_bytes, self.seconds)}"
        if self.waiting:
            sizes = size_text(sum(step.num_bytes for step in self.waiting))
            under_way = ", ".join(step.name for step in self.waiting if step.is_under_way)
            notes.append(f"{_steps_text(len(self.waiting))} waiting, {sizes}")
            notes[-1] += f", of which {under_way} is being copied" if under_way else ""
        if self.num_failed:
            notes.append(f"{self.num_failed:,} failed {'try' if self.num_failed == 1 else 'tries'}")
        return "; ".join(notes)

    def to_dict(self) -> dict[str, Any]:
        """Returns its numbers as plain data, without records."""
        waiting = [vars(step) for step in self.waiting]
        gb_per_s = ratio(self.num_bytes / 1e9, self.seconds)
        return {
            "waiting": waiting,
            "num_copied": len(self.copied),
            "num_bytes": self.num_bytes,
            "seconds": self.seconds,
            "gb_per_s": gb_per_s,
            "num_failed": self.num_failed,
        }


def drains_in(run: Path, records: Sequence[Mapping[str, Any]]) -> Drains:
    """Returns what became of the copies of a run.

    Args:
        run: Folder of the run near by.
        records: What ``read_drains`` returned of it.
    """
    copied, newest, num_failed = [], dict[str, Mapping[str, Any]](), 0
    for record in records:
        newest[text_of(record, "path")] = record
        num_failed += bool(text_of(record, "failed"))
        if not _why_not(record):
            copied.append(record)
    left_out = sorted((each for each in newest.values() if _why_not(each)), key=lambda each: number(each, "at"))
    return Drains(tuple(_waiting_in(run)), tuple(copied), num_failed, tuple(left_out))


def drain_text(record: Mapping[str, Any]) -> str:
    """Returns the record of a copy in words. Anybody may have written it."""
    path, target = (text_of(record, name) or "?" for name in ("path", "target"))
    what = f"{utc_text(record.get('at'))}, copy of {path} to {target}"
    if text_of(record, "dropped"):
        return f"{what}: dropped: {text_of(record, 'dropped')}"
    if text_of(record, "failed"):
        return f"{what}, after {duration_text(_seconds_of(record))}: failed: {text_of(record, 'failed')}"
    return f"{what}: {_how_fast(_bytes_of(record), _seconds_of(record))}"


def _why_not(record: Mapping[str, Any]) -> str:
    return text_of(record, "dropped") or text_of(record, "failed")


def _waiting_in(run: Path) -> list[Waiting]:
    """Returns the steps that are pinned for their copy. What cannot be read is left out: others can say why."""
    try:
        numbers = {path: step for step, path in step_paths(run)}
        notes = drains_of([*numbers])
    except CheckpointError:
        return []
    waiting = []
    for path, note in notes.items():
        folder = look_at_step(numbers[path], path)
        size = 0 if folder is None else folder.num_bytes
        waiting.append(Waiting(name_of(as_place(path)), size, note == IS_DRAINED))
    return waiting


def _bytes_of(record: Mapping[str, Any]) -> int:
    return int(max(number(record, "num_bytes"), 0))


def _seconds_of(record: Mapping[str, Any]) -> float:
    return max(number(record, "total_s"), 0.0)


def _how_fast(num_bytes: int, seconds: float) -> str:
    rate = f", {size_text(int(ratio(num_bytes, seconds)))}/s" if seconds else ""
    return f"{size_text(num_bytes)} in {duration_text(seconds)}{rate}"


def _steps_text(count: int) -> str:
    return f"{count:,} step{'' if count == 1 else 's'}"
