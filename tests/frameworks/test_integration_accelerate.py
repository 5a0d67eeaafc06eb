# SPDX-License-Identifier: Apache-2.0
"""Accelerate's save_state and load_state through our engine: FSDP2 on two ranks, kills, failures, other ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.equality import assert_equal
from support.ranks import RanksFailed, forked_with, run_ranks
from torch.distributed.fsdp import FSDPModule

import bytecheckpoint
from bytecheckpoint.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    UnsupportedError,
)
from frameworks.launched import as_launched, block_commit, die, whole

pytest.importorskip("accelerate", reason="accelerate is not installed: ITS INTEGRATION IS NOT TESTED")
pytestmark = pytest.mark.usefixtures("ranks_that_have_it", "all_is_saved")


@pytest.fixture(scope="module")
def ranks_that_have_it() -> Iterator[None]:
    """Forks the module's ranks from a process that has imported the framework, because that takes seconds."""
    with forked_with("accelerate", "torch._dynamo", "torchdata.stateful_dataloader"):
        yield


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.expand, self.drop, self.contract = torch.nn.Linear(16, 33), torch.nn.Dropout(0.5), torch.nn.Linear(33, 16)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        shrunk: torch.Tensor = self.contract(self.drop(self.expand(rows)))
        return shrunk


class Counter:
    """What a user registers for checkpoints."""

    num_steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_steps = state["num_steps"]


class Training:
    """What a user's script has. Under FSDP2, Accelerate shards the model as it does on GPUs."""

    def __init__(self, folder: Path, seed: int, *, names: bool = True, fsdp: bool = False, **project: Any) -> None:
        from accelerate import Accelerator, FullyShardedDataParallelPlugin
        from accelerate.state import AcceleratorState, PartialState
        from accelerate.utils import DataLoaderConfiguration, DistributedType, ProjectConfiguration

        AcceleratorState._reset_state(reset_partial_state=True)
        self.accelerator = Accelerator(
            cpu=True,
            project_config=ProjectConfiguration(str(folder), automatic_checkpoint_naming=names, **project),
            dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True),
        )
        if fsdp:  # it refuses that on a CPU, where all of it works
            plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=100
            )
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            self.accelerator.state.distributed_type = DistributedType.FSDP
            self.accelerator.state.fsdp_plugin = plugin
        torch.manual_seed(seed)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        rows = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
        # With a generator of its own, a loader that begins takes none of the random numbers that dropout goes on with.
        loader = torch.utils.data.DataLoader(rows, batch_size=2, generator=torch.Generator())
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)
        self.scheduler = self.accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 2))
        self.counter = Counter()
        self.accelerator.register_for_checkpointing(self.counter)
        torch.manual_seed(100 * seed + self.accelerator.process_index)

    def install(self) -> Training:
        from bytecheckpoint.integrations.accelerate import install

        install(self.accelerator)
        return self

    def train(self, until: int, save_every: int = 2, dies_at: int = 0) -> list[float]:
        losses = []
        for rows in self.loader:
            loss = self.model(rows).square().mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
            self.counter.num_steps += 1
            if self.counter.num_steps % save_every == 0:
                self.accelerator.save_state()
            if self.counter.num_steps == dies_at:
                die()
            if self.counter.num_steps == until:
                break
        return losses

    def state(self) -> Any:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        state = get_state_dict(self.model, self.optimizer.optimizer)
        return whole([*state, self.scheduler.state_dict(), self.counter.num_steps])


def _train(folder: Path, dies_at: int = 0) -> tuple[list[float], Any]:
    as_launched()
    training = Training(folder, 1, fsdp=True, total_limit=2).install()
    assert isinstance(training.model, FSDPModule)
    losses, state = training.train(8, dies_at=dies_at), training.state()
    bytecheckpoint.shutdown()
    return losses, state


def _resume(folder: Path, until: int = 8) -> tuple[list[float], Any, str, int]:
    as_launched()
    training = Training(folder, 2, fsdp=dist.get_world_size() > 1, total_limit=2).install()
    resumed: Any = training.accelerator.load_state()
    steps = training.counter.num_steps
    losses = training.train(until) if until > steps else []
    bytecheckpoint.shutdown()
    return losses, training.state(), resumed.path, steps


def test_a_killed_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """Dropout, schedule, data, and what was registered go on where the newest complete checkpoint was saved."""
    whole_run = run_ranks(2, _train, tmp_path / "whole", limit_s=90)
    with pytest.raises(RanksFailed):
        run_ranks(2, _train, tmp_path / "killed", 6, limit_s=90)  # the third save is under way
    folder = tmp_path / "killed" / "checkpoints"
    half = folder / "checkpoint_7"  # what an older kill has left has the highest number
    half.mkdir()
    (half / "__0_0.distcp").write_bytes(b"half")

    resumed = run_ranks(2, _resume, tmp_path / "killed", limit_s=90)

    for (losses, state), (losses_again, state_again, path, steps) in zip(whole_run, resumed, strict=True):
        assert steps in (4, 6)
        assert path == str(folder / f"checkpoint_{steps // 2 - 1}")
        assert losses_again == losses[steps:]
        assert_equal(state_again, state)
    complete = [each.step for each in bytecheckpoint.scan_steps(folder) if each.is_complete]
    assert complete[-2:] == [2, 3]  # numbers go on; steps 6 and 8 of the training


def test_two_ranks_save_and_one_loads(tmp_path: Path) -> None:
    whole_run = run_ranks(2, _train, tmp_path, limit_s=90)
    ((_, state, path, steps),) = run_ranks(1, _resume, tmp_path, 8, limit_s=90)
    assert path.endswith("checkpoint_3")
    assert steps == 8
    assert_equal(state, whole_run[0][1])


def _train_with_failing_save(folder: Path) -> None:
    as_launched()
    training = Training(folder, 1, fsdp=True, names=False).install()
    training.accelerator.save_state(folder / "step-1")
    block_commit(folder / "step-2")
    training.accelerator.save_state(folder / "step-2")
    with pytest.raises(CheckpointError):
        training.accelerator.save_state(folder / "step-3")
    training.accelerator.load_state(folder / "step-1")


def test_a_failed_save_is_raised_on_all_ranks(tmp_path: Path) -> None:
    run_ranks(2, _train_with_failing_save, tmp_path, limit_s=90)
    assert not (tmp_path / "step-3").exists()


def test_end_training_waits_and_raises(tmp_path: Path) -> None:
    """When it has returned, nothing writes any more."""
    training = Training(tmp_path, 1, total_limit=1).install()
    training.train(8)
    training.accelerator.end_training()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    bytecheckpoint.shutdown()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    assert [each.step for each in bytecheckpoint.scan_steps(tmp_path / "checkpoints")] == [3]

    training = Training(tmp_path / "failing", 1, names=False).install()
    block_commit(tmp_path / "failing" / "step-1")
    handle: Any = training.accelerator.save_state(tmp_path / "failing" / "step-1")
    assert handle.path == str(tmp_path / "failing" / "step-1")
    with pytest.raises(CheckpointError):
        training.accelerator.end_training()


def test_only_complete_checkpoints_load(tmp_path: Path) -> None:
    training = Training(tmp_path, 1).install()
    assert training.accelerator.load_state() is None  # a new run
    training.train(2)
    bytecheckpoint.shutdown()
    saved = tmp_path / "checkpoints" / "checkpoint_0"
    (saved / ".metadata").unlink()
    with pytest.raises(CheckpointNotFoundError):
        training.accelerator.load_state(saved)


def test_what_accelerate_saved_itself_loads(tmp_path: Path) -> None:
    theirs = Training(tmp_path, 1, names=False)
    theirs.train(2, save_every=10)
    theirs.accelerator.save_state(str(tmp_path / "theirs"))
    wanted = theirs.state()
    training = Training(tmp_path, 2, names=False).install()
    assert training.accelerator.load_state(tmp_path / "theirs") is None
    assert_equal(training.state(), wanted)


def test_what_is_refused(tmp_path: Path) -> None:
    from bytecheckpoint.integrations.accelerate import install

    training = Training(tmp_path, 1).install()
    with pytest.raises(ConfigError, match="before"):
        install(training.accelerator)
    training.accelerator.save_state()
    bytecheckpoint.shutdown()
    training.accelerator.project_configuration.iteration = 0
    with pytest.raises(CheckpointExistsError, match=r"resume from it with load_state"):
        training.accelerator.save_state()
    with pytest.raises(ConfigError, match="exclude_frozen"):
        training.accelerator.save_state(exclude_frozen=True)

    training = Training(tmp_path, 1, names=False).install()
    for call in (training.accelerator.save_state, training.accelerator.load_state):
        with pytest.raises(ConfigError, match="automatic_checkpoint_naming"):
            call()
        with pytest.raises(ConfigError, match=r"Tiers cannot be passed here: pass their near folder, .*near"):
            call(bytecheckpoint.Tiers(near=tmp_path / "near") / "step-1")
    training.accelerator.register_save_state_pre_hook(lambda *_: None)
    with pytest.raises(UnsupportedError, match="hooks"):
        training.accelerator.save_state(tmp_path / "step-1")

    training = Training(tmp_path, 1)
    training.accelerator.project_configuration.set_directories(bytecheckpoint.Tiers(near=tmp_path / "near"))
    with pytest.raises(ConfigError, match="Tiers cannot be passed here"):
        training.install()
    with pytest.raises(UnsupportedError, match="save_on_each_node"):
        Training(tmp_path, 1, save_on_each_node=True).install()
    assert not (tmp_path / "checkpoints" / "checkpoint_0" / "optimizer.bin").exists()
