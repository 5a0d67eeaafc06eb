# SPDX-License-Identifier: Apache-2.0
"""One rank of a job with the manager of an older torchtitan, which must come first on the path.

``python titan_older.py FOLDER`` prints "passed". torchtitan 0.2 is for GPUs, as 0.3 is, so its models are not used.
"""

from __future__ import annotations

import importlib.metadata
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from support.titan import Samples, TrainState, flat, same
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR

import bytecheckpoint

MODES = ("disabled", "async", "async_with_pinned_mem")


def _stand_in(name: str) -> None:
    """Registers a stand-in for a module that is not installed and whose functions are not called."""
    module = ModuleType(name)
    module.__getattr__ = lambda _: None  # type: ignore[method-assign]
    sys.modules[name] = module


class Job:
    def __init__(self, seed: int = 0) -> None:
        from torchtitan.components.dataloader import ParallelAwareDataloader
        from torchtitan.components.lr_scheduler import LRSchedulersContainer
        from torchtitan.components.optimizer import OptimizersContainer

        torch.manual_seed(seed)
        layers = [torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)]
        self.model = torch.nn.Sequential(*layers)
        fully_shard(self.model)
        self.optimizers = OptimizersContainer([self.model], torch.optim.AdamW, {"lr": 0.01})
        self.schedulers = LRSchedulersContainer(self.optimizers, lambda step: 1 / (step + 1))
        assert all(isinstance(one, LambdaLR) for one in self.schedulers)
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        self.loader = ParallelAwareDataloader(Samples(rank, num_ranks), rank, num_ranks, batch_size=2)
        self.batches = iter(self.loader)
        self.train_state = TrainState()

    def manager(self, folder: str, **fields: Any) -> Any:
        from torchtitan.components.checkpoint import CheckpointManager
        from torchtitan.config.job_config import Checkpoint

        return CheckpointManager(
            dataloader=self.loader,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self.train_state},
            checkpoint_config=Checkpoint(**{"enable": True, "folder": "run", "interval": 1, **fields}),
            sd_adapter=None,
            base_folder=folder,
        )

    def step(self, manager: Any = None) -> float:
        inputs, _ = next(self.batches)
        loss = self.model(inputs["input"].float() / 2048).square().mean()
        loss.backward()
        if manager is not None:
            manager.maybe_wait_for_staging()
        self.optimizers.step()
        self.optimizers.zero_grad()
        self.schedulers.step()
        self.train_state.step += 1
        return float(loss.detach())

    def resume(self) -> None:
        self.batches = iter(self.loader)

    def state(self) -> dict[str, Any]:
        state = flat({"model": self.model.state_dict(), "optimizer": self.optimizers.state_dict()})
        return {**state, "rest": str((self.loader.state_dict(), self.schedulers.state_dict(), self.train_state.step))}


def _is_ours(path: Path) -> bool:
    return not all(found.is_foreign for found in bytecheckpoint.scan_steps(path))


def of_0_2(folder: str) -> None:
    _stand_in("torchtitan.models.moe.kernels")
    job = Job()
    manager = job.manager(f"{folder}/theirs")
    job.step()
    manager.save(1)
    manager.close()
    saved = job.state()
    assert not _is_ours(Path(folder, "theirs/run"))

    import_module("bytecheckpoint.torchtitan.custom_import")
    other = Job(seed=1)
    manager = other.manager(f"{folder}/theirs")
    assert manager.load()
    other.resume()
    same(other.state(), saved)
    manager.close()
    for mode in MODES:
        path = f"{folder}/{mode}"
        manager = job.manager(path, async_mode=mode)
        losses = []
        for step in (2, 3):
            manager.save(step)
            if step == 2:
                saved = job.state()
            losses.append(job.step(manager))
        manager.close()
        assert _is_ours(Path(path, "run"))
        other = Job(seed=1)
        manager = other.manager(path, async_mode=mode)
        assert manager.load(2)
        other.resume()
        same(other.state(), saved)
        assert [other.step() for _ in range(2)] == losses
        try:
            manager.load(9)
        except bytecheckpoint.CheckpointError as error:
            assert "there are steps 2, 3" in str(error)  # noqa: PT017  # this is not a pytest test
        else:
            raise AssertionError("step 9 was loaded")
        # torchtitan's own load reads our checkpoint.
        theirs = type(manager).dcp_load.__wrapped__
        other = Job(seed=2)
        manager = other.manager(path)
        states = manager._states_to_load(False)
        theirs(manager, states, f"{path}/run/step-2", False, False)
        other.resume()
        same(other.state(), saved)
        manager.close()
    # ``close`` raises the failure of a background save.
    Path(folder, "failing/run").mkdir(parents=True, exist_ok=True)
    Path(folder, "failing/run/step-1").touch()
    manager = job.manager(f"{folder}/failing", async_mode="async")
    manager.save(1)
    try:
        manager.close()
    except bytecheckpoint.CheckpointError:
        return
    raise AssertionError("nothing was raised")


def of_0_1(folder: str) -> None:
    for name in ("tiktoken", "tiktoken.load"):
        _stand_in(name)
    checkpoint: Any = import_module("torchtitan.components.checkpoint")
    import_module("bytecheckpoint.torchtitan.custom_import")
    state = SimpleNamespace(tensor=torch.arange(100.0))
    checkpoint.save_with_gc({"model": {"w": state.tensor}}, f"{folder}/run/step-1")
    assert _is_ours(Path(folder, "run"))
    loaded = {"model": {"w": torch.zeros(100)}}
    checkpoint.dcp.load(loaded, checkpoint_id=f"{folder}/run/step-1")
    assert torch.equal(loaded["model"]["w"], state.tensor)


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    (of_0_1 if importlib.metadata.version("torchtitan").startswith("0.1.") else of_0_2)(sys.argv[1])
    dist.barrier()
    dist.destroy_process_group()
    print("passed")
