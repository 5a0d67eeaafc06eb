#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# torch_checkpointing cannot reshard on CPUs: with a resharder, two ranks of gloo cannot even save.
#
# Versions: torch_checkpointing 0.1.1, torch 2.13.0, 1 and 2 ranks of gloo on one machine.
#
# Expected: the package says that the defaults of its asynchronous staging need CUDA, and to configure CPUs explicitly.
# With synchronous saves, which stage nothing, sharded tensors of CPU ranks are then saved, and an item with the
# package's DefaultResharder can be loaded by another number of ranks.
#
# Seen: one rank saves with the resharder, and two ranks save without it. Two ranks with it fail in save(): what they
# exchange about their shards goes through a tensor whose device is "cuda", whatever the process group and the device of
# the state.
#
# Who is hurt: who tests resharding on CPUs, as CI does, and who converts large checkpoints on machines without a GPU.
#
# Way round: none in its configuration. Save and reshard on machines with CUDA, or by torch.distributed.checkpoint.
set -euo pipefail
name=torch_checkpointing_reshards_on_cuda_alone
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

python3 -m venv venv
venv/bin/pip install -q --no-compile --disable-pip-version-check torch==2.13.0 numpy==2.4.6 torch_checkpointing==0.1.1

cat > trial.py <<'PY'
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch_checkpointing import CheckpointManager, ItemSpec
from torch_checkpointing.config import SyncCheckpointSaverConfig
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig


def run(rank, folder, num_ranks):
    store = f"file://{folder}/rendezvous{num_ranks}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_ranks)
    mesh = init_device_mesh("cpu", (num_ranks,))

    def manager_of(spec):
        return CheckpointManager(
            CheckpointManager.Config(
                items={"model": spec},
                storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
                save=SyncCheckpointSaverConfig(),
            )
        )

    def say(*words):
        if rank == 0:
            print(*words, flush=True)

    for title, spec in (("no resharder", ItemSpec()), ("DefaultResharder", ItemSpec(resharder=DefaultResharder()))):
        manager = manager_of(spec)
        try:
            state = {"w": distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])}
            manager.save(os.path.join(folder, f"{num_ranks}_{title}"), {"model": state})
            say(f"{num_ranks} ranks, {title}: saved")
        except (AssertionError, RuntimeError) as error:
            asks = "CUDA" in str(error) or "NVIDIA" in str(error)
            say(f"{num_ranks} ranks, {title}: save() fails for want of CUDA: {asks}")
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory() as folder:
        for num_ranks in (1, 2):
            mp.start_processes(run, args=(folder, num_ranks), nprocs=num_ranks, start_method="fork")
PY
cat > stated <<'TXT'
1 ranks, no resharder: saved
1 ranks, DefaultResharder: saved
2 ranks, no resharder: saved
2 ranks, DefaultResharder: save() fails for want of CUDA: True
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
