# SPDX-License-Identifier: Apache-2.0
"""Which checkpoints are saved, kept and loaded, and in what form, for each setting of torchtitan with our manager."""

from __future__ import annotations

import filecmp
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from support.titan import Job, same

import bytecheckpoint
from frameworks.titan_marks import needs_trainer

pytest.importorskip("torchtitan", reason="torchtitan is not installed: ITS ADAPTER IS NOT TESTED")
pytestmark = [needs_trainer, pytest.mark.usefixtures("ranks_with_torchtitan")]


def _ours(**fields: Any) -> Any:
    from bytecheckpoint.torchtitan import BcpCheckpointManager

    return BcpCheckpointManager.Config(**{"enable": True, "folder": "run", "interval": 1, **fields})


def _theirs(**fields: Any) -> Any:
    from torchtitan.components.checkpointer import CheckpointManager

    return CheckpointManager.Config(**{"enable": True, "folder": "run", "interval": 1, **fields})


def _same_model(left: Job, right: Job) -> list[bool]:
    a, b = left.state(), right.state()
    return [torch.equal(a[name], b[name]) for name in a if name.startswith("model.")]


def _complete(folder: str) -> list[int]:
    return [found.step for found in bytecheckpoint.scan_steps(f"{folder}/run") if found.is_complete]


def _last_steps(folder: str) -> None:
    job = Job()
    job.step()
    model = {name: value for part in job.model_parts for name, value in part.state_dict().items()}
    # The last save is never in the background, whatever the mode, and waits for the save before it.
    manager = job.manager(_ours(async_mode="async", export_dtype="bfloat16"), folder)
    assert manager.save(1)
    assert manager.save_future is not None
    assert manager.save(2, last_step=True)
    assert manager.save_future is None
    assert _complete(folder) == [1, 2]
    manager.close()
    names = {
        name
        for name, *_ in bytecheckpoint.BcpReader(f"{folder}/run/step-2").read_metadata().state_dict_metadata.items()
    }
    assert names == set(model)
    halves = {name: torch.zeros_like(value, dtype=torch.bfloat16) for name, value in model.items()}
    torch.distributed.checkpoint.load(halves, checkpoint_id=f"{folder}/run/step-2")  # loads with stock DCP
    same(halves, {name: value.to(torch.bfloat16) for name, value in model.items()})
    # A last checkpoint with all states can be resumed.
    manager = job.manager(_ours(last_save_model_only=False), f"{folder}/whole")
    assert manager.save(7, last_step=True)
    manager.close()
    other = Job(seed=1)
    manager = other.manager(_ours(), f"{folder}/whole")
    assert manager.load()
    other.resume()
    same(other.state(), job.state())
    manager.close()
    # Weights alone can start another run.
    fresh = Job(seed=2)
    before = fresh.state()
    manager = fresh.manager(_ours(initial_load_path=f"{folder}/run/step-2"), f"{folder}/other")
    assert manager.load()
    manager.close()
    after = fresh.state()
    same(after, before, without=("model",))
    for name, value in model.items():
        assert torch.equal(after[f"model.{name}"], value.full_tensor().bfloat16().float()), name
    _hugging_face(folder, job)


def _hugging_face(folder: str, job: Job) -> None:
    for config, name in ((_ours, "ours"), (_theirs, "theirs")):
        manager = job.manager(config(last_save_in_hf=True, async_mode="async"), f"{folder}/hf-{name}")
        assert manager.save(3, last_step=True)
        manager.close()
    dist.barrier()
    ours, theirs = Path(folder, "hf-ours/run/step-3"), Path(folder, "hf-theirs/run/step-3")
    files = {path.name for path in theirs.rglob("*.safetensors")}
    assert files
    compared = filecmp.cmpfiles(
        ours, theirs, sorted(path.name for path in theirs.iterdir() if path.is_file()), shallow=False
    )
    assert compared[1:] == ([], [])
    other = Job(seed=1)
    manager = other.manager(_ours(initial_load_path=str(ours), initial_load_in_hf=True), f"{folder}/from-hf")
    assert manager.load()
    manager.close()
    same(other.state(), job.state(), without=("optimizer", "lr_scheduler", "train_state", "dataloader", "rates"))
    # A training job cannot resume from it.
    Path(ours, "model.safetensors.index.json").touch()
    manager = other.manager(_ours(), f"{folder}/hf-ours")
    with pytest.raises(bytecheckpoint.CheckpointError, match="initial_load_in_hf"):
        manager.load()
    manager.close()


def test_last_steps(tmp_path: Path) -> None:
    """The last save holds only the model, in another dtype, all states, or Hugging Face weights.

    Another run starts from it.
    """
    run_ranks(2, _last_steps, str(tmp_path), limit_s=150)


def _retention(folder: str) -> None:
    job = Job()
    for step, content in ((1, b""), (3, b"no metadata")):  # a save that died, and a damaged one
        path = Path(folder, "run", f"step-{step}")
        path.mkdir(parents=True, exist_ok=True)
        if content:
            (path / ".metadata").write_bytes(content)
    manager = job.manager(_theirs(keep_latest_k=0), folder)
    manager.save(2)
    manager.close()
    manager = job.manager(_ours(keep_latest_k=2, async_mode="async"), folder)
    for step in (4, 5, 6, 7):
        assert manager.save(step)
    manager.maybe_wait_for_saving()
    if dist.get_rank() == 0:
        Path(folder, "run", "step-8").write_bytes(b"in the way")
    dist.barrier()
    assert manager.save(8)
    with pytest.raises(bytecheckpoint.CheckpointError):
        manager.maybe_wait_for_saving()
    manager.save_future = None  # a job that continues despite the failure
    manager.close()
    # The failed save does not count as one of the two. torchtitan's manager counts by name, and would have kept only 7.
    dist.barrier()
    if dist.get_rank() == 0:
        assert _complete(folder) == [6, 7]
        assert not Path(folder, "run", "step-1").exists()
        assert Path(folder, "run", "step-3").exists()
    assert "purge" not in " ".join(thread.name for thread in threading.enumerate())
    dist.barrier()
    # A save that was not complete when the others were counted is complete at the end.
    for mode in ("async", "async_with_pinned_mem"):
        manager = job.manager(_ours(keep_latest_k=2, async_mode=mode), f"{folder}/{mode}")
        for step in (1, 2, 3):
            manager.save(step)
        manager.close()
        dist.barrier()
        assert _complete(f"{folder}/{mode}") == [2, 3]
    # 0 keeps all checkpoints.
    manager = job.manager(_ours(keep_latest_k=0), f"{folder}/all")
    for step in range(1, 5):
        manager.save(step)
    manager.close()
    assert _complete(f"{folder}/all") == [1, 2, 3, 4]


def test_as_many_complete_ones_are_kept_as_were_asked_for(tmp_path: Path) -> None:
    run_ranks(2, _retention, str(tmp_path), limit_s=120)


def _choices(folder: str) -> None:
    job = Job()
    manager = job.manager(_ours(interval=2, enable_first_step_checkpoint=True, engine={"io_threads": 3}), folder)
    assert manager._engine.config == bytecheckpoint.Config(io_threads=3)
    assert manager.load() is False
    assert [step for step in range(1, 6) if manager.save(step)] == [1, 2, 4]
    manager.close()
    # Folders that look like steps but are not.
    if dist.get_rank() == 0:
        Path(folder, "run", "step-9").mkdir()
        Path(folder, "run", "step-11.old").mkdir()
        Path(folder, "run", "step-11.old", ".metadata").write_bytes(b"")
    dist.barrier()
    other = Job(seed=1)
    before = other.state()
    manager = other.manager(_ours(exclude_from_loading=["optimizer", "lr_scheduler", "dataloader"]), folder)
    assert manager.load()
    after = other.state()
    same(after, before, without=("model", "train_state"))
    same(after, job.state(), without=("optimizer", "lr_scheduler", "dataloader", "rates"))
    manager.close()
    reader = job.manager(_ours(load_only=True), f"{folder}/none")
    assert reader.save(2, last_step=True) is False
    reader.close()
    disabled = job.manager(_ours(enable=False), folder)
    assert disabled.save(2) is False
    assert disabled.load() is False
    disabled.close()
    # torchtitan's own code handles URLs completely.
    for mode in ("disabled", "async"):
        url = f"file://{folder}/url-{mode}"
        manager = job.manager(_ours(folder=url, async_mode=mode, keep_latest_k=2), "")
        for step in (1, 2, 3):
            manager.save(step)
        manager.maybe_wait_for_saving()
        manager.close()
        dist.barrier()
        assert not list(Path(folder, f"url-{mode}").rglob("*_0.????????????????.distcp"))
        manager = other.manager(_ours(folder=url), "")
        assert manager.load()
        other.resume()
        same(other.state(), job.state())
        manager.close()
        # Weights go from a directory into a run at a URL, and the other way round.
        for source, target in ((f"{folder}/run/step-4", f"{url}-b"), (f"{url}/step-3", "b")):
            fresh = Job(seed=3)
            manager = fresh.manager(_ours(folder=target, initial_load_path=source), f"{folder}/fresh")
            assert manager.load()
            manager.close()
            assert all(_same_model(fresh, job))


def test_which_steps_are_saved_and_loaded(tmp_path: Path) -> None:
    run_ranks(2, _choices, str(tmp_path), limit_s=120)


def _seed(folder: str) -> None:
    job = Job()
    manager = job.manager(_ours(create_seed_checkpoint=True), folder)
    assert manager.save(0, last_step=True)
    manager.close()


def _from_seed(folder: str) -> None:
    job = Job(seed=1)
    before = job.state()
    manager = job.manager(_ours(), folder)
    assert manager.load()
    manager.close()
    same(job.state(), before, without=("model",))
    model = {name: value for part in job.model_parts for name, value in part.state_dict().items()}
    seed = {name: torch.zeros(value.shape) for name, value in model.items()}
    torch.distributed.checkpoint.load(seed, checkpoint_id=f"{folder}/run/step-0")
    same({name: value.full_tensor() for name, value in model.items()}, seed)


def test_a_seed_checkpoint_gives_the_model_alone(tmp_path: Path) -> None:
    run_ranks(1, _seed, str(tmp_path), limit_s=120)
    run_ranks(2, _from_seed, str(tmp_path), limit_s=120)
