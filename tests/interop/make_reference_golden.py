# SPDX-License-Identifier: Apache-2.0
"""Makes the golden checkpoints of ByteCheckpoint 0.0.2, in an environment that has that package and torch 2.5.

    python -m venv /tmp/reference
    /tmp/reference/bin/pip install bytecheckpoint==0.0.2 'numpy<2'
    /tmp/reference/bin/python tests/interop/make_reference_golden.py FOLDER/reference

Run it from a folder in which Python does not find this package. Beside each checkpoint it writes what was saved, by
torch.save: ``expected.pt``. ``python tests/support/goldens.py tests/interop/golden/reference.tar.xz FOLDER`` packs
them.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

os.environ["BYTECHECKPOINT_ENABLE_PINNED_MEM_D2H"] = "0"

import torch
import torch.distributed as dist
import torch.multiprocessing

STEP = 7


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 6)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(2))
        self.head = torch.nn.Linear(6, 11, bias=False)
        self.register_buffer("scale", torch.tensor([1.5, 2.5], dtype=torch.float64))
        self.register_buffer("count", torch.tensor(3))


def net() -> Net:
    torch.manual_seed(1)
    return Net()


def wrapped(framework: str) -> torch.nn.Module:
    if framework == "ddp":
        return torch.nn.parallel.DistributedDataParallel(net())
    if framework == "fsdp":
        from torch.distributed.fsdp import FullyShardedDataParallel

        return FullyShardedDataParallel(net(), device_id=torch.device("cpu"), use_orig_params=True)
    from torch.distributed._composable.fsdp import fully_shard
    from torch.distributed.device_mesh import init_device_mesh

    model = net()
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def stepped(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Takes a step with gradients that are made of the elements, so that it is the same however they are sharded."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    for parameter in model.parameters():
        parameter.grad = parameter.detach() / 2
    optimizer.step()
    return optimizer


def expected() -> dict[str, Any]:
    """Returns the state of the same model on one process, by the names of its parameters."""
    model = net()
    optimizer = stepped(model)
    moments = {name: dict(optimizer.state[parameter]) for name, parameter in model.named_parameters()}
    return {"model": dict(model.state_dict()), "moments": moments}


def save(rank: int, world_size: int, framework: str, root: str) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT="29731", RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size)
    )
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    import bytecheckpoint

    model = wrapped(framework)
    optimizer = stepped(model)
    extra = {"epoch": 3, "rank": rank, "noise": torch.arange(3.0) + rank}
    bytecheckpoint.save(
        root, {"model": model, "optimizer": optimizer, "extra_state": extra}, framework=framework, global_steps=STEP
    )
    from bytecheckpoint.engine import _store_engine

    _store_engine.cleanup_resources()
    if rank == 0:
        torch.save(expected(), Path(root) / "expected.pt")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    golden = Path(sys.argv[1]).absolute()
    for framework, world_size in [("ddp", 1), ("ddp", 2), ("fsdp", 2), ("fsdp2", 2)]:
        root = golden / f"{framework}_{world_size}"
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        torch.multiprocessing.spawn(save, (world_size, framework, str(root)), world_size)


if __name__ == "__main__":
    main()
