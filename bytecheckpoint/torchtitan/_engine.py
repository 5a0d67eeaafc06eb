# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint manager of torchtitan needs from us.

This module uses nothing of torchtitan. So a manager of another kind, such as the one of ``torch_checkpointing`` that
torchtitan plans, needs an adapter of its own, but no engine of its own.
"""

from __future__ import annotations

import logging
import re
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from bytecheckpoint.checkpoint.retention import Retention
from bytecheckpoint.checkpoint.steps import StepFolder, look_at_step
from bytecheckpoint.config import Config
from bytecheckpoint.distributed.groups import destroy_own_groups
from bytecheckpoint.errors import CheckpointError, CheckpointNotFoundError
from bytecheckpoint.report import SaveReport
from bytecheckpoint.state_dicts import async_save_state_dict, load_state_dict, save_state_dict
from bytecheckpoint.torchtitan._load_planner import ResumePlanner

__all__ = ["STEP_PATTERN", "Engine", "raise_at_end", "wait_for"]

# It must match the whole name of a folder. torchtitan searches for it anywhere, and takes "step-9.old" for step 9.
STEP_PATTERN = r"step-(\d+)"
_HF_INDEX = "model.safetensors.index.json"

_logger = logging.getLogger("bytecheckpoint")


class Engine:
    """Saves, loads, finds and removes checkpoints of a run. All paths are local directories.

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

    def load(self, path: str, state: dict[str, Any], states: tuple[str, ...]) -> None:
        """Loads into ``state``. Collective.

        Args:
            path: Directory of a checkpoint.
            state: State dict; its tensors are filled in place.
            states: Keys of ``state`` that are not parameters of the model; empty if only the model is loaded.

        Raises:
            CheckpointError: The load failed. The message says what is wrong, and what to do.
            CheckpointNotFoundError: There is no checkpoint.
        """
        planner = ResumePlanner(states)
        try:
            load_state_dict(path, state, process_group=self.group, planner=planner, config=self.config)
        except CheckpointNotFoundError as error:  # on all ranks
            if not Path(path, _HF_INDEX).exists():
                raise
            raise CheckpointNotFoundError(
                f"load({path}): there are weights for Hugging Face, and nothing to resume from; give a step before it "
                "(checkpoint.load_step), or another checkpoint.folder, with this path as checkpoint.initial_load_path "
                "and checkpoint.initial_load_in_hf",
                path,
            ) from error

    # Finding checkpoints.

    def latest_step(self, folder: str) -> int:
        """Returns the newest step in ``folder`` that can be loaded; -1 if there is none.

        Collective: rank 0 looks, and tells the others. Half or damaged checkpoints are passed over, with a warning.
        """
        if not _is_shared():
            return _latest_step(folder)
        answer: list[Any] = [None]
        if dist.get_rank(self.group) == 0:
            try:
                answer = [_latest_step(folder)]
            except (CheckpointError, OSError) as error:
                answer = [CheckpointError(f"looking for steps in {folder}: {error}", folder)]
        dist.broadcast_object_list(answer, group=self.group, group_src=0)
        if isinstance(answer[0], CheckpointError):
            raise answer[0]
        return int(answer[0])

    def check_step(self, folder: str, step: int) -> None:
        """Checks that there is a checkpoint of ``step`` in ``folder``. Local.

        Raises:
            CheckpointNotFoundError: There is no checkpoint of that step. The message says which steps there are.
        """
        path = Path(folder, f"step-{step}")
        found = look_at_step(step, str(path)) if path.is_dir() else None
        if found is not None and _may_load(found):
            return
        others = sorted(other for other, _ in _step_folders(folder) if other != step)
        why = "it is not there" if found is None else found.summary()
        there = f"there are steps {', '.join(map(str, others))}" if others else "there are none"
        raise CheckpointNotFoundError(
            f"checkpoint.load_step={step}: {why}; in {folder} {there}. checkpoint.load_step=-1 takes the newest one "
            "that is complete",
            str(path),
        )

    # Removing checkpoints.

    def remove_old(self, folder: str, keep_latest: int) -> None:
        """Removes complete checkpoints except the newest ``keep_latest``, and what dead saves left.

        Local; any thread may call it. A checkpoint that is being saved does not count yet.
        """
        Retention(folder, keep_latest=keep_latest, pattern=STEP_PATTERN).prune()

    def close(self) -> None:
        """Destroys the groups that our calls made. Local; no save or load may be under way."""
        if self.group is not None:
            destroy_own_groups(self.group)


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


def _step_folders(folder: str) -> list[tuple[int, Path]]:
    if not Path(folder).is_dir():
        return []
    matches = [(re.fullmatch(STEP_PATTERN, path.name), path) for path in Path(folder).iterdir() if path.is_dir()]
    return [(int(match[1]), path) for match, path in matches if match is not None]


def _latest_step(folder: str) -> int:
    for step, path in sorted(_step_folders(folder), reverse=True):
        found = look_at_step(step, str(path))
        if found is None:
            continue
        if _may_load(found):
            return step
        _logger.warning("%s is passed over, an older step is looked for: %s", path, found.summary())
    return -1


def _may_load(found: StepFolder) -> bool:
    """Whether a load of this folder is to be tried.

    If there is a commit mark that we cannot read, the answer is True: only a load can say why.
    """
    path = Path(found.path)
    has_mark = (path / ".metadata").exists() or (path / _HF_INDEX).exists()
    return found.is_complete or (found.state == "unknown" and has_mark)
