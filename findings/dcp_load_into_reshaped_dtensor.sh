#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# dcp.load fills a reshaped DTensor with wrong elements, where dcp.save refuses the same tensor.
#
# Versions: torch 2.13.0, torch.distributed.checkpoint, 2 ranks of gloo on one machine.
#
# Expected: a DTensor that is sharded by columns can be reshaped to one dim without communication; its placement then is
# _StridedShard, and full_tensor() is right. dcp.load fills it rightly or refuses.
#
# Seen: dcp.save refuses ("overlapping chunks"). dcp.load does not: it takes the shard for one run of neighbouring
# elements, and the tensor holds elements of other places after the load. There is no error.
#
# Who is hurt: whoever loads into flattened views of sharded parameters, such as flat buffers of optimizers.
#
# Way round: load into the tensor before it is reshaped, and reshape it afterwards.
set -euo pipefail
name=dcp_load_into_reshaped_dtensor
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

python3 -m venv venv
venv/bin/pip install -q --disable-pip-version-check torch==2.13.0 numpy==2.4.6

cat > trial.py <<'PY'
import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


def run(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))

    def say(*words):
        if rank == 0:
            print(*words, flush=True)

    values = torch.arange(24.0)
    flat = distribute_tensor(values.reshape(4, 6), mesh, [Shard(1)]).reshape(24)
    say("placement:", type(flat.placements[0]).__name__)
    full = flat.full_tensor()
    say("full_tensor() is right:", torch.equal(full, values))
    try:
        dcp.save({"x": flat}, checkpoint_id=os.path.join(folder, "refused"))
        say("saved")
    except dcp.CheckpointException as error:
        say("save refused:", "overlapping chunks" in str(error))

    place = os.path.join(folder, "plain")
    dcp.save({"x": values}, checkpoint_id=place)
    target = distribute_tensor(torch.zeros(4, 6), mesh, [Shard(1)]).reshape(24)
    dcp.load({"x": target}, checkpoint_id=place)
    full = target.full_tensor()
    say("loaded without an error, equal:", torch.equal(full, values))
    say("loaded:", [int(v) for v in full])
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, args=(folder,), nprocs=2, start_method="fork")
PY
cat > stated <<'TXT'
placement: _StridedShard
full_tensor() is right: True
save refused: True
loaded without an error, equal: False
loaded: [0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7, 8, 6, 7, 8, 9, 10, 11, 9, 10, 11, 12, 13, 14]
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
