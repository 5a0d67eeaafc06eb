#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Megatron-Core takes any strategy for a save, without a word, and writes with its own.
#
# Versions: megatron-core 0.19.2, torch 2.13.0, 1 rank of gloo. (Two calls of torch.cuda are replaced, since this runs
# on CPUs.) Needs Python 3.12.
#
# Expected: save(sharded_strategy=...) is documented as "SaveShardedStrategy, Tuple[str, int], optional", and configures
# how tensors are saved. An object with save() is called; a backend that does not exist, such as ("zarr", 1), is
# refused, as 0.16.1 does ("Cannot find a default strategy").
#
# Seen: whatever is no instance of two classes is replaced by TorchDistSaveShardedStrategy: an object with save(), the
# name of a backend that was removed, a number. The checkpoint is of torch_dist each time, and nothing says so. load()
# does not replace anything: the documented tuple, ("torch_dist", 1), which works with 0.16.1, is an AttributeError.
#
# Who is hurt: whoever has a strategy of their own from older versions: it is not called any more, and the checkpoints
# are somewhere else, or without what it added.
#
# Way round: derive the strategy from TorchDistSaveShardedStrategy, and look at metadata.json after the first save.
set -euo pipefail
name=megatron_save_replaces_strategies
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

# Prints how to call Python 3.12: python3.12, say, or the same through pyenv.
python_of_312() {
  local full
  if python3.12 -c pass 2> /dev/null; then
    command -v python3.12
  elif full=$(pyenv versions --bare 2> /dev/null | grep -m 1 "^3\.12\."); then
    PYENV_VERSION=$full pyenv which python
  else
    echo "$name: needs Python 3.12" >&2
    return 1
  fi
}

python=$(python_of_312)
"$python" -m venv venv
venv/bin/pip install -q --no-compile --disable-pip-version-check \
  torch==2.13.0 numpy==2.4.6 packaging==26.4 psutil==7.2.2
venv/bin/pip install -q --no-compile --no-deps --disable-pip-version-check megatron-core==0.19.2

cat > trial.py <<'PY'
import json
import os
import tempfile

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor

torch.cuda.synchronize = lambda *_: None
torch.cuda.current_device = lambda: "cpu"


class Mine:
    backend = "mine"
    version = 1

    def save(self, *args):
        print("mine is called")


def state(values):
    return {"w": ShardedTensor.from_rank_offsets("w", values)}


def trial(folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
    strategies = {"own": Mine(), "documented": ("torch_dist", 1), "removed": ("zarr", 1), "number": 42}
    place = None
    for title, strategy in strategies.items():
        place = os.path.join(folder, title)
        os.mkdir(place)
        dist_checkpointing.save(state(torch.ones(2)), place, sharded_strategy=strategy)
        with open(os.path.join(place, "metadata.json")) as file:
            print(f"save, {title}: written by", json.load(file)["sharded_backend"])
    for title, strategy in strategies.items():
        try:
            loaded = dist_checkpointing.load(state(torch.zeros(2)), place, sharded_strategy=strategy)
            print(f"load, {title}:", loaded["w"].tolist())
        except AttributeError as error:
            print(f"load, {title}: AttributeError: {error}")
    print("load, none:", dist_checkpointing.load(state(torch.zeros(2)), place)["w"].tolist())
    print("documented:", "Tuple[str, int]" in dist_checkpointing.save.__doc__)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        trial(folder)
PY
cat > stated <<'TXT'
save, own: written by torch_dist
save, documented: written by torch_dist
save, removed: written by torch_dist
save, number: written by torch_dist
load, own: AttributeError: 'Mine' object has no attribute 'load'
load, documented: AttributeError: 'tuple' object has no attribute 'load'
load, removed: AttributeError: 'tuple' object has no attribute 'load'
load, number: AttributeError: 'int' object has no attribute 'load'
load, none: [1.0, 1.0]
documented: True
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
