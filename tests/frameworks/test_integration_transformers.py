# SPDX-License-Identifier: Apache-2.0
"""The callback for transformers' Trainer: a run that was killed goes on bit for bit, and no failed save is lost."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.equality import assert_equal
from support.ranks import RanksFailed, forked_with, run_ranks

import bytecheckpoint
from bytecheckpoint.errors import CheckpointError, CheckpointNotFoundError, ConfigError, UnsupportedError
from frameworks.launched import as_launched, block_commit, die, whole

pytest.importorskip("transformers", reason="transformers is not installed: ITS CALLBACK IS NOT TESTED")
pytestmark = pytest.mark.usefixtures("ranks_that_have_it", "all_is_saved")


@pytest.fixture(scope="module")
def ranks_that_have_it() -> Iterator[None]:
    """Forks the module's ranks from a process that has imported the framework, because that takes seconds."""
    with forked_with("transformers.trainer"):
        yield


STEPS, ROWS = 12, 64  # two ranks with four rows each: an epoch has eight steps


def trainer_in(folder: Path, seed: int, callbacks: list[Any], **settings: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    torch.manual_seed(seed)
    tokens = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(n_positions=8, n_embd=16, n_layer=1, n_head=2, **tokens))
    rows = torch.randint(0, 64, (ROWS, 8), generator=torch.Generator().manual_seed(0))
    arguments = TrainingArguments(
        **{
            **{"output_dir": str(folder), "use_cpu": True, "max_steps": STEPS, "per_device_train_batch_size": 4},
            **{"save_steps": 2, "logging_steps": 1, "report_to": "none", "disable_tqdm": True, "log_level": "error"},
            **{"ddp_find_unused_parameters": False, **settings},
        }
    )
    data = [{"input_ids": row, "labels": row} for row in rows]
    return Trainer(model, arguments, train_dataset=data, eval_dataset=data[:4], callbacks=callbacks)


def when(event: str, step: int, act: Callable[[], None]) -> Any:
    """Returns a callback of Trainer that acts once."""
    from transformers import TrainerCallback

    def acting(self: Any, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == step:
            act()

    return type("When", (TrainerCallback,), {event: acting})()


def checkpoint_callback() -> Any:
    from bytecheckpoint.integrations.transformers import CheckpointCallback

    return CheckpointCallback()


def losses_of(trainer: Any) -> dict[int, float]:
    return {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}


def state_of(trainer: Any) -> dict[str, Any]:
    return whole({"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()})


def _train(folder: Path, dies_at: int | None = None) -> tuple[dict[int, float], dict[str, Any]]:
    as_launched()
    others = [] if dies_at is None else [when("on_save", dies_at, die)]  # with the save under way
    trainer = trainer_in(folder, 0, [checkpoint_callback(), *others])
    trainer.train()
    return losses_of(trainer), state_of(trainer)


def _resume(folder: Path) -> tuple[dict[int, float], dict[str, Any], dict[str, Any]]:
    as_launched()
    ours, loaded = checkpoint_callback(), []
    trainer = trainer_in(folder, 1, [ours, when("on_train_begin", 6, lambda: loaded.append(state_of(trainer)))])
    trainer.train(resume_from_checkpoint=ours.latest(folder))
    return losses_of(trainer), state_of(trainer), loaded[0] if loaded else {}


@pytest.mark.parametrize("dies_at", [6, 8], ids=["within_an_epoch", "at_its_end"])
def test_a_killed_run_goes_on_bit_for_bit(dies_at: int, tmp_path: Path) -> None:
    """Both ranks are killed while they save. What was not committed is not resumed from, or it is if it was."""
    whole_run = run_ranks(2, _train, tmp_path / "whole", limit_s=120)
    with pytest.raises(RanksFailed):
        run_ranks(2, _train, tmp_path / "killed", dies_at, limit_s=120)
    newest = bytecheckpoint.latest(tmp_path / "killed")
    assert newest is not None
    assert int(newest.rpartition("-")[2]) in (dies_at - 2, dies_at)

    resumed = run_ranks(2, _resume, tmp_path / "killed", limit_s=120)

    for (losses, state), (losses_again, state_again, _) in zip(whole_run, resumed, strict=True):
        assert losses_again == losses
        assert_equal(state_again, state)
    complete = [each.step for each in bytecheckpoint.scan_steps(tmp_path / "killed") if each.is_complete]
    assert complete == [2, 4, 6, 8, 10, 12]


def test_what_two_ranks_saved_loads_on_one(tmp_path: Path) -> None:
    """Weights and optimizer are those of step 6, bit for bit, also with the newest one left half."""
    whole_run = run_ranks(2, _train, tmp_path, limit_s=120)
    for step in (8, 10, 12):  # what kills leave: Trainer's own files, and no commit
        (tmp_path / f"checkpoint-{step}" / ".metadata").unlink()
    wanted = bytecheckpoint.read(tmp_path / "checkpoint-6")

    ((_, _, loaded),) = run_ranks(1, _resume, tmp_path, limit_s=120)

    assert whole_run
    for name, value in loaded["model"].items():
        assert torch.equal(value, wanted[f"model.{name}"]), name
    moments = [state["exp_avg"] for state in loaded["optimizer"]["state"].values()]
    stored = [value for name, value in wanted.items() if name.endswith(".exp_avg")]
    assert len(moments) == len(stored) > 0
    assert {moment.double().sum().item() for moment in moments} == {value.double().sum().item() for value in stored}


def _train_with_failing_save(folder: Path) -> int:
    as_launched()
    trainer = trainer_in(folder, 0, [when("on_step_end", 6, lambda: block_commit(folder / "checkpoint-6"))])
    trainer.add_callback(checkpoint_callback())
    with pytest.raises(CheckpointError):
        trainer.train()
    return int(trainer.state.global_step)


def test_a_failed_save_ends_the_training(tmp_path: Path) -> None:
    """On all ranks, at the next save. The checkpoint before it stays the newest."""
    assert run_ranks(2, _train_with_failing_save, tmp_path, limit_s=120) == [8, 8]
    shutil.rmtree(tmp_path / "checkpoint-6" / ".metadata")
    newest = bytecheckpoint.latest(tmp_path)
    assert newest is not None
    assert newest.endswith("checkpoint-4")


def test_a_failure_of_the_last_save_is_raised_by_train(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, 0, [checkpoint_callback()], max_steps=2)
    block_commit(tmp_path / "checkpoint-2")
    with pytest.raises(CheckpointError):
        trainer.train()


@pytest.mark.parametrize(("limit", "kept"), [(1, [12]), (3, [8, 10, 12])])
def test_save_total_limit_counts_complete_checkpoints(limit: int, kept: list[int], tmp_path: Path) -> None:
    """There is always a complete one once there was one: none goes before a newer one is committed."""
    seen: list[int] = []

    def look() -> None:
        seen.append(sum(each.is_complete for each in bytecheckpoint.scan_steps(tmp_path)))

    looks = [when("on_step_begin", step, look) for step in range(4, STEPS)]
    trainer = trainer_in(tmp_path, 0, [checkpoint_callback(), *looks], save_total_limit=limit)
    trainer.train()

    assert [each.step for each in bytecheckpoint.scan_steps(tmp_path)] == kept
    assert seen
    assert min(seen) >= 1
    assert trainer.args.save_total_limit is None


def test_the_best_is_one_of_those_that_are_kept(tmp_path: Path) -> None:
    """With a learning rate of zero the first is the best, and Trainer loads it at the end."""
    settings = {"save_total_limit": 2, "load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2}
    trainer = trainer_in(tmp_path, 0, [checkpoint_callback()], learning_rate=0.0, **settings)
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-2")
    assert [each.step for each in bytecheckpoint.scan_steps(tmp_path)] == [2, 12]


def test_nothing_writes_when_train_has_returned(tmp_path: Path) -> None:
    trainer_in(tmp_path, 0, [checkpoint_callback()], max_steps=4).train()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    bytecheckpoint.shutdown()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    assert not (tmp_path / "checkpoint-4" / "optimizer.pt").exists()


def test_a_checkpoint_of_trainers_own_goes_on(tmp_path: Path) -> None:
    """A run that began without the callback takes it when it resumes."""
    whole_run = trainer_in(tmp_path / "whole", 0, [])
    whole_run.train()
    stopped = trainer_in(tmp_path, 0, [when("on_save", 4, lambda: (_ for _ in ()).throw(KeyboardInterrupt))])
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    trainer = trainer_in(tmp_path, 1, [checkpoint_callback()])
    trainer.train(resume_from_checkpoint=True)
    assert losses_of(trainer) == losses_of(whole_run)
    assert [each.step for each in bytecheckpoint.scan_steps(tmp_path) if each.is_complete] == [6, 8, 10, 12]


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer_in(tmp_path, 0, [checkpoint_callback()], max_steps=4).train()
    ours = checkpoint_callback()
    trainer = trainer_in(tmp_path, 0, [ours])
    assert ours.latest(tmp_path) == str(tmp_path / "checkpoint-4")
    with pytest.raises(ConfigError, match="pass it as train"):
        trainer.train()
    assert ours.latest(tmp_path / "nothing") is None
    with pytest.raises(ConfigError, match=r"latest: Tiers cannot be passed here: pass their near folder, .*near"):
        ours.latest(bytecheckpoint.Tiers(near=tmp_path / "near"))

    ours.latest(tmp_path)
    with pytest.raises(ConfigError, match="Trainer resumes at step 2"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))

    (tmp_path / "checkpoint-4" / ".metadata").unlink()
    with pytest.raises(CheckpointNotFoundError, match=r"pass checkpoints.latest\(output_dir\)"):
        trainer.train(resume_from_checkpoint=True)

    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    monkeypatch.setitem(PartialState._shared_state, "distributed_type", DistributedType.FSDP)
    with pytest.raises(UnsupportedError, match="install_in_functions"):
        ours.on_init_end(trainer.args, trainer.state, trainer.control)
