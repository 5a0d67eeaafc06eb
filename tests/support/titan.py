# SPDX-License-Identifier: Apache-2.0
"""Builds torchtitan's own model, optimizers, schedulers and data loader on gloo ranks, for its checkpoint managers.

torchtitan is made for GPUs and for the torch of its time. Three changes make it run without them. Where there is no
GPU, it uses the CPU as the accelerator. Where triton is not installed, an empty module stands for its triton kernels of
expert parallelism, which nobody calls. Where torch does not have the function for timeouts of groups yet, a function
that does nothing stands for it.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from support.ports import free_port

__all__ = [
    "Job",
    "Layout",
    "Samples",
    "TrainState",
    "digests",
    "flat",
    "model_spec",
    "on_cpu",
    "run_processes",
    "same",
    "tokens",
]

VOCABULARY, LAYERS, LENGTH, BATCH = 2048, 2, 16, 2


def on_cpu() -> None:
    """Lets torchtitan run without GPU, triton and the newest torch. Call it before torchtitan is imported."""
    kernels = "torchtitan.distributed.minimal_async_ep.kernels"
    if find_spec("triton") is None and kernels not in sys.modules:
        nothing = ModuleType(kernels)
        nothing.__getattr__ = _nothing  # type: ignore[method-assign]
        sys.modules[kernels] = nothing
    if not hasattr(torch.distributed, "set_timeout"):
        torch.distributed.set_timeout = lambda *_: None  # torchtitan 0.3 calls it; torch 2.13 lacks it
    if not torch.cuda.is_available():
        torch._utils._get_available_device_type = lambda: "cpu"
        torch._utils._get_device_module = lambda _: _HostAsDevice()


class _HostAsDevice:
    """Answers for the host what torchtitan asks of ``torch.cuda``."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name, _nothing)

    def current_device(self) -> int:
        return 0

    def get_device_name(self, device: Any = None) -> str:
        return "host"

    def get_device_properties(self, device: Any = None) -> Any:
        return SimpleNamespace(total_memory=1 << 30)

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        return {}


def _nothing(name: str = "") -> None:
    if name.startswith("__"):
        raise AttributeError(name)


def tokens(index: int, length: int = LENGTH) -> torch.Tensor:
    """Returns the tokens of one sample, by its number, and the token after them."""
    return torch.randint(0, VOCABULARY, (length + 1,), generator=torch.Generator().manual_seed(index))


class Samples(torch.utils.data.IterableDataset[Any]):
    """Samples without end. The state is the number of samples taken so far."""

    def __init__(self, rank: int, num_ranks: int, length: int = LENGTH) -> None:
        self.rank, self.num_ranks, self.length, self.at = rank, num_ranks, length, 0

    def __iter__(self) -> Any:
        while True:
            sample = tokens(self.at * self.num_ranks + self.rank, self.length)
            self.at += 1
            yield {"input": sample[:-1], "positions": torch.arange(self.length)}, sample[1:]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


@dataclass
class Layout:
    """Degrees of parallelism."""

    replicate: int = 1
    shard: int = -1
    tensor: int = 1
    pipeline: int = 1


@dataclass
class TrainState:
    """The state that the trainer itself has."""

    step: int = 0
    ntokens_seen: int = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.ntokens_seen = state["step"], state["ntokens_seen"]


def model_spec() -> Any:
    """Returns torchtitan's llama3 debug model, made smaller, with an attention that also works on CPUs."""
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import model_registry

    spec = model_registry("debugmodel")
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    del spec.model.layers[LAYERS:]
    theirs = spec.parallelize_fn

    def parallelize(*args: Any, **kwargs: Any) -> Any:
        from torch.distributed.fsdp import FSDPModule

        model = theirs(*args, **kwargs)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has only this one
        return model

    spec.parallelize_fn = parallelize
    return spec


@dataclass
class Job:
    """Builds what torchtitan's trainer builds and hands to a checkpoint manager."""

    layout: Layout = field(default_factory=Layout)
    seed: int = 0
    dtype: str = "float32"

    def __post_init__(self) -> None:
        on_cpu()
        import torch.distributed as dist
        from torchtitan.components.dataloader import ParallelAwareDataloader
        from torchtitan.components.loss import CrossEntropyLoss
        from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
        from torchtitan.config import TORCH_DTYPE_MAP, CompileConfig, ParallelismConfig, TrainingConfig
        from torchtitan.distributed import ParallelDims
        from torchtitan.distributed import utils as dist_utils
        from torchtitan.tools.utils import set_default_dtype
        from torchtitan.trainer import Trainer

        parallelism = ParallelismConfig(
            data_parallel_replicate_degree=self.layout.replicate,
            data_parallel_shard_degree=self.layout.shard,
            tensor_parallel_degree=self.layout.tensor,
            pipeline_parallel_degree=self.layout.pipeline,
            pipeline_parallel_schedule="Interleaved1F1B",
            spmd_backend="partial_dtensor",
        )
        training = TrainingConfig(
            local_batch_size=BATCH * self.layout.pipeline,
            seq_len=LENGTH,
            steps=100,
            dtype=self.dtype,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        )
        self.spec = model_spec()
        config = Trainer.Config(model_spec=self.spec, training=training, parallelism=parallelism)
        self.dims = ParallelDims.from_config(parallelism, dist.get_world_size())
        dist_utils.set_spmd_backend(parallelism.spmd_backend)
        self.spec.model.update_from_config(config=config)
        torch.manual_seed(self.seed)
        with torch.device("meta"), set_default_dtype(TORCH_DTYPE_MAP[self.dtype]):
            model = self.spec.model.build()
        how: dict[str, Any] = {
            "parallel_dims": self.dims,
            "training": training,
            "parallelism": parallelism,
            "compile_config": CompileConfig(),
            "ac_config": None,
            "dump_folder": "",
        }
        self.loss = CrossEntropyLoss.Config(global_vocab_size=self.spec.model.vocab_size).build(
            compile_config=CompileConfig()
        )
        if self.layout.pipeline > 1:
            how |= {"device": torch.device("cpu"), "model_config": self.spec.model, "loss_fn": self.loss}
            _, self.model_parts, _, _ = self.spec.pipelining_fn(model, parallelize_fn=self.spec.parallelize_fn, **how)
        else:
            self.model_parts = [self.spec.parallelize_fn(model, **how)]
        for part in self.model_parts:
            part.to_empty(device="cpu")
            with torch.no_grad():
                part.init_weights(buffer_device=None)
            part.train()
        self.optimizers = default_adamw(lr=1e-3).build(model_parts=self.model_parts)
        self.lr_schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(
            optimizers=self.optimizers, training_steps=100
        )
        batch = self.dims.get_mesh("batch") if self.dims.dp_enabled else None
        num_ranks, rank = (1, 0) if batch is None else (batch.size(), batch.get_local_rank())
        self.dataloader = ParallelAwareDataloader(Samples(rank, num_ranks), rank, num_ranks, batch_size=BATCH)
        self.batches = iter(self.dataloader)
        self.context = dist_utils.get_spmd_context(parallel_dims=self.dims)
        self.train_state = TrainState()

    def manager(self, config: Any, folder: Path | str) -> Any:
        """Returns a manager, built as the trainer builds it, with ``folder`` as the dump folder."""
        return config.build(
            dataloader=self.dataloader,
            model_parts=self.model_parts,
            optimizers=self.optimizers,
            lr_schedulers=self.lr_schedulers,
            states={"train_state": self.train_state},
            sd_adapter=self.spec.state_dict_adapter(self.spec.model, None),
            base_folder=str(folder),
        )

    def step(self, manager: Any = None) -> float:
        """Trains one step; returns the loss of this rank."""
        self.optimizers.zero_grad()
        inputs, labels = next(self.batches)
        with self.context():
            logits = self.model_parts[0](inputs["input"])
            loss, _ = self.loss(logits, labels, torch.tensor(float(labels.numel())))
            loss.backward()
        if manager is not None:
            manager.maybe_wait_for_staging()
        self.optimizers.step()
        self.lr_schedulers.step()
        self.train_state.step += 1
        self.train_state.ntokens_seen += labels.numel()
        return float(loss.detach())

    def step_without_loss(self) -> None:
        """Steps the optimizers with random gradients: torch 2.13 lacks the schedules that this PP needs."""
        for part in self.model_parts:
            for parameter in part.parameters():
                parameter.grad = torch.randn_like(parameter)
        self.optimizers.step()
        self.lr_schedulers.step()
        self.train_state.step += 1

    def resume(self) -> None:
        """Continues the data where the loader says. Call it after a load."""
        self.batches = iter(self.dataloader)

    def state(self) -> dict[str, Any]:
        """Returns whole copies of all that a checkpoint must restore. Only ``dataloader`` differs between ranks."""
        state = {"model": {}, "optimizer": self.optimizers.state_dict()}
        for part in self.model_parts:
            state["model"].update(part.state_dict())
        whole = flat(state)
        whole["lr_scheduler"] = self.lr_schedulers.state_dict()
        whole["train_state"] = self.train_state.state_dict()
        whole["dataloader"] = self.dataloader.state_dict()
        whole["rates"] = [group["lr"] for optimizer in self.optimizers for group in optimizer.param_groups]
        return whole


def flat(tree: Any, name: str = "") -> dict[str, Any]:
    """Returns the values by their joined names. Tensors are whole, and copies."""
    from torch.distributed.tensor import DTensor

    if isinstance(tree, dict):
        return {
            key: value for k, v in tree.items() for key, value in flat(v, f"{name}.{k}" if name else str(k)).items()
        }
    if isinstance(tree, DTensor):
        tree = tree.full_tensor()
    return {name: tree.detach().clone() if isinstance(tree, torch.Tensor) else tree}


def digests(state: dict[str, Any]) -> dict[str, str]:
    """Returns hashes of values, to compare with another process. Leaves out ``dataloader``, which differs by rank."""
    return {
        name: hashlib.sha256(
            repr(value).encode() if not isinstance(value, torch.Tensor) else _bytes_of(value)
        ).hexdigest()
        for name, value in state.items()
        if name != "dataloader"
    }


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return (
        f"{tensor.dtype} {tuple(tensor.shape)}".encode()
        + tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    )


def same(left: dict[str, Any], right: dict[str, Any], *, without: tuple[str, ...] = ()) -> None:
    """Raises at the first difference."""
    for name in left.keys() | right.keys():
        if name.split(".", 1)[0] in without:
            continue
        a, b = left[name], right[name]
        if isinstance(a, torch.Tensor):
            assert a.dtype == b.dtype, name
            assert torch.equal(a, b), name
        else:
            assert a == b, (name, a, b)


def run_processes(num_ranks: int, command: list[str], limit_s: float = 150.0, **variables: str) -> None:
    """Runs a command once per rank, with the variables that torchrun sets. If a rank fails, raises its output."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common = {**os.environ, **variables, "OMP_NUM_THREADS": "1", **address}
    processes = []
    try:
        for rank in range(num_ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
            pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            processes.append(subprocess.Popen(command, env=common | own, **pipes))
        said = [process.communicate(timeout=limit_s)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
    for rank, process in enumerate(processes):
        assert process.returncode == 0, f"rank {rank}: ...{said[rank][-6000:]}"
