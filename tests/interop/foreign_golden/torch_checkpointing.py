# SPDX-License-Identifier: Apache-2.0
"""Writes checkpoints of torch_checkpointing into ``FOLDER/torch_checkpointing-VERSION``.

    python3.12 -m venv /tmp/env && /tmp/env/bin/pip install torch_checkpointing==0.1.1 torch==2.13.0 numpy
    cd tests && /tmp/env/bin/python -m interop.foreign_golden.torch_checkpointing FOLDER

``plain`` (2 ranks, FSDP2) is what ``CheckpointManager`` makes by default, a file for each item and rank; ``reshard`` is
the same with a resharder, which adds metadata; ``mesh`` (4 ranks) has DTensors on a mesh of 2 x 2, and a resharder;
``formats`` (2 ranks) has items as safetensors and JSON. ``expected.pt`` has full tensors as ``ITEM.NAME``,
and what differs between ranks as ``rank_RANK.ITEM.NAME``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch_checkpointing import CheckpointManager, ItemSpec
from torch_checkpointing.checkpoint_layout import JsonSerialization, LayoutInfo, SafetensorsSerialization
from torch_checkpointing.config import SyncCheckpointSaverConfig
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.metadata_manager import DefaultMetadataManager
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

from interop.foreign_golden.names import check_names
from interop.foreign_golden.ranks import numbers, run, write_expected

RANKS = {"plain": 2, "reshard": 2, "mesh": 4, "formats": 2}


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 4)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
        self.head = torch.nn.Linear(4, 1, bias=False)  # rank 1 has nothing of it
        self.register_buffer("scale", torch.tensor([1.5, 2.5], dtype=torch.float64))


def trained() -> dict[str, Any]:
    """Returns the states of a model after a step, with gradients that are made of the parameters."""
    model = Net()
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.copy_(numbers(*parameter.shape, start=index))
    model.layers[1].to(torch.bfloat16)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125, foreach=False)
    for parameter in model.parameters():
        parameter.grad = parameter.detach() / 2
    optimizer.step()
    return {"model": model.state_dict(), "optim": optimizer.state_dict()}


def placed() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    layouts = {
        "rows": (Shard(0), Replicate()),
        "columns": (Replicate(), Shard(1)),
        "grid": (Shard(0), Shard(1)),
        "twice": (Shard(0), Shard(0)),
        "same": (Replicate(), Replicate()),
    }
    tensors = {
        name: distribute_tensor(numbers(5, 3, start=index), mesh, placements)
        for index, (name, placements) in enumerate(layouts.items())
    }
    return {"model": {**tensors, "local": numbers(3)}}


def state(kind: str) -> dict[str, Any]:
    if kind == "formats":
        return {"model": {"weight": numbers(3, 2, start=dist.get_rank())}, "trainer": {"step": 7, "loss": 0.25}}
    items = placed() if kind == "mesh" else trained()
    return {**items, "trainer": {"step": 7, "rank": dist.get_rank(), "noise": numbers(2, start=dist.get_rank())}}


def config(kind: str) -> CheckpointManager.Config:
    specs: dict[str, ItemSpec] = {}
    if kind in ("reshard", "mesh"):
        names = ("model",) if kind == "mesh" else ("model", "optim")
        specs = {name: ItemSpec(resharder=DefaultResharder()) for name in names}
    if kind == "formats":
        layout = LayoutInfo("rank_{rank}/model.safetensors", SafetensorsSerialization())
        specs = {"model": ItemSpec(layout=layout)}
        specs["trainer"] = ItemSpec(layout=LayoutInfo("trainer_{rank}.json", JsonSerialization()))
    return CheckpointManager.Config(
        items=specs,
        save=SyncCheckpointSaverConfig(),
        storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
    )


def whole(prefix: str, value: Any) -> dict[str, torch.Tensor]:
    """Returns the full tensors in ``value`` by name. Collective."""
    if isinstance(value, DTensor):
        return {prefix: value.full_tensor()}
    if isinstance(value, torch.Tensor):
        return {prefix: value}
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found: dict[str, torch.Tensor] = {}
    for key, child in children:
        found |= whole(f"{prefix}.{key}", child)
    return found


def _gathered(self: DefaultMetadataManager, data: Any, process_group: Any = None) -> dict[int, Any]:
    values: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(values, data, process_group)
    return dict(enumerate(values))


def save(kind: str, root: str) -> None:
    DefaultMetadataManager._all_gather_pickled_data = _gathered  # the original gathers the same by tensors on GPUs
    folder = Path(root, kind)
    folder.mkdir(parents=True, exist_ok=True)
    items = state(kind)
    expected: dict[str, torch.Tensor] = {}
    for name in ("model", "optim") if kind != "formats" else ():  # what is the same on all ranks
        expected |= whole(name, items.get(name, {}))
    own = {name: item for name, item in items.items() if kind == "formats" or name == "trainer"}
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    for rank, others in enumerate(gathered):
        expected |= {f"rank_{rank}{name}": tensor for name, tensor in whole("", others).items()}
    if dist.get_rank() == 0:
        write_expected(folder, expected, {"trainer.step": 7})
    manager = config(kind).build()
    manager.save(str(folder / "checkpoint"), items)
    manager.close()


def main() -> None:
    from importlib.metadata import version

    root = Path(sys.argv[1]).absolute()
    os.chdir(root)
    for kind in sys.argv[2:] or RANKS:
        run(RANKS[kind], save, kind, f"torch_checkpointing-{version('torch_checkpointing')}")
    check_names(root)


if __name__ == "__main__":
    main()
