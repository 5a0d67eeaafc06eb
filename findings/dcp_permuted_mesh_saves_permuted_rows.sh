#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# A model on a mesh whose ranks do not ascend trains rightly, and dcp.save writes its rows in another order.
#
# Versions: torch 2.13.0, torch.distributed.checkpoint, 4 ranks of gloo on one machine.
#
# Expected: DeviceMesh takes ranks in any order, such as [2, 0, 3, 1] to follow the wiring of a machine. Then all of
# torch agrees which rank holds which rows: the forward pass, full_tensor(), and what dcp.save writes.
#
# Seen: collectives take parts by the order in the process group, which sorts its ranks, so fully_shard,
# distribute_tensor and full_tensor() give rank 0 the first rows. compute_local_shape_and_global_offset goes by the
# place in the mesh, so dcp.save says that these are the second part. The forward pass and full_tensor() are right, and
# a load on the same mesh undoes the change. A load into plain tensors, or on a mesh whose ranks ascend, gives the rows
# in another order. There is no error and no warning. distribute_tensor with src_data_rank=None cuts by the place in the
# mesh instead, and full_tensor() of that is in another order at once.
#
# Who is hurt: whoever orders the ranks of a mesh by hand, and then evaluates, exports, or resumes on another mesh.
#
# Way round: order the ranks by how processes are started, so that they ascend along each dim of the mesh. torch 2.15.0
# does the same by default, and its DeviceMesh(preserve_rank_order=True) makes all agree. A checkpoint that is written
# already is right after a load on the same mesh, if it has no replicas; save its full_tensor()s from there.
set -euo pipefail
name=dcp_permuted_mesh_saves_permuted_rows
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
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


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
        return [int(value) for value in tensor]

    rows = torch.arange(4.0)
    for ranks in ([0, 1, 2, 3], [2, 0, 3, 1]):
        say("mesh", ranks)
        mesh = DeviceMesh("cpu", ranks)
        place = os.path.join(folder, f"checkpoint{ranks[0]}")
        tensor = distribute_tensor(rows, mesh, [Shard(0)])
        say("  row that distribute_tensor gives to each rank:", of_each_rank(int(tensor.to_local())))
        offset = compute_local_shape_and_global_offset(rows.shape, mesh, [Shard(0)])[1][0]
        say("  row that each rank has by its offset:        ", of_each_rank(offset))
        full = distribute_tensor(rows, mesh, [Shard(0)], src_data_rank=None).full_tensor()
        say("  full_tensor() with src_data_rank=None:", numbers(full))

        model = torch.nn.Linear(1, 4, bias=False)
        model.weight.data.copy_(rows[:, None])
        fully_shard(model, mesh=mesh)
        say("  forward pass:", numbers(model(torch.ones(1, 1))[0]))
        model.reshard()
        full = model.weight.full_tensor()
        say("  full_tensor():", numbers(full[:, 0]))

        dcp.save({"weight": model.weight}, checkpoint_id=place)
        plain = {"weight": torch.zeros(4, 1)}
        dcp.load(plain, checkpoint_id=place)
        say("  saved and loaded, plain:", numbers(plain["weight"][:, 0]))
        for title, other in (("same mesh", mesh), ("ranks that ascend", DeviceMesh("cpu", [0, 1, 2, 3]))):
            target = distribute_tensor(torch.zeros(4, 1), other, [Shard(0)])
            dcp.load({"weight": target}, checkpoint_id=place)
            full = target.full_tensor()
            say(f"  saved and loaded, {title}:", numbers(full[:, 0]))
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, args=(folder,), nprocs=4, start_method="fork")
PY
cat > stated <<'TXT'
mesh [0, 1, 2, 3]
  row that distribute_tensor gives to each rank: [0, 1, 2, 3]
  row that each rank has by its offset:         [0, 1, 2, 3]
  full_tensor() with src_data_rank=None: [0, 1, 2, 3]
  forward pass: [0, 1, 2, 3]
  full_tensor(): [0, 1, 2, 3]
  saved and loaded, plain: [0, 1, 2, 3]
  saved and loaded, same mesh: [0, 1, 2, 3]
  saved and loaded, ranks that ascend: [0, 1, 2, 3]
mesh [2, 0, 3, 1]
  row that distribute_tensor gives to each rank: [0, 1, 2, 3]
  row that each rank has by its offset:         [1, 3, 0, 2]
  full_tensor() with src_data_rank=None: [1, 3, 0, 2]
  forward pass: [0, 1, 2, 3]
  full_tensor(): [0, 1, 2, 3]
  saved and loaded, plain: [2, 0, 3, 1]
  saved and loaded, same mesh: [0, 1, 2, 3]
  saved and loaded, ranks that ascend: [2, 0, 3, 1]
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
