# SPDX-License-Identifier: Apache-2.0
"""A CheckpointManager of torch_checkpointing through our engine: FSDP2 on two ranks, other ranks, failures, kills."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.goldens import GOLDEN
from support.ranks import forked_with, run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import bytecheckpoint
from bytecheckpoint.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    KeyMismatchError,
    UnsupportedError,
)
from bytecheckpoint.probes.of_integrations import TORCH_CHECKPOINTING
from bytecheckpoint.probes.probe import holds
from frameworks.launched import die, whole

pytest.importorskip("torch_checkpointing", reason="torch_checkpointing is not installed: OUR MANAGER IS NOT TESTED")
if not holds(TORCH_CHECKPOINTING):  # 0.1.0, which torchtitan takes where torch is older than 2.11
    pytest.skip("our manager knows torch_checkpointing 0.1.1, which wants torch 2.11", allow_module_level=True)
pytestmark = pytest.mark.usefixtures("ranks_that_have_it", "all_is_saved")


@pytest.fixture(scope="module")
def ranks_that_have_it() -> Iterator[None]:
    with forked_with("torch_checkpointing", "bytecheckpoint.integrations.torch_checkpointing"):
        yield


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.expand, self.contract = torch.nn.Linear(8, 33), torch.nn.Linear(33, 8)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        shrunk: torch.Tensor = self.contract(self.expand(rows))
        return shrunk


class Training:
    """A model and its optimizer, sharded over the ranks that there are."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = Net()
        fully_shard(self.model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.step()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(2, 8)).sum().backward()
        self.optimizer.step()

    def items(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optim": self.optimizer.state_dict()}


def own(rank: int) -> dict[str, Any]:
    return {"step": 7, "trainer": {"rank": rank, "noise": torch.full((3,), float(rank)), "none": {}}, "empty": {}}


def config(in_background: bool = True, **settings: Any) -> Any:
    from torch_checkpointing import CheckpointManager, ItemSpec
    from torch_checkpointing.config import AsyncCheckpointSaverConfig, SyncCheckpointSaverConfig
    from torch_checkpointing.default_resharder import DefaultResharder

    save = AsyncCheckpointSaverConfig() if in_background else SyncCheckpointSaverConfig()
    items = {name: ItemSpec(resharder=DefaultResharder(), required=False) for name in ("model", "optim")}
    return CheckpointManager.Config(**{"items": items, "save": save, **settings})


def made(in_background: bool = True, **settings: Any) -> Any:
    from bytecheckpoint.integrations.torch_checkpointing import BcpCheckpointManager

    return BcpCheckpointManager(config(in_background, **settings))


def _save_and_load(path: str, in_background: bool) -> Any:
    from torch_checkpointing import CheckpointManager

    first, rank = Training(1), dist.get_rank()
    manager = made(in_background)
    assert isinstance(manager, CheckpointManager)
    manager.prewarm_staging(first.items())
    saved = manager.save(path, {**first.items(), **own(rank)})
    wanted = whole(first.items())
    with manager.lock():
        first.step()  # what is saved is what there was at the call
    assert (saved is not None) is in_background
    if saved is not None:
        assert saved.result().path == path
    other = Training(2)
    into = {**other.items(), "step": 0, "trainer": {"rank": -1, "noise": torch.zeros(3), "none": {}}, "empty": {}}
    noise = into["trainer"]["noise"]
    loaded = manager.load(path, into)
    assert loaded["model"] is into["model"]
    assert loaded["trainer"]["noise"] is noise
    assert noise.tolist() == [rank] * 3
    assert (loaded["step"], loaded["trainer"]["rank"], loaded["empty"]) == (7, rank, {})
    other.model.load_state_dict(loaded["model"])
    other.optimizer.load_state_dict(loaded["optim"])
    torch.testing.assert_close(whole(other.items()), wanted, rtol=0, atol=0)
    with pytest.raises(CheckpointExistsError):
        manager.save(path, first.items()) if not in_background else manager.save(path, first.items()).result()
    if in_background:
        with pytest.raises(CheckpointExistsError):
            manager.close()
    manager.close()
    for call in (lambda: manager.save(path, {}), lambda: manager.load(path, {})):
        with pytest.raises(RuntimeError, match="the manager is closed"):
            call()
    return wanted


def _load_elsewhere(path: str) -> Any:
    training, manager = Training(3), made()
    manager.load(path, training.items(), strict=True)
    if dist.get_world_size() == 1:
        assert manager.load(path, {"step": 0}) == {"step": 7}
    if dist.get_world_size() > 2:
        with pytest.raises(KeyMismatchError, match="each rank has saved an item 'trainer' of its own"):
            manager.load(path, {"trainer": {"rank": -1}})
    return whole(training.items()["model"])


@pytest.mark.parametrize("in_background", [False, True])
def test_what_is_saved_comes_back_on_any_number_of_ranks(tmp_path: Path, in_background: bool) -> None:
    path = tmp_path / "run/step-7"
    wanted, _ = run_ranks(2, _save_and_load, str(path), in_background)
    for num_ranks in (1, 3):
        for model in run_ranks(num_ranks, _load_elsewhere, str(path)):
            torch.testing.assert_close(model, wanted["model"], rtol=0, atol=0)
    # It is a checkpoint of DCP, and one of ours.
    stock: dict[str, Any] = {"model": {name: torch.zeros_like(value) for name, value in wanted["model"].items()}}
    stock["trainer_1"] = {"rank": -1, "noise": torch.zeros(3)}
    dcp.load(stock, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    torch.testing.assert_close(stock["model"], wanted["model"], rtol=0, atol=0)
    assert (stock["trainer_1"]["rank"], stock["trainer_1"]["noise"].tolist()) == (1, [1, 1, 1])
    report = bytecheckpoint.verify(path)
    assert (report.problems, report.bytes_unchecked) == ([], 0)
    assert bytecheckpoint.latest(tmp_path / "run") == str(path)


def _fail_and_go_on(folder: str) -> list[str]:
    manager, training = made(), Training(1)
    with pytest.raises(CheckpointError) as failed:
        manager.save(f"{folder}/blocked/step-1", training.items()).result()
    manager.save(f"{folder}/blocked/step-2", training.items())
    with pytest.raises(CheckpointError):
        manager.save(f"{folder}/step-3", training.items())
    manager.save(f"{folder}/step-4", training.items())
    manager.close()
    sync = made(in_background=False)
    with pytest.raises(CheckpointError) as also:
        sync.save(f"{folder}/blocked/step-5", training.items())
    with pytest.raises(CheckpointNotFoundError):
        sync.load(f"{folder}/step-6", training.items())
    return [str(failed.value), str(also.value)]


def test_a_failed_save_is_raised_on_all_ranks_and_the_next_goes_on(tmp_path: Path) -> None:
    (tmp_path / "blocked").write_text("no folder")
    for errors in run_ranks(2, _fail_and_go_on, str(tmp_path)):
        assert all("blocked" in error for error in errors)
    assert [folder.step for folder in bytecheckpoint.scan_steps(tmp_path) if folder.is_complete] == [4]


def _die_in_a_save(folder: str) -> None:
    manager, training = made(), Training(1)
    manager.save(f"{folder}/step-1", training.items()).result()
    manager.save(f"{folder}/step-2", training.items())
    if dist.get_rank() == 1:
        die()
    with pytest.raises(CheckpointError):
        manager.close()


def _go_on(folder: str) -> str | None:
    found = bytecheckpoint.latest(folder)
    assert found is not None
    manager, training = made(), Training(2)
    manager.load(found, training.items(), strict=True)
    manager.save(f"{folder}/step-2", training.items())
    manager.close()
    return found


def test_a_rank_that_dies_in_a_save_leaves_the_step_before(tmp_path: Path) -> None:
    """Rank 1 dies before the second save can be committed, or just behind it: then that one is whole."""
    run_ranks(2, _die_in_a_save, str(tmp_path), may_die=1, limit_s=100)
    steps = bytecheckpoint.scan_steps(tmp_path)
    assert steps[0].is_complete
    if not steps[-1].is_complete:
        assert run_ranks(2, _go_on, str(tmp_path)) == [str(tmp_path / "step-1")] * 2
        assert [folder.state for folder in bytecheckpoint.scan_steps(tmp_path)] == ["complete"] * 2


def test_what_a_load_lacks(tmp_path: Path) -> None:
    with_none = made(in_background=False)
    path = tmp_path / "step-1"
    with_none.save(path, {"model": {"weight": torch.ones(2)}, "step": 3, "more": {"a": 1}})
    into = {"model": {"weight": torch.zeros(2), "bias": torch.full((2,), 5.0)}, "step": 0}
    assert with_none.load(path, into)["model"]["bias"].tolist() == [5, 5]
    assert (into["model"]["weight"].tolist(), with_none.load(path, {"step": 0})) == ([1, 1], {"step": 3})
    with pytest.raises(KeyMismatchError, match=r"model\.bias"):
        with_none.load(path, into, strict=True)
    with pytest.raises(KeyMismatchError, match="the checkpoint has no item 'other': leave it out of into="):
        with_none.load(path, {"other": 1})
    with pytest.raises(ConfigError, match="the item 'more' holds several values, and into= has none for it"):
        with_none.load(path, {"more": None})
    with pytest.raises(ConfigError, match="two items are stored as 'model_0'"):
        made(in_background=False, items={"model_0": config().items["model"]}).save(path, {"model_0": 1, "model": 2})


def test_items_that_the_configuration_names() -> None:
    from torch_checkpointing import ItemSpec

    strict = made(in_background=False, items={"model": ItemSpec(), "step": ItemSpec(required=False)}, default=None)
    for call in (strict.save, strict.load):
        with pytest.raises(KeyError, match=r"lacks the required items \['model'\]"):
            call("nowhere", {"step": 1})
        with pytest.raises(KeyError, match=r"has \['trainer'\], for which there is no ItemSpec"):
            call("nowhere", {"model": {}, "trainer": 1})
    with pytest.raises(ValueError, match="pass into=, or items in the configuration"):
        made(items={}).load("nowhere")


def test_single_objects_load_without_into(tmp_path: Path) -> None:
    from torch_checkpointing import ItemSpec

    manager = made(in_background=False, items={"step": ItemSpec()})
    manager.save(tmp_path / "step-1", {"step": 3, "loss": 0.5})
    assert manager.load(tmp_path / "step-1") == {"step": 3}


def _load_theirs(path: str) -> Any:
    """Their manager saves several ranks' items with a resharder on GPUs alone, and with direct I/O not to ext4."""
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    first, rank = Training(1), dist.get_rank()
    storage = LocalFileSystemStorageConfig(use_direct_io=False)
    theirs = CheckpointManager(config(in_background=False, items={}, storage_config=storage))
    theirs.save(path, {**first.items(), **own(rank)})
    theirs.close()
    other = Training(2)
    into = {**other.items(), "trainer": {"rank": -1, "noise": torch.zeros(3), "none": {}}}
    made(items={}).load(path, into, strict=True)
    assert into["trainer"]["rank"] == rank
    torch.testing.assert_close(whole(into["model"]), whole(first.items()["model"]), rtol=0, atol=0)


def test_what_their_manager_has_saved_loads(tmp_path: Path) -> None:
    run_ranks(2, _load_theirs, str(tmp_path / "step-1"))


def _load_golden(step: str, wanted: dict[str, torch.Tensor]) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    into = {name: distribute_tensor(torch.zeros_like(value), mesh, [Shard(0)]) for name, value in wanted.items()}
    made(items={"model": config().items["model"]}).load(step, {"model": into}, strict=True)
    torch.testing.assert_close(whole(into), wanted, rtol=0, atol=0)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_what_their_manager_has_saved_for_any_ranks_loads(num_ranks: int) -> None:
    folder = GOLDEN / "torch_checkpointing-0.1.1/mesh"
    values = torch.load(folder / "expected.pt", weights_only=True)
    wanted = {name[6:]: value for name, value in values.items() if name.startswith("model.") and value.dim() == 2}
    assert len(wanted) == 5
    run_ranks(num_ranks, _load_golden, str(folder / "checkpoint"), wanted)


def _function(*_: Any) -> None:
    pass


def test_what_has_no_meaning_for_our_engine_is_refused() -> None:
    from torch_checkpointing import ItemSpec
    from torch_checkpointing.checkpoint_layout import LayoutInfo, SafetensorsSerialization
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    class Storage(LocalFileSystemStorageConfig):
        pass

    class Resharder(DefaultResharder):
        pass

    made(storage_config=LocalFileSystemStorageConfig(use_direct_io=False))
    layout = LayoutInfo("model_{rank}.safetensors", SafetensorsSerialization())
    for settings, said in (
        ({"storage_config": Storage()}, "our engine writes to paths and URLs itself"),
        ({"pre_finalize_callback": _function}, "nobody sees a checkpoint before it is committed"),
        ({"finalize_callback": _function}, "wait for the future of save"),
        ({"subprocess_init_fn": _function}, "there is no process beside this one"),
        ({"items": {"model": ItemSpec(layout=layout)}}, "the ItemSpec of 'model' has a layout"),
        ({"default": ItemSpec(resharder=Resharder())}, "the ItemSpec of 'default' has a Resharder"),
        ({"save": None}, "must be a SyncCheckpointSaverConfig"),
    ):
        with pytest.raises(UnsupportedError, match=said):
            made(**settings)


def test_every_public_method_is_ours() -> None:
    """Nothing of their manager's own state is there, so none of its methods may be called."""
    from torch_checkpointing import CheckpointManager

    from bytecheckpoint.integrations.torch_checkpointing import BcpCheckpointManager

    theirs = {name for name, _ in inspect.getmembers(CheckpointManager, inspect.isfunction) if name[0] != "_"}
    assert theirs == {"save", "load", "prewarm_staging", "lock", "close"}
    assert theirs <= vars(BcpCheckpointManager).keys()
