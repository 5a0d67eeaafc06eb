# SPDX-License-Identifier: Apache-2.0
"""Decides which checkpoints of a run are kept, and removes the others. Needs no torch."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, field

from bytecheckpoint.checkpoint.commit_order import CommitOrder, Step, commit_order
from bytecheckpoint.checkpoint.keeping import KeepBest, best_of, check_keep_best, pins_of, young_of
from bytecheckpoint.checkpoint.steps import scan_steps
from bytecheckpoint.config import Config
from bytecheckpoint.contents.foreign_formats import other_writer
from bytecheckpoint.errors import CheckpointError, ConfigError
from bytecheckpoint.report.text import size_text
from bytecheckpoint.runtime.per_process import PerProcess
from bytecheckpoint.storage.folders import folder_at, known
from bytecheckpoint.storage.last_used import last_used
from bytecheckpoint.storage.names import is_of_other_library
from bytecheckpoint.storage.paths import Place, as_place, below, location, name_of
from bytecheckpoint.storage.removal import StepRemoval
from bytecheckpoint.storage.removals import removal_in
from bytecheckpoint.storage.shared_files import shared_with
from bytecheckpoint.storage.step_folder import StepFolder, step_paths
from bytecheckpoint.storage.step_names import compile_pattern

__all__ = ["Retention", "RetentionReport"]

_logger = logging.getLogger("bytecheckpoint")

# Roots and the steps that are in doubt there, as they were logged: a loop does not repeat them after each save.
_said: PerProcess[set[str]] = PerProcess(set)


@dataclass(frozen=True, kw_only=True)
class RetentionReport:
    """What one prune did, or would do.

    Attributes:
        root: Folder of the run.
        dry_run: Whether nothing was removed. ``removed`` and ``swept`` are then what would have been tried.
        kept: Steps of the complete checkpoints that stay, in ascending order.
        protected: For each of them that the rules alone would not keep, the reason, by path.
        doubts: Which steps have higher numbers than the newest, or were committed later than the one that the tracker
            names, and by what the newest is the newest. Empty if tracker, times of commit and numbers agree.
        removed: Paths of complete checkpoints that are gone. One of which files are left is in ``warnings`` alone: it
            loads no more, and the next prune sweeps it.
        swept: Paths of other folders that are gone: half, corrupt or incomplete.
        shared: For each path in ``removed`` and ``swept`` of which steps that stay have files, too (see
            ``Config.link_unchanged``), the names of these steps.
        skipped: For each folder that was left alone although the rules do not keep it, the reason, by path.
        warnings: What failed, or was left behind. The next prune tries again.
        bytes_freed: Bytes of the files that were removed; for a dry run, of those that would be.
        total_s: Seconds that the prune took.
    """

    root: str
    dry_run: bool = False
    kept: list[int] = field(default_factory=list)
    protected: dict[str, str] = field(default_factory=dict)
    doubts: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    swept: list[str] = field(default_factory=list)
    shared: dict[str, list[str]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    bytes_freed: int = 0
    total_s: float = 0.0

    def __str__(self) -> str:
        return self.summary()

    def summary(self) -> str:
        """One line for people."""
        would = "would have " if self.dry_run else ""
        notes = [f"{would}removed {len(self.removed)}", f"kept {len(self.kept)}"]
        if self.swept:
            notes.append(f"{would}swept {len(self.swept)} that {'is' if len(self.swept) == 1 else 'are'} not complete")
        if self.skipped:
            notes.append(f"left {len(self.skipped)} alone")
        if self.warnings:
            notes.append(f"{len(self.warnings)} warnings")
        return f"pruned {self.root}: {', '.join(notes)}; {would}freed {size_text(self.bytes_freed)}"

    def to_json(self) -> str:
        """Returns all fields, by name, as a JSON object."""
        return json.dumps(dataclasses.asdict(self), allow_nan=False)


@dataclass(frozen=True)
class Retention:
    """Keeps the newest checkpoints of a run, and every n-th step, and removes the others.

    Only complete checkpoints count (see ``scan_steps``): with ``keep_latest=3`` there are three that load, whatever
    else is in the folder. "Newest" means committed last, and of equal times the highest number. So if you go back to an
    earlier step and save from there, the steps that you gave up are the older ones. The step that the tracker names
    counts like any other, though ``latest`` returns it first: it may be the one before, for the moment between a commit
    and the change of the tracker.

    Whatever the rules say, these stay: what is pinned (see ``pin``); what this process committed last; what it loaded
    last, until it commits one of the run itself; what the tracker names; and, if saves that began before have younger
    commit marks, the youngest of these.

    The order of the removal never leaves half a checkpoint that loads. First the checkpoints that stay are made
    durable. Then, for each one that goes, the commit mark is removed and that is synced, then the files, then the
    folder. After a crash at any point, the next call finishes the work. During the removal it holds the right to
    commit, as a save would: a save that begins at the same step at that moment raises a ``CheckpointBusyError``. A
    checkpoint stays until the next call if a save is replacing it, another prune removes it, or a load of this process
    reads it. Loads of other processes are not seen, and fail as with any checkpoint that is deleted.

    The whole folder is removed, as users of ``shutil.rmtree`` expect, with everything else in it. What stays: what a
    symbolic link leads to (also a link that replaces a folder during the removal), a folder inside that holds a
    checkpoint of its own, in whatever format, and what is mounted there. Step folders that are symbolic links, and
    those with nothing of a checkpoint in them, are never touched.

    What a dead save left (``half``) is removed once a newer step is complete, if its tmp shows that the save is dead.
    Otherwise (no tmp, or no newer step is complete: a host whose locks are not seen here may be writing it), it is
    removed only if nothing in it has changed for ``grace_s``. For a folder without a commit, "newer" is the higher
    number. Damaged checkpoints (``corrupt``), and those whose
    tensors lack elements (``incomplete``), stay, because they may hold the only copy of something. They do not count,
    so nothing is removed because they are there.

    In an object store a mark is removed by a conditional request, so that no save that has begun before can be
    committed there. There are no locks: what a dead save left is removed once it is older by ``grace_s`` than the
    newest complete checkpoint, by the clock of the store.

    Args:
        root: Folder of the run, with one folder for each step; or its URL in an object store.
        keep_latest: Number of the newest checkpoints to keep, 1 or more.
        keep_every: Also keep the steps that this number divides; None keeps no others.
        keep_best: Also keep the best by a metric of their user metadata: ``("loss", 3)`` the three lowest,
            ``("eval.accuracy", 1, "max")`` the highest. Steps without it do not count.
        keep_within_s: Also keep what was committed within so many seconds before now.
        pattern: Pattern of the names of step folders; see ``scan_steps``.
        remove_corrupt: Whether to also remove damaged and incomplete checkpoints, if a newer step is complete.
        remove_foreign: Whether to also remove checkpoints in formats of other libraries, such as those of Megatron-Core
            and Hugging Face: steps, folders inside steps, and what a save that is ``half`` has beside it. Checkpoints
            of DCP are no such.
        remove_others: If False, only files of a checkpoint are removed. A folder with other files then stays, without a
            checkpoint.
        grace_s: Seconds; see above. The default is the time after which a save has lost its right to commit.
        all_ranks: Whether ``after_save`` acts on every rank, for roots that are local to each rank; otherwise it acts
            on rank 0 only.
        config: Settings for the store, if ``root`` is a URL; None reads ``BYTECHECKPOINT_*`` variables.

    Raises:
        ConfigError: An argument is out of range, or ``root`` is a URL of an unknown kind.
    """

    root: str | os.PathLike[str]
    _: KW_ONLY
    keep_latest: int
    keep_every: int | None = None
    keep_best: KeepBest | None = None
    keep_within_s: float | None = None
    pattern: str | None = None
    remove_corrupt: bool = False
    remove_foreign: bool = False
    remove_others: bool = True
    grace_s: float = Config.commit_deadline_s
    all_ranks: bool = False
    config: Config | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        _check_count("keep_latest", self.keep_latest)
        if self.keep_every is not None:
            _check_count("keep_every", self.keep_every)
        if self.keep_best is not None:
            check_keep_best(self.keep_best)
        for name in ("grace_s", "keep_within_s"):
            value = getattr(self, name)
            is_unset = value is None and name == "keep_within_s"
            if not is_unset and (isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0):
                raise ConfigError(f"{name}={value!r}: must be a number of seconds >= 0")
        object.__setattr__(self, "root", str(known(location(self.root), self.config)))
        compile_pattern(self.pattern)

    def after_save(self, step: int | None = None, *, rank: int | None = None) -> RetentionReport | None:
        """Prunes on rank 0, and does nothing on other ranks. For a training loop, after a save is committed.

        Local: no rank waits for it. What this process has just committed stays, also without ``step``. It is also safe
        before the commit, for example right after ``async_save``, because the new checkpoint does not count yet.
        Deletes that fail are warnings, in the log and in the report; the next call tries again. So are doubts about
        which checkpoint is the newest, once for the steps in doubt.

        Args:
            step: One more step that this call never removes.
            rank: Rank of this process; None asks ``torch.distributed``, if that is in use.

        Returns:
            A report; None on ranks that do nothing.
        """
        if not self.all_ranks and (_rank() if rank is None else rank) != 0:
            return None
        if folder_at(self.root).is_gone():  # the first background save of a run has not made it yet
            return RetentionReport(root=os.fspath(self.root))
        return self.prune(protect=() if step is None else (step,))

    def prune(self, *, dry_run: bool = False, protect: Iterable[int] = ()) -> RetentionReport:
        """Removes what the rules do not keep. Local; it may take as long as the file system takes to free files.

        Ctrl-C ends it between two files, and the next call goes on.

        Args:
            dry_run: Whether to remove nothing, and to report what would be removed and how many bytes that would free.
            protect: Additional steps to keep.

        Returns:
            A report of what was done. Failures are warnings in it.
        """
        begin = time.perf_counter()
        report = RetentionReport(root=os.fspath(self.root), dry_run=dry_run)
        freed = 0
        try:
            folders = scan_steps(self.root, pattern=self.pattern, config=self.config)
            freed = self._prune(folders, frozenset(protect), report)
        except CheckpointError as error:
            report.warnings.append(str(error))
        report = dataclasses.replace(report, bytes_freed=freed, total_s=time.perf_counter() - begin)
        for warning in report.warnings:
            _logger.warning("prune(%s): %s", report.root, warning)
        for doubt in report.doubts:
            of_others = f"{report.root}: {doubt.partition(', but ')[2]}"  # the newest is another one after each save
            if of_others not in _said.get():
                _said.get().add(of_others)
                _logger.warning("prune(%s): %s", report.root, doubt)
        if report.removed or report.swept:
            _logger.info("%s", report.summary())
        return report

    def _prune(self, folders: list[StepFolder], protect: frozenset[int], report: RetentionReport) -> int:
        removal = removal_in(
            self.root,
            remove_others=self.remove_others,
            remove_foreign=self.remove_foreign,
            grace_s=self.grace_s,
            config=self.config,
        )
        committed = {_step_of(folder): folder for folder in folders if folder.has_mark}
        order = commit_order(as_place(self.root), committed)
        complete = [committed[step] for step in order.steps if committed[step].is_kept]  # the newest first
        by_time = [committed[step] for step in order.by_time if committed[step].is_kept]
        chosen = self._chosen(by_time)
        by_rules = [
            folder
            for place, folder in enumerate(by_time, 1)
            if folder.path in chosen or self._keeps(folder, place, protect)
        ]
        needed = {path: why for path, why in _needed(order, complete).items() if path not in _paths(by_rules)}
        needed |= pins_of(_paths(committed.values()) - _paths(by_rules))
        report.protected.update(needed)
        kept = [folder for folder in complete if folder in by_rules or folder.path in needed]
        report.kept.extend(sorted(folder.step for folder in kept))
        of_unknown = [folder for folder in folders if folder.state == "unknown" and folder.is_faulty]
        report.skipped.update({each.path: f"it cannot be looked at: {each.reason}" for each in of_unknown})
        if not kept:
            return 0  # half or damaged checkpoints may be all that there is
        newest = kept[0]
        report.doubts.extend(filter(None, [order.doubts_about(_step_of(newest))]))
        # A complete one without a place in the order cannot be looked at any more: it is left alone.
        going = [folder for folder in folders if folder in complete or not folder.is_kept]
        going = [each for each in going if each.path not in needed and each not in kept and each.step not in protect]
        report.warnings.extend(removal.begin(newest))
        newer = [folder for folder in going if order.is_newer(_step_of(folder), _step_of(newest))]
        going = [folder for folder in going if self._may_go(folder, newest, newer, removal, report)]
        report.shared.update(shared_with([folder.path for folder in going], [folder.path for folder in kept]))
        if report.dry_run:
            return sum(self._look(folder, removal, report) for folder in going)
        if going:
            report.warnings.extend(removal.secure(kept, going))
        freed = sum(self._remove(folder, removal, report) for folder in going)
        report.warnings.extend(removal.end(self._unseen(folders)))
        return freed

    def _chosen(self, complete: list[StepFolder]) -> set[str]:
        """Returns the paths of checkpoints that a look into them, or at their age, keeps."""
        best = set() if self.keep_best is None else best_of(complete, self.keep_best)
        return best | (set() if self.keep_within_s is None else young_of(complete, self.keep_within_s))

    def _unseen(self, folders: list[StepFolder]) -> Iterator[str]:
        """Yields the paths of step folders that a scan does not see any more. They are listed when somebody asks."""
        seen = _paths(folders)
        yield from (path for _, path in step_paths(self.root, self.pattern) if path not in seen)

    def _keeps(self, folder: StepFolder, place: int, protect: frozenset[int]) -> bool:
        """Whether the rules keep ``folder``. ``place`` counts complete ones from that committed last, which is 1."""
        is_nth = self.keep_every is not None and folder.step % self.keep_every == 0
        return place <= self.keep_latest or is_nth or folder.step in protect

    def _may_go(
        self,
        folder: StepFolder,
        newest: StepFolder,
        newer: list[StepFolder],
        removal: StepRemoval,
        report: RetentionReport,
    ) -> bool:
        if folder.state == "unknown":
            return False
        is_theirs = "" if self.remove_foreign else _other_writer(folder)
        if is_theirs and not folder.is_kept and removal.has_begun(folder):
            is_theirs = ""
        if folder.is_being_saved:
            why = "a save is under way"
        elif is_theirs:
            why = is_theirs
        elif folder.state not in ("complete", "part", "half") and not self.remove_corrupt:
            why = f"{folder.state}: {folder.reason}"
        elif folder.state not in ("complete", "part", "half") and folder in newer:
            why = f"{folder.state}, but no newer one is complete: {folder.reason}"
        elif folder.state == "half" and not removal.is_dead(folder, newest):
            why = f"half, but a save on another host may still be writing it: {folder.reason}"
        else:
            return True
        report.skipped[folder.path] = why
        return False

    def _look(self, folder: StepFolder, removal: StepRemoval, report: RetentionReport) -> int:
        """Does what ``_remove`` does, in a dry run."""
        (report.removed if folder.is_kept else report.swept).append(folder.path)
        return removal.bytes_of(folder)

    def _remove(self, folder: StepFolder, removal: StepRemoval, report: RetentionReport) -> int:
        outcome = removal.remove(folder)
        if outcome.skipped:
            report.skipped[folder.path] = outcome.skipped
        elif not outcome.is_loadable and not outcome.failures:
            (report.removed if folder.is_kept else report.swept).append(folder.path)
        report.warnings.extend(f"{folder.name}: {failure}" for failure in outcome.failures)
        report.warnings.extend(f"{folder.name} was removed, except for {left}" for left in outcome.stays)
        return outcome.bytes_freed


def _other_writer(folder: StepFolder) -> str:
    """Returns why a folder stays: what of another library is in it, whose loss nobody has asked for; else ""."""
    place = as_place(folder.path)
    try:
        if folder.is_kept:
            writers = map(_writer_of_part, [below(place, part) for part in folder.components] or [place])
            theirs = next(filter(None, writers), "") if folder.is_foreign else ""
        else:
            names = sorted(each.name for each in folder_at(place).files() if is_of_other_library(name_of(each.name)))
            theirs = f"{names[0]} of another library is in it" if names else ""
    except CheckpointError as error:
        return "" if folder_at(place).is_gone() else f"it cannot be looked at: {error}"
    return f"{theirs}, which only remove_foreign=True removes" if theirs else ""


def _writer_of_part(place: Place) -> str:
    names = folder_at(place).names()
    is_of_dcp = ".metadata" in names and "metadata.json" not in names  # Megatron-Core's has both
    return "" if is_of_dcp else other_writer(place)


def _step_of(folder: StepFolder) -> Step:
    return folder.step, folder.path


def _paths(folders: Iterable[StepFolder]) -> set[str]:
    return {folder.path for folder in folders}


def _first_in(paths: set[str], steps: Iterable[Step]) -> list[str]:
    return [path for _, path in steps if path in paths][:1]


def _needed(order: CommitOrder, complete: list[StepFolder]) -> dict[str, str]:
    """Returns the paths of complete checkpoints that no rule may remove, with the reason."""
    paths = _paths(complete)
    needed: dict[str, str] = {}
    if order.by_begin:  # the hosts whose clocks said so may have been wrong
        needed |= dict.fromkeys(_first_in(paths, order.by_mark), "its commit mark is the youngest")
    if order.tracked is not None and order.tracked[1] in paths:
        needed[order.tracked[1]] = "the tracker names it"
    return {**needed, **last_used(paths)}


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}={value!r}: must be an int >= 1")


def _rank() -> int:
    """Returns the rank of this process if torch.distributed is in use; otherwise 0."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return 0
    return int(distributed.get_rank())
