#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Megatron-Core forgets a strategy that was registered for its own format before it is used.
#
# Versions: megatron-core 0.16.1, torch 2.13.0, 1 rank of gloo. (Two calls of torch.cuda are replaced, since this runs
# on CPUs.)
#
# Expected: register_default_strategy(action, backend, version, strategy) "adds a given strategy to the registry of
# default strategies", so the strategy is what a lookup of that backend and version gives, and what a save by it calls.
#
# Seen: for ("torch_dist", 1), the format that Megatron writes, it is never used. Each lookup first registers Megatron's
# own strategies again, over the other. There is no error and no warning. Under another name it is found and used.
#
# Who is hurt: whoever registers a faster or a checking strategy at startup, as the registry invites them to.
#
# Way round: hand the strategy to each save() and load(), or register it under a name of your own and ask for that.
set -euo pipefail
name=megatron_forgets_registered_strategy
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
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.base import (
    StrategyAction,
    get_default_strategy,
    register_default_strategy,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

torch.cuda.synchronize = lambda *_: None
torch.cuda.current_device = lambda: "cpu"


class Mine(TorchDistSaveShardedStrategy):
    def save(self, *args):
        print("  mine is called")
        return super().save(*args)


def trial(folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
    for backend in ("torch_dist", "mine"):
        mine = Mine("torch_dist", 1)
        register_default_strategy(StrategyAction.SAVE_SHARDED, backend, 1, mine)
        print(f"registered for {backend}:")
        print("  found again:", get_default_strategy(StrategyAction.SAVE_SHARDED, backend, 1) is mine)
        register_default_strategy(StrategyAction.SAVE_SHARDED, backend, 1, mine)
        place = os.path.join(folder, backend)
        os.mkdir(place)
        state = {"w": dist_checkpointing.ShardedTensor.from_rank_offsets("w", torch.ones(2))}
        dist_checkpointing.save(state, place, sharded_strategy=(backend, 1))
        print("  saved")
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        trial(folder)
PY
cat > stated <<'TXT'
registered for torch_dist:
  found again: False
  saved
registered for mine:
  found again: True
  mine is called
  saved
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
