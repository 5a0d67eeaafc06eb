# SPDX-License-Identifier: Apache-2.0
"""Saves a transformer under one framework, and continues under another or on other numbers of ranks.

Each demo trains a few steps, saves with ``bytecheckpoint.save``, and starts new processes that load with
``bytecheckpoint.load``. Every tensor and option must then equal, bit for bit, what torch gathered at the save. The new
processes train on, and the demo prints their losses beside those of the job that was not interrupted.

    python demo/frameworks.py            # all of them, on CPU, in about a minute
    python demo/frameworks.py fsdp1 tp

The exit status is 0 if and only if all comparisons hold.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from training.comparison import compare
from training.display import Display
from training.job import directory_bytes, process_group
from training.model import Block, Decoder, ModelConfig, global_batch, next_token_loss

import bytecheckpoint

CONFIG = ModelConfig(layers=2, width=128)
STEPS = 3
SEQUENCES = 12  # 2, 3 and 4 ranks share them evenly
# Other numbers of ranks add in another order, so losses differ slightly.
LARGEST_RELATIVE_DIFFERENCE = 1e-3


def fsdp1(model: Decoder, *, per_block: bool, **kwargs: Any) -> nn.Module:
    policy = ModuleWrapPolicy({Block}) if per_block else None
    device = torch.device("cpu")
    return FullyShardedDataParallel(
        model, auto_wrap_policy=policy, device_id=device, use_orig_params=per_block, **kwargs
    )


def mesh_2d(*names: str) -> DeviceMesh:
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=names)


def hsdp(model: Decoder) -> nn.Module:
    mesh = mesh_2d("replicate", "shard")
    return fsdp1(model, per_block=True, sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh)


def fsdp2(model: Decoder) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tensor_parallel(model: Decoder) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        parallelize_module(block, mesh, {"expand": ColwiseParallel(), "contract": RowwiseParallel()})
    return model


@dataclass(frozen=True)
class Stage:
    """A job on some ranks, with one wrapping of the model."""

    title: str
    num_ranks: int
    framework: str
    wrap: Callable[[Decoder], nn.Module]
    irregular: str = "decompose"


PER_BLOCK = "FSDP1, a flat parameter a block, parameters as they were"
FSDP1_PER_BLOCK = Stage(PER_BLOCK, 4, "fsdp", partial(fsdp1, per_block=True))
DEMOS = {
    "ddp": [
        Stage("DistributedDataParallel", 4, "ddp", DistributedDataParallel),
        Stage("DistributedDataParallel", 2, "ddp", DistributedDataParallel),
    ],
    "fsdp1": [
        FSDP1_PER_BLOCK,
        Stage("FSDP1, one flat parameter for all", 3, "fsdp", partial(fsdp1, per_block=False), irregular="exchange"),
        Stage("FSDP2", 2, "fsdp2", fsdp2),
    ],
    "fsdp2": [Stage("FSDP2", 4, "fsdp2", fsdp2), Stage("FSDP2", 2, "fsdp2", fsdp2), Stage("FSDP2", 3, "fsdp2", fsdp2)],
    "hsdp": [Stage("HSDP, 2 replicas of 2 shards", 4, "fsdp", hsdp), FSDP1_PER_BLOCK],
    "tp": [
        Stage("tensor parallelism", 2, "fsdp2", tensor_parallel),
        Stage("a single process", 1, "ddp", lambda model: model),
    ],
}


class Run:
    """A model, its optimizer, and the number of steps taken."""

    def __init__(self, stage: Stage, seed: int) -> None:
        torch.manual_seed(seed)
        self.stage = stage
        self.model = stage.wrap(Decoder(CONFIG))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.extra_state: dict[str, Any] = {"step": 0}

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "extra_state": self.extra_state}

    def train(self, num_steps: int) -> list[float]:
        """Trains and returns the losses over the whole batch, which are the same on all ranks."""
        # ranks share the batch, except that those of tensor parallelism all see the whole batch
        is_shared = self.stage.wrap is not tensor_parallel
        ranks, rank = (dist.get_world_size(), dist.get_rank()) if is_shared else (1, 0)
        losses = []
        for _ in range(num_steps):
            tokens = global_batch(self.extra_state["step"], SEQUENCES, seed=0).chunk(ranks)[rank]
            loss = next_token_loss(self.model, tokens)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            losses.append(mean.item() / dist.get_world_size())
            self.extra_state["step"] += 1
        return losses

    def full_state(self) -> Any:
        """Returns the state as torch gathers it."""
        return get_state_dict(self.model, self.optimizer, options=StateDictOptions(full_state_dict=True))


def run_stage(rank: int, number: int, demo: str, folder: Path) -> None:
    """Runs one job: loads what the previous stage saved, if there was one, and saves for the next stage."""
    stages = DEMOS[demo]
    stage = stages[number]
    told: list[str] = []
    with process_group(rank, stage.num_ranks, folder / f"rendezvous_{number}"):
        run = Run(stage, seed=number)
        if number > 0:
            begin = time.perf_counter()
            path = bytecheckpoint.find_latest_ckpt_path(folder, process_group=dist.group.WORLD)
            if path is None:
                raise RuntimeError("the stage before has saved nothing")
            state = run.state()
            bytecheckpoint.load(path, state, stage.framework)
            run.extra_state = state["extra_state"]
            seconds = time.perf_counter() - begin
            gathered = run.full_state()
            if rank == 0:
                comparison = compare(torch.load(folder / "full_state.pt", weights_only=True), gathered)
                if not comparison.equal:
                    raise RuntimeError(f"loaded is not what was saved: {comparison}")
                told.append(f"loaded in {seconds * 1e3:.0f} ms; {comparison}")
        losses = run.train(STEPS)
        if number > 0 and rank == 0:
            pairs_of_losses = list(zip(losses, json.loads((folder / "losses.json").read_text()), strict=True))
            for loss, uninterrupted in pairs_of_losses:
                if abs(loss - uninterrupted) > LARGEST_RELATIVE_DIFFERENCE * uninterrupted:
                    raise RuntimeError(f"a loss of {loss}, without interruption {uninterrupted}")
            pairs = ", ".join(f"{resumed:.5f} ({uninterrupted:.5f})" for resumed, uninterrupted in pairs_of_losses)
            told.append(f"trained on: losses {pairs}, in brackets those without interruption")
        if number + 1 < len(stages):
            begin = time.perf_counter()
            step = run.extra_state["step"]
            bytecheckpoint.save(
                folder,
                run.state(),
                stage.framework,
                global_steps=step,
                irregular=stage.irregular,
                extra_state_policy="replicated",
            )
            seconds = time.perf_counter() - begin
            gathered = run.full_state()
            if rank == 0:
                torch.save(gathered, folder / "full_state.pt")
            uninterrupted = run.train(STEPS)
            if rank == 0:
                (folder / "losses.json").write_text(json.dumps(uninterrupted))
                parts = (folder / f"global_step_{step}").iterdir()
                megabytes = sum(map(directory_bytes, parts)) / 1e6
                told.append(f"saved step {step}, {megabytes:.1f} MB, in {seconds * 1e3:.0f} ms")
        bytecheckpoint.shutdown()
    if rank == 0:
        (folder / f"told_{number}").write_text("\n".join(told))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("demos", nargs="*", metavar="demo", help=f"of {', '.join(DEMOS)}; all of them by default")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.demos if name not in DEMOS]
    if unknown:
        parser.error(f"{', '.join(unknown)}: no such demo; there are {', '.join(DEMOS)}")
    with Display() as display:
        for demo in arguments.demos or DEMOS:
            with tempfile.TemporaryDirectory(prefix="frameworks-") as folder:
                for number, stage in enumerate(DEMOS[demo]):
                    display.begin(f"{demo}: {stage.title}")
                    mp.spawn(run_stage, (number, demo, Path(folder)), stage.num_ranks)
                    ranks = f"{stage.num_ranks} rank{'s' if stage.num_ranks > 1 else ''}"
                    display.line(f"{demo}: {stage.title}, {ranks}")
                    for line in (Path(folder) / f"told_{number}").read_text().splitlines():
                        display.line(f"  {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
