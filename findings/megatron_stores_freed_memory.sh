#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Megatron-Core's optimizer stores freed memory in the checkpoint, so two saves of one state differ.
#
# Versions: megatron-core 0.16.1, torch 2.13.0, 1 rank of gloo, distrib_optim_sharding_type "dp_reshardable". (Some
# calls of torch.cuda are replaced, since this runs on CPUs.)
#
# Expected: a checkpoint holds the state and nothing else. Where a format needs padding, that is zeros: two saves of one
# state have the same values, and no value is NaN if none is in the state.
#
# Seen: each parameter's part of a bucket starts at a multiple of 64 elements, and the gaps are stored too, in tensors
# that torch.empty makes. What was in that memory before, such as a tensor that has been freed, is in the file. With
# torch.use_deterministic_algorithms(True), which fills such memory, they are NaN. "fully_reshardable" has no gaps.
#
# Who is hurt: whoever compares checkpoints or their digests, looks for NaN in them, stores only what has changed, or
# gives a checkpoint away and not what else was in memory.
#
# Way round: "fully_reshardable", or leave out what lies between parameters in a comparison.
set -euo pipefail
name=megatron_stores_freed_memory
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

python3 -m venv venv
venv/bin/pip install -q --no-compile --disable-pip-version-check \
  torch==2.13.0 numpy==2.4.6 psutil==7.2.2 packaging==26.4 einops==0.8.2
venv/bin/pip install -q --no-compile --no-deps --disable-pip-version-check megatron-core==0.16.1

cat > trial.py <<'PY'
import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.distributed.checkpoint.metadata import TensorStorageMetadata


def take_cpu_for_cuda():
    def without_device(make):
        def made(*args, device=None, **options):
            return make(*args, device=None if str(device).startswith("cuda") else device, **options)

        return made

    kind = torch.Tensor.type
    torch.Tensor.type = lambda self, *args, **options: (
        kind(self, *args, **options) if args or options else kind(self).replace("torch.", "torch.cuda.")
    )
    torch.Tensor.cuda = lambda self, *args, **options: self
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.tensor, torch.zeros = without_device(torch.tensor), without_device(torch.zeros)


class Model(MegatronModule):
    def __init__(self, config):
        super().__init__(config)
        self.linear = torch.nn.Linear(5, 3)


def optimizer_tensors_of(place):
    """Returns one after another what the checkpoint has of each parameter, exp_avg and exp_avg_sq."""
    described = dcp.FileSystemReader(place).read_metadata().state_dict_metadata
    loaded = {
        key: torch.zeros(value.size, dtype=value.properties.dtype)
        for key, value in described.items()
        if key.startswith("optimizer.") and isinstance(value, TensorStorageMetadata) and value.size
    }
    dcp.load(loaded, checkpoint_id=place)
    return torch.cat([value.flatten() for value in loaded.values()])


def trial(folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
    take_cpu_for_cuda()
    parallel_state.initialize_model_parallel()
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    model = Model(config)
    parallel = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True), model)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=0.01, use_distributed_optimizer=True), [parallel]
    )
    for parameter in model.parameters():
        parameter.main_grad.fill_(1.0)
    optimizer.step()

    def stored(kind, number):
        metadata = {"distrib_optim_sharding_type": kind}
        state = {"model": model.sharded_state_dict(metadata=metadata)}
        used = [torch.full((size,), number) for size in range(1, 200)]
        del used
        state["optimizer"] = optimizer.sharded_state_dict(state["model"], metadata=metadata)
        place = os.path.join(folder, f"{kind}_{number}")
        os.mkdir(place)
        dist_checkpointing.save(state, place)
        return optimizer_tensors_of(place)

    for kind in ("fully_reshardable", "dp_reshardable"):
        numbers = [float(1000 + count) for count in range(10)]
        saves = [stored(kind, number) for number in numbers]
        print(f"{kind}: {len(saves[0])} elements, for 3 tensors each of a parameter of 15 and one of 3")
        alike = all(torch.equal(save.view(torch.int32), saves[0].view(torch.int32)) for save in saves)
        print("  ten saves hold the same bytes:", alike)
        print("  some hold a number of freed tensors:", any(bool((save == n).any()) for n in numbers for save in saves))
        torch.use_deterministic_algorithms(True)
        print("  NaN with deterministic algorithms:", int(stored(kind, 7.0).isnan().sum()))
        torch.use_deterministic_algorithms(False)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        trial(folder)
PY
cat > stated <<'TXT'
fully_reshardable: 54 elements, for 3 tensors each of a parameter of 15 and one of 3
  ten saves hold the same bytes: True
  some hold a number of freed tensors: False
  NaN with deterministic algorithms: 0
dp_reshardable: 237 elements, for 3 tensors each of a parameter of 15 and one of 3
  ten saves hold the same bytes: False
  some hold a number of freed tensors: True
  NaN with deterministic algorithms: 183
TXT

if ! venv/bin/python -W ignore trial.py > seen 2> stderr; then
  cat seen stderr >&2
  echo "$name: the trial itself failed" >&2
  exit 1
fi
cat seen
if ! diff -u stated seen >&2; then
  echo "$name: the behaviour is no longer as stated" >&2
  exit 1
fi
echo "$name: as stated"
