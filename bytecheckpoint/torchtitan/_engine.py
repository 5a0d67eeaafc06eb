# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint manager of torchtitan asks of us. Knows nothing of torchtitan: a manager of another kind, such as
the one of ``torch_checkpointing`` that torchtitan plans, needs an adapter of its own and not an engine of its own.
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

from bytecheckpoint.config import Config
from bytecheckpoint.dcp._groups import destroy_own_groups
from bytecheckpoint.errors import CheckpointError, CheckpointNotFoundError
from bytecheckpoint.report import SaveReport
from bytecheckpoint.retention import Retention
from bytecheckpoint.state_dicts import async_save_state_dict, load_state_dict, save_state_dict
from bytecheckpoint.steps import StepFolder, look_at_step
from bytecheckpoint.torchtitan._load_planner import ResumePlanner

__all__ = ["STEP_PATTERN", "Engine", "raise_at_end", "wait_for"]

# The whole name of a folder. torchtitan searches for it anywhere in a name, and takes "step-9.old" for step 9.
STEP_PATTERN = r"step-(\d+)"
_HF_INDEX = "model.safetensors.index.json"

_logger = logging.getLogger("bytecheckpoint")


class Engine:
    """Saves, loads, finds and removes checkpoints of a run. Paths are of local directories.

    Args:
        config: Settings.
        group: Of the ranks that save and load together; it must have gloo for host memory. None makes one of all ranks,
            as the default group may have none: collective. What we exchange goes over groups of the same ranks, made
            with the first call, which ``close`` destroys. This one stays, as torchtitan's own does: a rank may be at
            the end while others still connect to it.
    """

    def __init__(self, config: Config, group: dist.ProcessGroup | None) -> None:
        self.config = config
        made: Any = dist.new_group(backend="gloo") if group is None and _is_shared() else group
        self.group: dist.ProcessGroup | None = made

    # Saving.

    def save(self, path: str, state: dict[str, Any]) -> SaveReport:
        """Saves and returns when it is durable. Collective."""
        return save_state_dict(path, state, process_group=self.group, config=self.config)

    def save_async(self, path: str, state: dict[str, Any]) -> Future[Any]:
        """A future of the save; the state may change when this returns. Collective."""
        response = self.save_overlapped(path, state)
        response.staging_completion.result()
        return response.upload_completion

    def save_overlapped(self, path: str, state: dict[str, Any]) -> AsyncSaveResponse:
        """As ``save_async``, but tensors on devices may change only when ``staging_completion`` is done. Collective.

        A thread of this process saves: its C++ does not hold the GIL, and a process of its own would need the state in
        memory that both map, which page-locked memory is not.
        """
        handle = async_save_state_dict(path, state, process_group=self.group, config=self.config)
        return AsyncSaveResponse(staging_completion=handle.staged, upload_completion=cast(Any, handle.committed))

    # Loading.

    def load(self, path: str, state: dict[str, Any], states: tuple[str, ...]) -> None:
        """Loads into ``state``. Collective.

        Args:
            states: Keys of ``state`` that are no parameter of the model. None are there if the model is loaded alone.

        Raises:
            CheckpointError: What is wrong, and what to do.
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

    # Which there are.

    def latest_step(self, folder: str) -> int:
        """The newest step in ``folder`` that can be loaded, -1 if there is none. Collective: rank 0 looks.

        What was left half or is damaged is passed over, with a warning.
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
        """Local.

        Raises:
            CheckpointNotFoundError: There is no checkpoint of that step; says which there are.
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

    # Which go.

    def remove_old(self, folder: str, keep_latest: int) -> None:
        """Removes complete checkpoints but the newest ``keep_latest``, and half ones that are dead. Local, any thread.

        A checkpoint that is being saved does not count yet.
        """
        Retention(folder, keep_latest=keep_latest, pattern=STEP_PATTERN).prune()

    def close(self) -> None:
        """Destroys the groups that were made. Local; no save or load may be under way."""
        if self.group is not None:
            destroy_own_groups(self.group)


def wait_for(future: Future[Any] | None) -> BaseException | None:
    """What the background save has failed with that nobody has waited for, when it has ended. None if it has not."""
    return None if future is None else future.exception()


def raise_at_end(failed: BaseException | None) -> None:
    """Raises ``failed``, if it is an error. While another is handled it is logged, and does not hide that."""
    if failed is None:
        return
    if sys.exc_info()[1] is None:
        raise failed
    _logger.error("a background save failed, too: %s", failed)


def _is_shared() -> bool:
    """Are there other ranks?"""
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
    """Shall it be tried? What has a mark that we cannot read has reasons that only a load can tell."""
    path = Path(found.path)
    has_mark = (path / ".metadata").exists() or (path / _HF_INDEX).exists()
    return found.is_complete or (found.state == "unknown" and has_mark)
