# SPDX-License-Identifier: Apache-2.0
"""Accelerate's save_state and load_state through our engine, with FSDP2 on two CPU ranks.

``install(accelerator)`` makes both calls save all in one checkpoint, in the background, and load complete ones only.
Accelerate has no FSDP on CPU, so this demo shards the model itself; with GPUs ``accelerator.prepare`` does. Trainer
calls four functions of Accelerate's under FSDP: ``install_in_functions()`` makes these use our writer, reader and
planners, and the second half of the demo compares what they save and load. Needs ``pip install accelerate``.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import (
    ProjectConfiguration,
    load_fsdp_model,
    load_fsdp_optimizer,
    save_fsdp_model,
    save_fsdp_optimizer,
)
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from training.comparison import Comparison, compare
from training.job import local_shards
from training.two_ranks import on_two_ranks

import bytecheckpoint
from bytecheckpoint.integrations.accelerate import install, install_in_functions


def trained(seed: int, num_steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.TransformerEncoder(
        torch.nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0), 2, enable_nested_tensor=False
    )
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(num_steps):
        model(torch.randn(8, 4, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def with_save_state(folder: Path) -> None:
    project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=2)
    states = []
    # The other weights make sure that values that are equal at the end came from the checkpoint.
    for seed in (0, 1):
        accelerator = Accelerator(cpu=True, project_config=project)
        install(accelerator)
        model, optimizer = trained(seed, num_steps=3 - seed)
        # It is sharded already, so it must not be wrapped. With GPUs: accelerator.prepare(model, optimizer)
        accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
        accelerator.prepare(optimizer)
        if seed == 0:
            accelerator.save_state()  # returns before it is written
            bytecheckpoint.shutdown()  # as accelerator.end_training() does at the end of a script
        else:
            accelerator.load_state()  # the newest complete one
        states.append(local_shards(dict(enumerate(get_state_dict(model, optimizer)))))
        accelerator.free_memory()
    show(folder / "checkpoints" / "checkpoint_0", "save_state", compare(*states))


def with_functions_of_trainer(folder: Path) -> None:
    accelerator = Accelerator(cpu=True)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    model, optimizer = trained(seed=0, num_steps=3)
    save_fsdp_model(plugin, accelerator, model, folder)
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)

    other_model, other_optimizer = trained(seed=1, num_steps=1)
    load_fsdp_model(plugin, accelerator, other_model, folder)
    load_fsdp_optimizer(plugin, accelerator, other_optimizer, other_model, folder)

    saved, loaded = (get_state_dict(*pair) for pair in ((model, optimizer), (other_model, other_optimizer)))
    comparison = compare(local_shards(dict(enumerate(saved))), local_shards(dict(enumerate(loaded))))
    for name in ("pytorch_model_fsdp_0", "optimizer_0"):
        show(folder / name, name, comparison)


def show(checkpoint: Path, name: str, comparison: Comparison) -> None:
    assert comparison.equal, comparison
    if dist.get_rank() == 0:
        report = bytecheckpoint.verify(checkpoint)
        report.raise_if_damaged()
        print(f"{name}: {report.num_records} records in {report.num_files} files, whole")
        print(f"of rank 0, saved and loaded: {comparison}")


def main(folder: Path) -> None:
    with_save_state(folder)
    install_in_functions()
    with_functions_of_trainer(folder)


if __name__ == "__main__":
    on_two_ranks(__file__, main)
