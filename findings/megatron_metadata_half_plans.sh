#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Nearly half of the .metadata that Megatron-Core writes is the save plans of all ranks.
#
# Versions: megatron-core 0.16.1, torch 2.13.0, 1, 2 and 4 ranks of gloo. (Two calls of torch.cuda are replaced, since
# this runs on CPUs.)
#
# Expected: torch_dist is DCP's format, so .metadata describes the tensors and where their shards lie, as stock DCP's
# does, and has about its size.
#
# Seen: the pickle holds one more attribute, all_local_plans: every write item of every rank, for the cache of a later
# save. It is nearly as large as all the rest together, with 1, 2 and 4 ranks alike. dcp.load reads and unpickles the
# whole file on every rank, and loads as well without the plans.
#
# Who is hurt: large jobs, whose .metadata has many MB. Each rank reads it twice as long, and holds it in memory.
#
# Way round: for loads by stock DCP, unpickle .metadata once, delete all_local_plans, and write it back.
set -euo pipefail
name=megatron_metadata_half_plans
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

python3 -m venv venv
venv/bin/pip install -q --no-compile --disable-pip-version-check torch==2.13.0 numpy==2.4.6 psutil==7.2.2 packaging==26.4 einops==0.8.2
venv/bin/pip install -q --no-compile --no-deps --disable-pip-version-check megatron-core==0.16.1

cat > trial.py <<'PY'
import os
import pickle
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp

torch.cuda.synchronize = lambda *_: None
torch.cuda.current_device = lambda: "cpu"


def run(rank, folder, num_ranks):
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=num_ranks)
    from megatron.core import dist_checkpointing

    place = os.path.join(folder, "checkpoint")
    os.makedirs(place, exist_ok=True)
    dist.barrier()
    state = {
        key: dist_checkpointing.ShardedTensor.from_rank_offsets(key, torch.ones(4), (0, rank, num_ranks))
        for key in (f"w{i}" for i in range(50))
    }
    dist_checkpointing.save(state, place)
    if rank == 0:
        with open(os.path.join(place, ".metadata"), "rb") as file:
            metadata = pickle.load(file)
        plans_bytes = len(pickle.dumps(metadata.all_local_plans))
        share = plans_bytes / os.path.getsize(os.path.join(place, ".metadata"))
        print(f"{num_ranks} ranks: plans are over 45 % of .metadata: {share > 0.45}", flush=True)
        del metadata.all_local_plans
        with open(os.path.join(place, ".metadata"), "wb") as file:
            pickle.dump(metadata, file)
    dist.barrier()
    target = {"w0": torch.zeros(4 * num_ranks)}
    dcp.load(target, checkpoint_id=place)
    if rank == 0:
        print("without them, stock DCP still loads:", bool(target["w0"].all()), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    for num_ranks in (1, 2, 4):
        with tempfile.TemporaryDirectory() as folder:
            mp.start_processes(run, args=(folder, num_ranks), nprocs=num_ranks, start_method="fork")
PY
cat > stated <<'TXT'
1 ranks: plans are over 45 % of .metadata: True
without them, stock DCP still loads: True
2 ranks: plans are over 45 % of .metadata: True
without them, stock DCP still loads: True
4 ranks: plans are over 45 % of .metadata: True
without them, stock DCP still loads: True
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
