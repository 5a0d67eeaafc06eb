# SPDX-License-Identifier: Apache-2.0
"""Saves and loads through our writer, reader and planners what Accelerate and transformers.Trainer save under FSDP2.

Both call ``save_fsdp_model``, ``save_fsdp_optimizer`` and their counterparts, with ``SHARDED_STATE_DICT``. These
functions name DCP's classes themselves, so ``bytecheckpoint.register()`` does not reach them, and
``use_bytecheckpoint`` below replaces the classes where the functions look. Accelerate has no FSDP on CPU, so this demo
runs those four functions on a model that FSDP2 shards on two gloo ranks. With GPUs you call ``accelerator.save_state``
or train with ``fsdp="full_shard"`` instead. Needs ``pip install accelerate``.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import load_fsdp_model, load_fsdp_optimizer, save_fsdp_model, save_fsdp_optimizer
from torch.distributed.checkpoint import default_planner
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from training.comparison import compare
from training.job import local_shards
from training.two_ranks import on_two_ranks

import bytecheckpoint
from bytecheckpoint import BcpLoadPlanner, BcpReader, BcpSavePlanner, BcpWriter


def use_bytecheckpoint() -> None:
    """Replaces DCP's classes for the rest of the process. Call it before the first save or load."""
    dcp.FileSystemWriter, dcp.FileSystemReader = BcpWriter, BcpReader
    default_planner.DefaultSavePlanner, default_planner.DefaultLoadPlanner = BcpSavePlanner, BcpLoadPlanner


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


def main(folder: Path) -> None:
    use_bytecheckpoint()
    accelerator = Accelerator(cpu=True)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")

    model, optimizer = trained(seed=0, num_steps=3)
    save_fsdp_model(plugin, accelerator, model, folder)
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)

    # The other weights make sure that values that are equal at the end came from the checkpoint.
    other_model, other_optimizer = trained(seed=1, num_steps=1)
    load_fsdp_model(plugin, accelerator, other_model, folder)
    load_fsdp_optimizer(plugin, accelerator, other_optimizer, other_model, folder)

    saved, loaded = (get_state_dict(*pair) for pair in ((model, optimizer), (other_model, other_optimizer)))
    comparison = compare(local_shards(dict(enumerate(saved))), local_shards(dict(enumerate(loaded))))
    assert comparison.equal, comparison
    if dist.get_rank() == 0:
        for name in ("pytorch_model_fsdp_0", "optimizer_0"):
            report = bytecheckpoint.verify(folder / name)
            report.raise_if_damaged()
            print(f"{name}: {report.num_records} records in {report.num_files} files, whole")
        print(f"of rank 0, saved and loaded: {comparison}")


if __name__ == "__main__":
    on_two_ranks(__file__, main)
