# SPDX-License-Identifier: Apache-2.0
"""torchtitan's manager on our engine: save and resume in every mode and layout, and exchange with its own manager."""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.ranks import run_ranks
from support.titan import Job, Layout, digests, same

from bytecheckpoint.errors import CheckpointNotFoundError, ConfigError
from bytecheckpoint.storage.memory.connection import stop_holder
from frameworks.titan_marks import needs_trainer

MODES = ("disabled", "async", "async_with_pinned_mem")
pytest.importorskip("torchtitan", reason="torchtitan is not installed: ITS ADAPTER IS NOT TESTED")
pytestmark = [needs_trainer, pytest.mark.usefixtures("ranks_with_torchtitan")]


def _ours(**fields: Any) -> Any:
    from bytecheckpoint.torchtitan import BcpCheckpointManager

    return BcpCheckpointManager.Config(enable=True, folder="run", interval=2, **fields)


def _theirs(**fields: Any) -> Any:
    from torchtitan.components.checkpointer import CheckpointManager

    return CheckpointManager.Config(enable=True, folder="run", interval=2, **fields)


def _train_and_resume(folder: str, mode: str) -> None:
    from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

    job = Job()
    before = set(threading.enumerate())
    manager = job.manager(_ours(async_mode=mode, keep_latest_k=0), folder)
    returned: list[Any] = []
    dcp_save = manager.dcp_save
    manager.dcp_save = lambda *args, **kwargs: returned.append(dcp_save(*args, **kwargs)) or returned[-1]
    losses, states = [], {}
    for step in range(1, 7):
        losses.append(job.step(manager))
        states[step] = job.state()
        assert manager.save(step) == (step % 2 == 0)
        if step % 2 == 0:
            assert (manager.save_future is None) == (mode == "disabled")
            assert (manager.staging_future is None) == (mode != "async_with_pinned_mem")
    manager.maybe_wait_for_staging()
    assert manager.staging_future is None
    manager.close()
    kinds = {"disabled": type(None), "async": Future, "async_with_pinned_mem": AsyncSaveResponse}
    assert len(returned) == 3
    assert all(isinstance(value, kinds[mode]) for value in returned)
    stays = ("bytecheckpoint-background", "bytecheckpoint-wait")
    left = {thread for thread in threading.enumerate() if not thread.name.startswith(stays)} - before
    for thread in left:
        thread.join(10)  # the thread that watched the last save ends within a moment
    assert not any(thread.is_alive() for thread in left), left

    resumed = Job(seed=1)
    manager = resumed.manager(_ours(async_mode=mode, keep_latest_k=0), folder)
    assert manager.load(step=2)
    resumed.resume()
    same(resumed.state(), states[2])
    assert [resumed.step(manager) for _ in range(2)] == losses[2:4]
    same(resumed.state(), states[4])
    assert manager.load()
    same(resumed.state(), states[6])
    manager.close()


def _train_and_resume_in_all_modes(folder: str) -> None:
    for mode in MODES:
        _train_and_resume(f"{folder}/{mode}", mode)


def test_what_is_resumed_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    """Losses and states equal those of the uninterrupted run, although the state changes while it is saved."""
    run_ranks(2, _train_and_resume_in_all_modes, str(tmp_path), limit_s=200)


def _lose_the_near_place(folder: str) -> None:
    """The manager's folder is the near place, or the durable one; either way the durable copy is resumed from."""
    for name in ("durable", "near"):
        base, other = Path(folder, name), Path(folder, f"other-{name}")
        options = {"tiers": {name: str(other)}}
        job = Job()
        manager = job.manager(_ours(engine=options, async_mode="async", keep_latest_k=2), base)
        for step in range(1, 7):
            job.step(manager)
            manager.save(step)
        manager.close()  # rank 0 waits for its copies
        dist.barrier()
        near, durable = (base / "run", other) if name == "durable" else (other, base / "run")
        assert {"step-4", "step-6"} <= {path.name for path in near.iterdir()}  # what waited was pinned
        assert {"step-6"} < {path.name for path in durable.iterdir()} <= {"step-2", "step-4", "step-6"}
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(near)
        dist.barrier()
        for step in (-1, 4):
            resumed = Job(seed=1)
            manager = resumed.manager(_ours(engine=options), base)
            assert manager.load(step=step)
            assert resumed.train_state.step == (6 if step == -1 else step)
            if step == -1:
                same(resumed.state(), job.state())
            manager.close()
        with pytest.raises(CheckpointNotFoundError, match="load_step=9"):
            resumed.manager(_ours(engine=options), base).load(step=9)


def test_tiers(tmp_path: Path) -> None:
    run_ranks(2, _lose_the_near_place, str(tmp_path), limit_s=120)


def _resume_from_memory(folder: str) -> tuple[str, str]:
    options = {"tiers": {"memory": {"keep": 1}}}
    job = Job()
    manager = job.manager(_ours(engine=options, async_mode="async"), folder)
    for step in range(1, 5):
        job.step(manager)
        manager.save(step)
    manager.maybe_wait_for_saving()
    resumed = Job(seed=1)
    again = resumed.manager(_ours(engine=options), folder)
    assert again.load()
    assert again._loaded is not None
    path = again._loaded.path
    same(resumed.state(), job.state())
    dist.barrier()
    manager.close()
    again.close()
    with pytest.raises(ConfigError, match="would not find those in memory alone"):
        job.manager(_ours(engine={"tiers": {"memory": {}, "near_every": 2}}), folder)
    return path, again._tiers.in_memory


def test_memory(tmp_path: Path) -> None:
    for path, in_memory in run_ranks(2, _resume_from_memory, str(tmp_path), limit_s=120):
        assert path == f"{in_memory}/step-4"
        stop_holder(in_memory.rpartition("/")[2])


def _save_as(folder: str, layout: Layout) -> dict[str, str]:
    job = Job(layout)
    manager = job.manager(_ours(), folder)
    for _ in range(2):
        job.step(manager)
    manager.save(2)
    manager.close()
    return digests(job.state())


def _load_as(folder: str, layouts: list[tuple[Layout, list[str]]]) -> list[dict[str, str]]:
    loaded = []
    for layout, exclude in layouts:
        job = Job(layout, seed=1)
        manager = job.manager(_ours(exclude_from_loading=exclude), folder)
        assert manager.load()
        manager.close()
        loaded.append(digests(job.state()))
    return loaded


def test_another_number_of_ranks_and_another_layout_load_the_same(tmp_path: Path) -> None:
    saved = run_ranks(4, _save_as, str(tmp_path), Layout(tensor=2), limit_s=120)
    assert all(of_rank == saved[0] for of_rank in saved)
    layouts = [(Layout(), []), (Layout(replicate=2), []), (Layout(tensor=2), ["dataloader"])]
    for of_rank in run_ranks(2, _load_as, str(tmp_path), layouts, limit_s=120):
        assert of_rank == [saved[0]] * 3


def _save_stages(folder: str) -> dict[str, str]:
    job = Job(Layout(pipeline=2))
    assert len(job.model_parts) == 2
    manager = job.manager(_ours(async_mode="async"), folder)
    for _ in range(2):
        job.step_without_loss()
    manager.save(2)
    manager.close()
    again = Job(Layout(pipeline=2), seed=1)
    manager = again.manager(_ours(), folder)
    assert manager.load()
    manager.close()
    same(again.state(), job.state())
    return digests(job.state())


def test_stages_of_a_pipeline_load_as_one_model(tmp_path: Path) -> None:
    """Each rank has two of the model's four parts, and its own optimizers."""
    saved = run_ranks(2, _save_stages, str(tmp_path), limit_s=120)
    [whole, _] = (
        of_rank[0] for of_rank in run_ranks(2, _load_as, str(tmp_path), [(Layout(), ["dataloader"])], limit_s=120)
    )
    assert not {name for name in saved[0].keys() & saved[1].keys() if name.startswith(("model", "optimizer"))}
    together = {**saved[0], **saved[1]}
    assert together.pop("rates") != whole.pop("rates")  # two optimizers on each rank have more rates than one
    assert together == whole


def _both_directions(folder: str) -> None:
    for mode, save, load in (
        ("disabled", _theirs, _ours),
        ("async", _theirs, _ours),
        *((mode, _ours, _theirs) for mode in MODES),
    ):
        path = f"{folder}/{save.__name__}-{mode}"
        job = Job()
        manager = job.manager(save(async_mode=mode), path)
        for step in (1, 2):
            job.step(manager)
            manager.save(step)
        saved = job.state()
        manager.maybe_wait_for_staging()
        manager.maybe_wait_for_saving()
        manager.close()
        other = Job(seed=1)
        manager = other.manager(load(), path)
        assert manager.load()
        other.resume()
        same(other.state(), saved)
        assert other.step() == job.step()
        manager.close()


def test_checkpoints_of_their_own_manager_load_and_ours_load_there(tmp_path: Path) -> None:
    run_ranks(2, _both_directions, str(tmp_path), limit_s=120)
