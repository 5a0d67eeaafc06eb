# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint manager of torchtitan needs from us.

This module uses nothing of torchtitan. So a manager of another kind needs an adapter of its own, but no engine.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from bytecheckpoint.checkpoint.commit_order import commit_order
from bytecheckpoint.checkpoint.newest import Newest
from bytecheckpoint.checkpoint.retention import Retention
from bytecheckpoint.checkpoint.steps import look_at_step
from bytecheckpoint.checkpoint.tier_drains import wait_for_drains
from bytecheckpoint.config import Config
from bytecheckpoint.distributed.groups import destroy_own_groups
from bytecheckpoint.errors import CheckpointError, CheckpointNotFoundError
from bytecheckpoint.load_spec.spec import LoadSpec
from bytecheckpoint.report import LoadReport, SaveReport
from bytecheckpoint.state_dicts import async_save_state_dict, load_state_dict, save_state_dict
from bytecheckpoint.storage.folders import can_open_url, folder_at, known
from bytecheckpoint.storage.paths import Place, below, is_url, location
from bytecheckpoint.storage.step_folder import StepFolder, step_paths
from bytecheckpoint.storage.tiers import Tiers
from bytecheckpoint.torchtitan._load_planner import ResumePlanner
from bytecheckpoint.training_state.latest import one_look

__all__ = ["STEP_PATTERN", "Engine", "leaves", "raise_at_end", "step_of", "wait_for"]

# It must match the whole name of a folder. torchtitan searches for it anywhere, and takes "step-9.old" for step 9.
STEP_PATTERN = r"step-(\d+)"
_MARK = ".metadata"
_HF_INDEX = "model.safetensors.index.json"

T = TypeVar("T")

_logger = logging.getLogger("bytecheckpoint")


class Engine:
    """Saves, loads, finds and removes checkpoints of a run, in local directories or in stores that obstore knows.

    Args:
        config: Settings.
        group: Group of the ranks that save and load together; it must have gloo for host memory. None makes a group of
            all ranks, because the default group may have no gloo; the constructor is then collective. Our own messages
            go over groups of the same ranks, which the first call makes and ``close`` destroys. This group is not
            destroyed, just as torchtitan's own is not: a rank may be at its end while others still connect to it.
    """

    def __init__(self, config: Config, group: dist.ProcessGroup | None) -> None:
        self.config = config
        made: Any = dist.new_group(backend="gloo") if group is None and _is_shared() else group
        self.group: dist.ProcessGroup | None = made

    # Saving.

    def save(self, path: str, state: dict[str, Any]) -> SaveReport:
        """Saves, and returns when the checkpoint is durable. Collective."""
        return save_state_dict(path, state, process_group=self.group, config=self.config)

    def save_async(self, path: str, state: dict[str, Any]) -> Future[Any]:
        """Saves in the background; returns a future of the save. The state may change after this call. Collective."""
        response = self.save_overlapped(path, state)
        response.staging_completion.result()
        return response.upload_completion

    def save_overlapped(self, path: str, state: dict[str, Any]) -> AsyncSaveResponse:
        """Saves as ``save_async``, but tensors on devices may change only when ``staging_completion`` is done.

        Collective. A thread of this process saves: its C++ code does not hold the GIL. A process of its own would need
        the state in memory that both processes map, and page-locked memory cannot be shared in that way.
        """
        handle = async_save_state_dict(path, state, process_group=self.group, config=self.config)
        return AsyncSaveResponse(staging_completion=handle.staged, upload_completion=cast(Any, handle.committed))

    # Loading.

    def load(
        self, path: str | os.PathLike[str], state: dict[str, Any], states: tuple[str, ...], spec: LoadSpec | None = None
    ) -> LoadReport:
        """Loads into ``state``. Collective.

        Args:
            path: Directory of a checkpoint.
            state: State dict; its tensors are filled in place.
            states: Keys of ``state`` that are not parameters of the model; empty if only the model is loaded.
            spec: What to take of the checkpoint, under which names, in which form; None takes it as it is.

        Raises:
            CheckpointError: The load failed. The message says what is wrong, and what to do.
            CheckpointNotFoundError: There is no checkpoint.
        """
        planner = ResumePlanner(states, spec)
        try:
            return load_state_dict(path, state, process_group=self.group, planner=planner, config=self.config)
        except CheckpointError as error:  # on all ranks
            if spec is not None or not folder_at(path).has(_HF_INDEX) or folder_at(path).has(_MARK):
                raise
            raise CheckpointNotFoundError(
                f"load({path}): there are weights for Hugging Face, and nothing to resume from; give a step before it "
                "(checkpoint.load_step), or another checkpoint.folder, with this path as checkpoint.initial_load_path "
                "and checkpoint.initial_load_in_hf",
                str(path),
            ) from error

    # Finding checkpoints.

    def latest_step(self, folder: str) -> int:
        """Returns the newest step in ``folder`` that can be loaded, by the order of ``latest``; -1 if there is none.

        Collective: rank 0 looks, and tells the others. Half or damaged checkpoints are passed over, with a warning, and
        steps of higher numbers are named.
        """
        path = self._agreed(lambda: _newest(folder, self.config).path, folder)
        return -1 if path is None else step_of(path)

    def step_in_tiers(self, tiers: Tiers, step: int) -> str | None:
        """Returns the folder of ``step`` in ``tiers``, or for -1 of the newest one, from the nearest place that has it.

        None if there is no step yet. Collective: the machines tell one another what is in their memory, and on their
        disks at the near place, if each has one of its own; rank 0 looks, and tells the others.

        Raises:
            CheckpointNotFoundError: No place has ``step``. The message says which steps there are.
            CheckpointError: No place has a whole checkpoint, and one could not be looked at.
        """

        def look(run: Place) -> Newest:
            if step == -1:
                return _newest(str(run), tiers.config)
            paths = [path for number, path in _step_folders(str(run), tiers.config) if number == step]
            folders = [look_at_step(step, path) for path in paths]
            return Newest(next((each.path for each in folders if each is not None and _may_load(each)), None))

        found = one_look("load", tiers, "", self.config, self.group, look)
        for text in found.warnings:
            _logger.warning("%s", text)
        if found.path is None and step != -1:
            raise CheckpointNotFoundError(
                _no_such_step(step, [*map(str, tiers.places)], tiers.config), str(below(tiers.place, f"step-{step}"))
            )
        return found.path

    def _agreed(self, look: Callable[[], T], folder: str) -> T:
        """Returns what rank 0 sees."""
        if not _is_shared():
            return look()
        answer: list[Any] = [None]
        if dist.get_rank(self.group) == 0:
            try:
                answer = [look()]
            except (CheckpointError, OSError) as error:
                answer = [CheckpointError(f"looking for steps in {folder}: {error}", folder)]
        dist.broadcast_object_list(answer, group=self.group, group_src=0)
        if isinstance(answer[0], CheckpointError):
            raise answer[0]
        return cast(T, answer[0])

    def check_step(self, folder: str, step: int) -> None:
        """Checks that there is a checkpoint of ``step`` in ``folder``. Local.

        Raises:
            CheckpointNotFoundError: There is no checkpoint of that step. The message says which steps there are.
        """
        path = str(below(location(folder), f"step-{step}"))
        is_there = any(other == step for other, _ in _step_folders(folder, self.config))
        found = look_at_step(step, path) if is_there else None
        if found is None or not _may_load(found):
            raise CheckpointNotFoundError(_no_such_step(step, [folder], self.config), path)

    # Removing checkpoints.

    def remove_old(self, folder: str, keep_latest: int) -> None:
        """Removes complete checkpoints except the newest ``keep_latest``, and what dead saves left.

        Local; any thread may call it. A checkpoint that is being saved does not count yet.
        """
        Retention(folder, keep_latest=keep_latest, pattern=STEP_PATTERN, config=self.config).prune()

    def wait_for_copies(self) -> CheckpointError | None:
        """Waits for the durable copies of ``tiers``, unless training failed. Returns why one failed.

        What is not copied waits near by, and the next job goes on with it.
        """
        if sys.exc_info()[1] is not None:
            return None
        try:
            wait_for_drains(self.config.exit_timeout_s)
        except TimeoutError as error:
            return CheckpointError(str(error))
        except CheckpointError as error:
            return error
        return None

    def close(self) -> None:
        """Destroys the groups that our calls made. Local; no save or load may be under way."""
        if self.group is not None:
            destroy_own_groups(self.group)


def leaves(path: str) -> bool:
    """Whether saves and loads at ``path`` are left to torchtitan: a URL, unless obstore is there and knows its kind."""
    return is_url(path) and not can_open_url(path)


def wait_for(future: Future[Any] | None) -> BaseException | None:
    """Waits until the background save has ended, and returns its error; None if it did not fail."""
    return None if future is None else future.exception()


def raise_at_end(failed: BaseException | None) -> None:
    """Raises ``failed`` if it is an error. If another exception is being handled, it only logs ``failed``."""
    if failed is None:
        return
    if sys.exc_info()[1] is None:
        raise failed
    _logger.error("a background save failed, too: %s", failed)


def _is_shared() -> bool:
    """Whether there are other ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _step_folders(folder: str, config: Config | None) -> list[tuple[int, str]]:
    place = known(location(folder), config)
    return [] if folder_at(place).is_gone() else step_paths(place, STEP_PATTERN)


def _no_such_step(step: int, runs: Sequence[str], config: Config | None) -> str:
    """Says that a step is in none of the folders of a run, and what is there."""
    said = []
    for run in runs:
        folders = _step_folders(run, config)
        found = next((look_at_step(*each) for each in folders if each[0] == step), None)
        others = ", ".join(str(other) for other, _ in folders if other != step)
        there = f"there are steps {others}" if others else "there are none"
        said.append(f"{'it is not there' if found is None else found.summary()}; in {run} {there}")
    return (
        f"checkpoint.load_step={step}: {'; '.join(said)}. checkpoint.load_step=-1 takes the newest one that is complete"
    )


def step_of(path: str) -> int:
    """Returns the number of a step folder."""
    return int(path.rpartition("-")[2])


def _newest(folder: str, config: Config | None = None) -> Newest:
    order = commit_order(known(location(folder), config), _step_folders(folder, config))
    newest = None
    passed = []
    for each in (*order.steps, *order.unmarked):
        # What is not committed has no place in the order: it is named if its number is higher.
        if newest is not None and (each in order.steps or each[0] <= newest[0]):
            continue
        found = look_at_step(*each)
        if found is not None and _may_load(found):
            newest = each
        elif found is not None:
            passed.append(found)
    for found in sorted(passed, key=lambda folder: folder.step, reverse=True):
        _logger.warning("%s is passed over, an older step is looked for: %s", found.path, found.summary())
    if newest is None:
        return Newest(None)
    doubts = order.doubts_about(newest) if newest in order.steps else ""
    if doubts:
        _logger.warning("%s: %s", folder, doubts)
    return Newest(newest[1])


def _may_load(found: StepFolder) -> bool:
    """Whether a load of this folder is to be tried.

    If there is a commit mark that we cannot read, the answer is True: only a load can say why.
    """
    if found.is_complete or found.state != "unknown":
        return found.is_complete
    return folder_at(found.path).has(_MARK) or folder_at(found.path).has(_HF_INDEX)
