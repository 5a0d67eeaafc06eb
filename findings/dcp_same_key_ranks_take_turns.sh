#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# If ranks save different values under one key, the checkpoint takes some from one rank and some from another.
#
# Versions: torch 2.13.0, torch.distributed.checkpoint, 2 ranks of gloo on one machine.
#
# Expected: rank 0 is the coordinator, so a value that is not sharded comes from rank 0. A mistake (values that differ
# by rank under one key) then gives the state of rank 0 on all ranks: wrong for the others, but one consistent state.
#
# Seen: the copies are shared out so that ranks write about as many bytes. Of four texts, rank 0's a and c are kept and
# rank 1's b and d. A random state can come from one rank and its step counter from another. Which rank wins for a key
# depends on the sizes of the keys before it, so a new key changes the others. No message says that copies differ.
#
# Who is hurt: whoever saves random states, data loader positions or timers without the rank in the key.
#
# Way round: put the rank into the key of whatever differs by rank. DefaultSavePlanner(dedup_save_to_lowest_rank=True)
# takes all from rank 0.
set -euo pipefail
name=dcp_same_key_ranks_take_turns
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
from torch.distributed.checkpoint import DefaultSavePlanner


def run(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)

    def trial(title, state, target, planner=None):
        place = os.path.join(folder, title.replace(" ", "_"))
        dcp.save(state, checkpoint_id=place, planner=planner)
        dcp.load(target, checkpoint_id=place)
        if rank == 0:
            print(f"{title}: {target}", flush=True)

    def texts():
        return {key: f"rank {rank}" for key in "abcd"}

    trial("four texts", texts(), {key: "" for key in "abcd"})
    state = {"random": torch.full((4,), float(rank)), "step": rank}
    trial("tensor and number", state, {"random": torch.zeros(4), "step": None})
    lowest = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    trial("lowest rank", texts(), {key: "" for key in "abcd"}, lowest)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, args=(folder,), nprocs=2, start_method="fork")
PY
cat > stated <<'TXT'
four texts: {'a': 'rank 0', 'b': 'rank 1', 'c': 'rank 0', 'd': 'rank 1'}
tensor and number: {'random': tensor([0., 0., 0., 0.]), 'step': 1}
lowest rank: {'a': 'rank 0', 'b': 'rank 0', 'c': 'rank 0', 'd': 'rank 0'}
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
