# SPDX-License-Identifier: Apache-2.0
"""Finds the newest whole checkpoint of a run, to resume from. Needs no torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bytecheckpoint.checkpoint.commit_order import CommitOrder, commit_order
from bytecheckpoint.checkpoint.steps import look_at_step
from bytecheckpoint.checkpoint.tracker_text import tracker_text
from bytecheckpoint.errors import CheckpointError, ConfigError, StorageError, UnsupportedError
from bytecheckpoint.storage.far_looks import look_far
from bytecheckpoint.storage.folders import folder_at
from bytecheckpoint.storage.parts import PARTS, REFERENCE
from bytecheckpoint.storage.paths import Place, as_place, below, name_of
from bytecheckpoint.storage.save_ids import begin_of_save
from bytecheckpoint.storage.small_files import storage_errors
from bytecheckpoint.storage.step_folder import StepFolder, step_paths
from bytecheckpoint.storage.step_names import run_and_step
from bytecheckpoint.storage.tiers import tier_of

__all__ = ["Newest", "newest_in", "newest_whole"]

_MOST_NAMED = 5


@dataclass(frozen=True)
class Newest:
    """The newest whole step of a run.

    Attributes:
        path: Its folder; None if the run has none yet.
        warnings: What the user should hear of it.
    """

    path: str | None
    warnings: tuple[str, ...] = ()


def newest_whole(
    run: Place, pattern: str | None, asked: str, before: int | str | os.PathLike[str] | None = None
) -> Newest:
    """Does what ``latest`` does on one rank, for step folders of any names.

    Args:
        run: Folder of the step folders.
        pattern: Pattern of their names; see ``scan_steps``.
        asked: Name of the function that the user called, for messages.
        before: A step, or the folder of one: only what comes after it in the order counts.

    Raises:
        StorageError: The file system refused.
        ConfigError: ``before`` is no committed step of the run.
        CheckpointError: As ``latest`` raises it.
    """
    with storage_errors(asked, run):
        if folder_at(run).is_absent():
            return Newest(None)
    said: list[str] = []
    order = commit_order(run, step_paths(run, pattern, follow_links=True), _tracker_of(run, said))
    if not order.steps and not order.unmarked:
        refuse_a_checkpoint(run, asked)
    marked = {path for _, path in order.steps}
    passed: list[StepFolder] = []
    found: StepFolder | None = None
    behind = order.steps if before is None else order.steps[_place_of(before, order, run, asked) + 1 :]
    for step, path in (*behind, *(order.unmarked if before is None else ())):
        if found is not None and (path in marked or step <= found.step):
            continue
        folder = _looked_at(step, path)
        if folder is not None and folder.is_complete:
            found = found or folder
        elif folder is not None:
            passed.append(folder)
    passed.sort(key=lambda folder: folder.step, reverse=True)
    if found is None:
        _refuse_loss(run, passed, asked)
    instead = "there is no whole one" if found is None else f"taking {found.path}"
    said += [f"passing over {folder.path}, which is {_why_not(folder)}; {instead}" for folder in passed]
    if found is not None and found.path in marked and before is None:
        said += filter(None, [order.doubts_about((found.step, found.path))])
    return Newest(None if found is None else found.path, tuple(f"{asked}({run}): {text}" for text in said))


def newest_in(runs: Sequence[Place], look: Callable[[Place], Newest], asked: str) -> Newest:
    """Returns the newest step of a run that is kept in several places, from the nearest place that has it.

    The newest is the one whose save began last, which save ids say; where they do not, the one of the higher number.
    Once a nearer place has one, the farthest is not waited for longer than 20 s.

    Args:
        runs: Folders of the run, the nearest first.
        look: Returns the newest step of one of them.
        asked: Name of the function that the user called, for messages.

    Raises:
        CheckpointError: No place has a whole checkpoint, and one could not be looked at, or has damaged ones.
    """
    if len(runs) == 1:
        return look(runs[0])
    found: list[Newest] = []
    said: list[str] = []
    failures: list[CheckpointError] = []
    for run in runs:
        try:
            newest = look(run) if not found or run != runs[-1] else look_far(look, run, asked)
        except CheckpointError as error:
            failures.append(error)
            continue
        found += [newest] if newest.path is not None else []
        said += newest.warnings
    if not found:
        if failures and (len(failures) == len(runs) or not isinstance(failures[0], ConfigError)):
            raise failures[0]
        return Newest(None, tuple(said))
    best = found[0]
    for other in found[1:]:
        best = other if _is_later(str(other.path), str(best.path)) else best
    number = _number_of(str(best.path))
    higher = [str(other.path) for other in found if _number_of(str(other.path)) > number]
    said += [
        f"{asked}({runs[0]}): {best.path} is the newest, by the begin of its save, but {path} has a higher number: a "
        "run went back to an earlier step and gave that up"
        for path in higher
    ]
    said += [f"{asked}({runs[0]}): taking {best.path}: {error}" for error in failures]
    if found == [best] and tier_of(str(best.path)) == "memory":
        run = str(runs[0])
        said.append(
            f"{asked}({run}): {best.path} is in memory alone; bcp holder stop {run.rpartition('/')[2]} forgets it"
        )
    return Newest(best.path, tuple(said))


def _is_later(path: str, than: str) -> bool:
    began, of_than = _begin_of(path), _begin_of(than)
    if began and of_than:
        return began > of_than
    return _number_of(path) > _number_of(than)


def _begin_of(path: str) -> int:
    folder = look_at_step(0, path)
    return max(map(begin_of_save, () if folder is None else folder.save_ids), default=0)


def _number_of(path: str) -> int:
    return run_and_step(path)[1] or 0


def _place_of(before: int | str | os.PathLike[str], order: CommitOrder, run: Place, asked: str) -> int:
    """Returns the place of a step in the order. Of several folders with one number, it is the first.

    Raises:
        ConfigError: It is no committed step of the run.
    """
    name = None if isinstance(before, int) else os.path.basename(os.fspath(before).rstrip("/"))  # noqa: PTH119
    for place, (step, path) in enumerate(order.steps):
        if step == before if name is None else name_of(as_place(path)) == name:
            return place
    raise ConfigError(
        f"{asked}({run}): before={before} is no step that was committed here: pass the number of a step, or its folder "
        "as latest returned it",
        str(run),
    )


def _tracker_of(run: Place, said: list[str]) -> str:
    """Returns what the tracker says. Something else in its place is none, since whole steps can be found without it."""
    try:
        return tracker_text(run)
    except StorageError as error:
        if isinstance(run, str):
            raise  # the store does not answer
        said.append(f"the tracker cannot be read, so the time of the commit decides: {error}")
        return ""


def _looked_at(step: int, path: str) -> StepFolder | None:
    folder = look_at_step(step, path)
    if folder is None and Path(path).is_symlink():
        return StepFolder(step=step, path=path, state="unknown", reason="the symbolic link leads to no folder")
    return folder


def _why_not(folder: StepFolder) -> str:
    return f"{folder.state}: {folder.reason}" if folder.reason else folder.state


def _was_committed(folder: StepFolder) -> bool:
    """Whether a checkpoint was, or may have been, in this folder at some time."""
    if folder.state in ("half", "saving"):
        # The model is committed last, so without its mark nothing was ever whole. Without components, a mark may be
        # that of one rank that saved on its own and was faster than the others.
        return bool(folder.components) and folder.has_mark
    return folder.has_mark


def _refuse_loss(run: Place, folders: Sequence[StepFolder], asked: str) -> None:
    lost = [folder for folder in folders if _was_committed(folder)]
    if not lost:
        return
    if any(folder.reason == REFERENCE for folder in lost):
        raise UnsupportedError(f"{asked}({run}): {lost[0].path}: {REFERENCE}", str(run))
    named = [f"{folder.name} is {_why_not(folder)}" for folder in lost[:_MOST_NAMED]]
    if len(lost) > _MOST_NAMED:
        named.append(f"and {len(lost) - _MOST_NAMED} more")
    raise CheckpointError(
        f"{asked}({run}): there are checkpoints, but none is whole: {'; '.join(named)}. To begin at step 0, use "
        "another folder, or move these away",
        str(run),
    )


def refuse_a_checkpoint(run: Place, asked: str) -> None:
    """Refuses a path without step folders that is a checkpoint itself.

    Args:
        run: What was passed as a run.
        asked: Name of the call, for the message.

    Raises:
        ConfigError: It is a checkpoint.
    """
    if any(folder_at(below(run, name) if name else run).has(".metadata") for name in ("", *PARTS)):
        raise ConfigError(
            f"{asked}({run}): this folder is a checkpoint itself, and has no step folders: pass its path to the load, "
            "or the folder of the run",
            str(run),
        )
