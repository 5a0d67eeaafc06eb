# SPDX-License-Identifier: Apache-2.0
"""Lightning's strategy and plug-in of ours: FSDP2 on two ranks, kills, failures, other ranks, and what is removed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.equality import assert_equal
from support.ranks import RanksFailed, forked_with, run_ranks
from torch.distributed.fsdp import fully_shard

import bytecheckpoint
from bytecheckpoint.errors import CheckpointError, CheckpointNotFoundError, ConfigError, UnsafeObjectError
from frameworks.launched import as_launched, block_commit, die, whole

pytest.importorskip("lightning", reason="lightning is not installed: ITS STRATEGY AND PLUG-IN ARE NOT TESTED")
pytestmark = [
    pytest.mark.usefixtures("ranks_that_have_it", "all_is_saved"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]


@pytest.fixture(scope="module")
def ranks_that_have_it() -> Iterator[None]:
    """Forks the module's ranks from a process that has imported the framework, because that takes seconds."""
    with forked_with("lightning.pytorch"):
        yield


class Plain:
    """An object that ``weights_only`` rules refuse."""

    x = 1


def module(seed: int, act: Any = None) -> Any:
    """Returns a LightningModule. ``act`` is called after each batch with the number of steps."""
    import lightning

    class Regression(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Linear(16, 33), torch.nn.Dropout(0.5), torch.nn.Linear(33, 16))
            self.losses: list[float] = []

        def configure_model(self) -> None:
            if hasattr(self.trainer.strategy, "device_mesh"):
                fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])
                fully_shard(self, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = self.layers(batch[0]).square().mean()
            self.losses.append(loss.item())
            return loss

        def on_train_batch_end(self, *_: Any) -> None:
            if act is not None:
                act(self.trainer.global_step)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    torch.manual_seed(seed)
    made = Regression()
    if dist.is_initialized():
        torch.manual_seed(100 * seed + dist.get_rank())
    return made


def fit(made: Any, folder: Path, epochs: int, ckpt_path: str | None = None, top: int = -1, **settings: Any) -> Any:
    """Trains, with four batches an epoch, and a save after each."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    rows = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=16 // 4, shuffle=True)
    if dist.is_initialized():
        loader = torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(rows), batch_size=4 // dist.get_world_size()
        )
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        callbacks=[ModelCheckpoint(folder, save_top_k=top, **({"monitor": "step", "mode": "max"} if top > 1 else {}))],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    trainer.fit(made, loader, ckpt_path=ckpt_path)
    return trainer


def sharded() -> dict[str, Any]:
    from bytecheckpoint.integrations.lightning import BcpModelParallelStrategy

    size = dist.get_world_size()
    return {"devices": size, "strategy": BcpModelParallelStrategy(data_parallel_size=size, tensor_parallel_size=1)}


def plugged() -> dict[str, Any]:
    from bytecheckpoint.integrations.lightning import BcpCheckpointIO

    return {"devices": 1, "plugins": [BcpCheckpointIO()]}


def newest(folder: Path) -> str | None:
    from bytecheckpoint.integrations.lightning import latest

    return latest(folder)


def state_of(made: Any, trainer: Any) -> Any:
    return whole([dict(made.state_dict()), trainer.optimizers[0].state_dict()])


def _train(folder: Path, dies_at: int = 0) -> tuple[list[float], Any]:
    as_launched()
    made = module(1, lambda step: die() if step == dies_at else None)
    trainer = fit(made, folder, 4, **sharded())
    return made.losses, state_of(made, trainer)


def _resume(folder: Path, epochs: int = 4) -> tuple[list[float], Any, str | None]:
    as_launched()
    found = newest(folder)
    made = module(2)
    trainer = fit(made, folder, epochs, found, **sharded())
    return made.losses, state_of(made, trainer), found


def test_a_killed_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    whole_run = run_ranks(2, _train, tmp_path / "whole", limit_s=90)
    with pytest.raises(RanksFailed):
        run_ranks(2, _train, tmp_path / "killed", 9, limit_s=90)  # the save of step 8 may be under way
    half = tmp_path / "killed" / "epoch=3-step=16.ckpt"
    half.mkdir()
    (half / "__0_0.distcp").write_bytes(b"half")

    resumed = run_ranks(2, _resume, tmp_path / "killed", limit_s=90)

    for (losses, state), (losses_again, state_again, path) in zip(whole_run, resumed, strict=True):
        assert path is not None
        steps = int(path.partition("step=")[2].removesuffix(".ckpt"))
        assert steps in (4, 8)
        assert losses_again == losses[steps:]
        assert_equal(state_again, state)


def test_two_ranks_save_and_one_loads(tmp_path: Path) -> None:
    whole_run = run_ranks(2, _train, tmp_path, limit_s=90)
    ((losses, state, path),) = run_ranks(1, _resume, tmp_path, 4, limit_s=90)
    assert path == str(tmp_path / "epoch=3-step=16.ckpt")
    assert losses == []
    assert_equal(state, whole_run[0][1])


def failing(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Makes the save of a step fail."""
    from bytecheckpoint.integrations import lightning

    save = lightning.async_save_state_dict

    def failing_save(path: Any, *args: Any, user_metadata: Any, **kwargs: Any) -> Any:
        if user_metadata["step"] == step:
            block_commit(Path(path))
        return save(path, *args, user_metadata=user_metadata, **kwargs)

    monkeypatch.setattr(lightning, "async_save_state_dict", failing_save)


def _train_with_failing_save(folder: Path) -> None:
    as_launched()
    with pytest.MonkeyPatch.context() as patch:
        failing(patch, 8)
        made = module(1)
        with pytest.raises(CheckpointError):
            fit(made, folder / "a", 4, **sharded())
        assert len(made.losses) == 12  # the next save raises it
        with pytest.raises(CheckpointError):  # the last save
            fit(module(1), folder / "b", 2, **sharded())

        def fail(step: int) -> None:
            if step == 9:
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):  # what ended the training is not hidden
            fit(module(1, fail), folder / "c", 3, **sharded())


def test_a_failed_save_ends_the_training(tmp_path: Path) -> None:
    run_ranks(2, _train_with_failing_save, tmp_path, limit_s=120)


def _train_with_top(folder: Path) -> list[int]:
    as_launched()
    numbers: list[int] = []

    def look(step: int) -> None:
        if step > 8:  # the second save has waited for the first
            numbers.append(sum(path.joinpath(".metadata").exists() for path in folder.glob("*.ckpt")))

    fit(module(1, look), folder, 4, top=1, **sharded())
    dist.barrier()  # rank 0 has removed by then
    return [*numbers, len(list(folder.glob("*.ckpt")))]


def test_what_goes_does_so_after_the_commit(tmp_path: Path) -> None:
    """With ``save_top_k=1`` there is always a complete checkpoint, and one at the end."""
    for numbers in run_ranks(2, _train_with_top, tmp_path, limit_s=90):
        assert min(numbers) >= 1
        assert numbers[-1] == 1
    assert newest(tmp_path) == str(tmp_path / "epoch=3-step=16.ckpt")


def _load_what_lightning_saved(folder: Path) -> tuple[Any, Any]:
    from lightning.pytorch.strategies import ModelParallelStrategy

    as_launched()
    theirs = module(1)
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    trainer = fit(theirs, folder, 1, devices=2, strategy=strategy)
    wanted = state_of(theirs, trainer)
    ours = module(2)
    trainer = fit(ours, folder, 1, str(folder / "epoch=0-step=4.ckpt"), **sharded())
    return wanted, state_of(ours, trainer)


def test_checkpoints_of_lightnings_own_strategy_load(tmp_path: Path) -> None:
    for wanted, got in run_ranks(2, _load_what_lightning_saved, tmp_path, limit_s=90):
        assert_equal(got, wanted)


def test_the_plug_in_for_other_strategies(tmp_path: Path) -> None:
    """All of a checkpoint comes back, and nothing writes when ``fit`` has returned."""
    made = module(1)
    trainer = fit(made, tmp_path, 2, top=1, **plugged())
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    bytecheckpoint.shutdown()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    assert [path.name for path in tmp_path.iterdir()] == ["epoch=1-step=8.ckpt"]
    again = module(2)
    resumed = fit(again, tmp_path, 2, newest(tmp_path), **plugged())
    assert_equal(state_of(again, resumed), state_of(made, trainer))
    assert resumed.global_step == 8

    (tmp_path / "epoch=1-step=8.ckpt" / ".metadata").unlink()
    with pytest.raises(CheckpointError):
        fit(module(2), tmp_path, 2, str(tmp_path / "epoch=1-step=8.ckpt"), **plugged())


def test_the_plug_in_raises_what_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, 4)
    with pytest.raises(CheckpointError):
        fit(module(1), tmp_path, 1, **plugged())


def test_what_is_in_a_checkpoint_comes_back(tmp_path: Path) -> None:
    """Values of all kinds, and objects that run code only if the user says so."""
    from bytecheckpoint.integrations.lightning import BcpCheckpointIO

    plugin = BcpCheckpointIO()
    state = {"a": {0: torch.arange(3), "b": [1, (torch.ones(2), None)]}, "a.0": torch.zeros(1), "epoch": 1}
    plugin.save_checkpoint(state, tmp_path / "step=1.ckpt")
    assert_equal(plugin.load_checkpoint(tmp_path / "step=1.ckpt"), state)
    plugin.save_checkpoint({"object": Plain()}, tmp_path / "step=2.ckpt")
    with pytest.raises(UnsafeObjectError):
        plugin.load_checkpoint(tmp_path / "step=2.ckpt")
    assert plugin.load_checkpoint(tmp_path / "step=2.ckpt", weights_only=False)["object"].x == 1
    bytecheckpoint.pin(tmp_path / "step=1.ckpt")
    for name in ("step=1.ckpt", "step=2.ckpt", "none.ckpt"):
        plugin.remove_checkpoint(tmp_path / name)
    plugin.teardown()
    assert [path.name for path in tmp_path.iterdir()] == ["step=1.ckpt"]


def test_what_is_refused(tmp_path: Path) -> None:
    from bytecheckpoint.integrations.lightning import BcpCheckpointIO, BcpModelParallelStrategy, latest

    with pytest.raises(ConfigError, match="bcp convert"):
        BcpModelParallelStrategy(save_distributed_checkpoint=False)
    for of_lightning in (BcpCheckpointIO(), BcpModelParallelStrategy()):
        with pytest.raises(ConfigError, match="storage_options"):
            of_lightning.save_checkpoint({}, tmp_path / "a.ckpt", storage_options={})
        with pytest.raises(ConfigError, match="Tiers cannot be passed here"):
            of_lightning.save_checkpoint({}, bytecheckpoint.Tiers(near=tmp_path / "near") / "step-1")
    with pytest.raises(ConfigError, match=r"latest: Tiers cannot be passed here: pass their near folder, .*near"):
        latest(bytecheckpoint.Tiers(near=tmp_path / "near"))
    assert latest(tmp_path) is None
    with pytest.raises(ConfigError, match="group around"):
        latest(tmp_path, pattern="x")
    bytecheckpoint.save_state_dict(tmp_path / "step=1.ckpt", {"a": 1}, no_dist=True)
    with pytest.raises(CheckpointNotFoundError, match=r"bytecheckpoint\.read"):
        BcpCheckpointIO().load_checkpoint(tmp_path / "step=1.ckpt")
