#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# With replicas on a mesh whose ranks do not ascend, dcp.save writes half of each weight twice and loses the other half.
#
# Versions: torch 2.13.0, torch.distributed.checkpoint, 4 ranks of gloo on one machine.
#
# Expected: HSDP on the mesh [[0, 1], [3, 2]], where the second replica runs the other way round as in a ring, trains
# and is saved like HSDP on [[0, 1], [2, 3]].
#
# Seen: it trains like it. In the second row, ranks 2 and 3 hold the parts by the order in the process group, which is
# sorted, and dcp.save takes their offsets from the place in the mesh, which is the other way round. So what should be
# two copies of one part differ, and dcp.save keeps one of them by how many bytes each rank has to write. With a step
# counter beside the weights, it keeps the same rows twice: the others are in no file. Without it, half of the weights
# are saved rightly, and the others with rows that changed places. Nothing says that copies differ. A load on the same
# mesh does not undo it, and can give the two replicas different weights.
#
# Who is hurt: whoever orders the ranks of replicas by hand. The run looks well until the first resume, and then there
# is no right checkpoint.
#
# Way round: let ranks ascend along each dim of the mesh. torch 2.15.0 has DeviceMesh(preserve_rank_order=True), with
# which all agree; without it, it does the same.
set -euo pipefail
name=dcp_permuted_replicas_lose_rows
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

python3 -m venv venv
venv/bin/pip install -q --no-compile --disable-pip-version-check torch==2.13.0 numpy==2.4.6

cat > trial.py <<'PY'
import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard


def run(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=4)

    def say(*words):
        if rank == 0:
            print(*words, flush=True)

    def of_each_rank(value):
        values = [None] * 4
        dist.all_gather_object(values, value)
        return values

    def numbers(tensor):
        return [int(value) for value in tensor.flatten()]

    rows = torch.arange(4.0)[:, None]
    for ranks in ([[0, 1], [2, 3]], [[0, 1], [3, 2]]):
        say("mesh", ranks)
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("replicate", "shard"))
        model = torch.nn.Sequential(*(torch.nn.Linear(1, 4, bias=False) for _ in range(2)))
        for layer in model:
            layer.weight.data.copy_(rows)
            fully_shard(layer, mesh=mesh)
        forward = [numbers(layer(torch.ones(1, 1))) for layer in model]
        say("  forward pass:", *forward)
        for layer in model:
            layer.reshard()
        say("  full_tensor():", *[numbers(layer.weight.full_tensor()) for layer in model])
        places = {title: os.path.join(folder, f"{ranks[1][0]}_{title}") for title in ("weights", "weights and a step")}
        for title, place in places.items():
            others = {"step": torch.ones(1)} if "step" in title else {}
            dcp.save({**model.state_dict(), **others}, checkpoint_id=place)
        for title, place in places.items():
            plain = {key: torch.zeros(4, 1) for key in model.state_dict()}
            dcp.load(plain, checkpoint_id=place)
            say(f"  {title}, saved and loaded, plain:", *[numbers(value) for value in plain.values()])
            dcp.load(model.state_dict(), checkpoint_id=place)
            first = numbers(model[0].weight.full_tensor())
            say("    on the same mesh, the first weight on each rank:", *of_each_rank(first))
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, args=(folder,), nprocs=4, start_method="fork")
PY
cat > stated <<'TXT'
mesh [[0, 1], [2, 3]]
  forward pass: [0, 1, 2, 3] [0, 1, 2, 3]
  full_tensor(): [0, 1, 2, 3] [0, 1, 2, 3]
  weights, saved and loaded, plain: [0, 1, 2, 3] [0, 1, 2, 3]
    on the same mesh, the first weight on each rank: [0, 1, 2, 3] [0, 1, 2, 3] [0, 1, 2, 3] [0, 1, 2, 3]
  weights and a step, saved and loaded, plain: [0, 1, 2, 3] [0, 1, 2, 3]
    on the same mesh, the first weight on each rank: [0, 1, 2, 3] [0, 1, 2, 3] [0, 1, 2, 3] [0, 1, 2, 3]
mesh [[0, 1], [3, 2]]
  forward pass: [0, 1, 2, 3] [0, 1, 2, 3]
  full_tensor(): [0, 1, 2, 3] [0, 1, 2, 3]
  weights, saved and loaded, plain: [0, 1, 2, 3] [2, 3, 0, 1]
    on the same mesh, the first weight on each rank: [0, 1, 2, 3] [0, 1, 2, 3] [2, 3, 0, 1] [2, 3, 0, 1]
  weights and a step, saved and loaded, plain: [0, 1, 0, 1] [2, 3, 2, 3]
    on the same mesh, the first weight on each rank: [0, 1, 0, 1] [0, 1, 0, 1] [0, 1, 0, 1] [0, 1, 0, 1]
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
