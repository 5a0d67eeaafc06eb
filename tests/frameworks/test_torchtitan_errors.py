# SPDX-License-Identifier: Apache-2.0
"""Mistakes that users of our torchtitan manager may make, and the messages that they get."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from support.titan import Job, Layout, same

import bytecheckpoint
from bytecheckpoint.errors import CheckpointNotFoundError, KeyMismatchError, ShapeMismatchError
from frameworks.titan_marks import needs_trainer

pytest.importorskip("torchtitan", reason="torchtitan is not installed: ITS ADAPTER IS NOT TESTED")
pytestmark = [needs_trainer, pytest.mark.usefixtures("ranks_with_torchtitan")]


class Said(logging.Handler):
    """Collects the warnings of our logger."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        logging.getLogger("bytecheckpoint").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _ours(**fields: Any) -> Any:
    from bytecheckpoint.torchtitan import BcpCheckpointManager

    return BcpCheckpointManager.Config(**{"enable": True, "folder": "run", "interval": 1, **fields})


def _load(job: Job, folder: str, step: int = -1, **fields: Any) -> bool:
    manager = job.manager(_ours(**fields), folder)
    try:
        return bool(manager.load(step))
    finally:
        manager.close()


def _save(job: Job, folder: str, *steps: int, **fields: Any) -> None:
    manager = job.manager(_ours(**fields), folder)
    for step in steps:
        manager.save(step)
    manager.close()


def _loads_that_fail(folder: str) -> None:
    job = Job()
    job.step()
    _save(job, f"{folder}/a", 1, 2)
    with pytest.raises(CheckpointNotFoundError, match=r"load_step=7: it is not there; .* there are steps 1, 2\. "):
        _load(job, f"{folder}/a", step=7)
    with pytest.raises(CheckpointNotFoundError, match=r"load_step=7: .* there are none"):
        _load(job, f"{folder}/nothing", step=7)
    # The last checkpoint of a run holds only the model.
    manager = job.manager(_ours(), f"{folder}/last")
    manager.save(1)
    manager.save(2, last_step=True)
    manager.close()
    with pytest.raises(KeyMismatchError, match=r"model alone.*checkpoint\.load_step.*checkpoint\.initial_load_path"):
        _load(job, f"{folder}/last")
    assert _load(job, f"{folder}/last", step=1)
    # The checkpoint lacks a state.
    state = job.manager(_ours(), folder)._flattened_model_states_sd()
    del state["lr_scheduler"]
    torch.distributed.checkpoint.save(state, checkpoint_id=f"{folder}/without/run/step-1")
    with pytest.raises(KeyMismatchError, match=r'checkpoint\.exclude_from_loading=\["lr_scheduler"\]'):
        _load(job, f"{folder}/without")
    assert _load(job, f"{folder}/without", exclude_from_loading=["lr_scheduler"])
    # Another model.
    (path := Path(folder, "smaller/run/step-1")).parent.mkdir(parents=True, exist_ok=True)
    state = job.manager(_ours(), folder)._flattened_model_states_sd()
    del state["norm.weight"]
    torch.distributed.checkpoint.save(state, checkpoint_id=path)
    with pytest.raises(KeyMismatchError, match=r"norm\.weight.*another model"):
        _load(job, f"{folder}/smaller")
    # Another dtype.
    other = Job(dtype="bfloat16")
    with pytest.raises(
        ShapeMismatchError, match=r"is float32 in the checkpoint and bfloat16 in the model.*training\.dtype"
    ):
        _load(other, f"{folder}/a")
    said = Said()
    assert _load(other, f"{folder}/b", initial_load_path=f"{folder}/a/run/step-2")
    assert any("values are converted" in line for line in said.lines)
    for name, value in other.model_parts[0].state_dict().items():
        wanted = job.model_parts[0].state_dict()[name].full_tensor().bfloat16()
        assert torch.equal(value.full_tensor(), wanted), name


def test_loads_that_fail_say_what_to_do(tmp_path: Path) -> None:
    run_ranks(2, _loads_that_fail, str(tmp_path), limit_s=150)


def _data_ranks(folder: str) -> None:
    _save(Job(Layout(tensor=2)), folder, 1)
    job = Job(Layout(tensor=2), seed=1)
    with pytest.raises(KeyMismatchError, match=r'number of data ranks.*exclude_from_loading=\["dataloader"\]'):
        _load(Job(seed=1), folder)
    _save(Job(), f"{folder}/two", 1)
    with pytest.raises(
        bytecheckpoint.CheckpointError, match=r'number of data ranks.*exclude_from_loading=\["dataloader"\]'
    ):
        _load(job, f"{folder}/two")
    assert _load(job, f"{folder}/two", exclude_from_loading=["dataloader"])


def test_another_number_of_data_ranks_is_told_how_to_go_on(tmp_path: Path) -> None:
    run_ranks(2, _data_ranks, str(tmp_path), limit_s=100)


def _damage(folder: str) -> None:
    job = Job()
    job.step()
    _save(job, folder, 1, 2, 3, 4)
    wanted = job.state()
    if dist.get_rank() == 0:
        Path(folder, "run/step-4/.metadata").unlink()
        data = next(Path(folder, "run/step-3").glob("*.distcp"))
        data.write_bytes(data.read_bytes()[:-1])
    dist.barrier()
    other = Job(seed=1)
    said = Said()
    assert _load(other, folder)
    assert other.train_state.step == 1
    same(other.state(), wanted)
    if dist.get_rank() == 0:
        passed = [line for line in said.lines if "passed over" in line]
        assert len(passed) == 2
        assert "step-4: half" in passed[0]
        assert "step-3: corrupt" in passed[1]
    with pytest.raises(CheckpointNotFoundError, match="load_step=3: step-3: corrupt"):
        _load(other, folder, step=3)


def test_what_is_half_or_damaged_is_passed_over_with_a_warning(tmp_path: Path) -> None:
    run_ranks(2, _damage, str(tmp_path), limit_s=100)


def _failed_saves(folder: str) -> None:
    job = Job()
    if dist.get_rank() == 0:
        Path(folder, "run").mkdir()
        for step in range(1, 9):
            Path(folder, "run", f"step-{step}").write_bytes(b"in the way")
    dist.barrier()
    for mode in ("async", "async_with_pinned_mem"):
        manager = job.manager(_ours(async_mode=mode), folder)
        manager.save(1)
        with pytest.raises(bytecheckpoint.CheckpointError, match="step-1"):
            manager.save(2)
        with pytest.raises(bytecheckpoint.CheckpointError, match="step-1"):
            manager.close()
        manager.close()
        manager = job.manager(_ours(async_mode=mode), folder)
        manager.save(3)
        manager.maybe_wait_for_staging()
        with pytest.raises(bytecheckpoint.CheckpointError, match="step-3"):
            manager.save(4, last_step=True)
        said = Said()
        with pytest.raises(ZeroDivisionError):
            _end_with(ZeroDivisionError("of the job"), manager)
        assert any("background save failed, too" in line and "step-3" in line for line in said.lines)
    manager = job.manager(_ours(), folder)
    with pytest.raises(bytecheckpoint.CheckpointError, match="step-5"):
        manager.save(5)
    manager.close()


def _end_with(error: Exception, manager: Any) -> None:
    """Ends the manager while an error propagates, as torchtitan's train.py does."""
    try:
        raise error
    except Exception:
        manager.close()
        raise


def test_a_save_that_failed_in_the_background_is_raised(tmp_path: Path) -> None:
    """The next save, the last save or ``close`` raises the failure on all ranks.

    It never replaces the job's own error.
    """
    run_ranks(2, _failed_saves, str(tmp_path), limit_s=100)
