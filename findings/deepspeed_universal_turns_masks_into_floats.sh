#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# A universal checkpoint of DeepSpeed has boolean and integer buffers as float32.
#
# Versions: deepspeed 0.19.8, torch 2.13.0, 2 ranks of gloo on CPUs.
#
# Expected: ds_to_universal changes how tensors are laid out, not what they are: a mask stays boolean, an int64 counter
# keeps its value.
#
# Seen: of a ZeRO-2 checkpoint, every buffer is written to zero/NAME/fp32.pt as float32. The mask is floats, and the
# counter 2^24 + 1 has become 2^24: floats of 32 bits have no such number.
#
# Who is hurt: models with masks, ids or counters in buffers (batch norms count batches), which are loaded on another
# number of ranks by way of the universal format.
#
# Way round: take buffers from "module" of mp_rank_00_model_states.pt, which is beside them unchanged.
set -euo pipefail
name=deepspeed_universal_turns_masks_into_floats
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

python3 -m venv venv
venv/bin/pip install -q --no-compile --disable-pip-version-check torch==2.13.0 numpy==2.4.6 setuptools==81.0.0
DS_BUILD_OPS=0 venv/bin/pip install -q --no-compile --no-build-isolation --disable-pip-version-check deepspeed==0.19.8

cat > trial.py <<'PY'
import os
import sys

os.environ["DS_ACCELERATOR"] = "cpu"

import torch
import torch.multiprocessing as mp


def run(rank, stage):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29631")
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    model.register_buffer("mask", torch.tensor([True, False]))
    model.register_buffer("count", torch.tensor([2**24 + 1]))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = torch.optim.AdamW(trained, foreach=False)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    engine.backward(engine(torch.ones(2, 4)).square().mean())
    engine.step()
    engine.save_checkpoint(f"run{stage}", tag="step")


if __name__ == "__main__":
    stage = int(sys.argv[1])
    mp.spawn(run, (stage,), 2)
    import argparse

    from deepspeed.checkpoint.ds_to_universal import main

    options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": True}
    main(argparse.Namespace(input_folder="run2/step", output_folder="universal", inject_missing_state=True, **options))
    module = torch.load("run2/step/mp_rank_00_model_states.pt", weights_only=False)["module"]
    for key in ("mask", "count"):
        stored = torch.load(f"universal/zero/{key}/fp32.pt", weights_only=False)["param"]
        print(f"ZeRO-2: {key}: {module[key].dtype} {module[key].tolist()} became {stored.dtype} {stored.tolist()}")
PY
for stage in 2; do venv/bin/python trial.py $stage 2> errors | grep '^ZeRO' || { tail -5 errors; exit 1; }; done | tee seen

cat > expected <<'OUT'
ZeRO-2: mask: torch.bool [True, False] became torch.float32 [1.0, 0.0]
ZeRO-2: count: torch.int64 [16777217] became torch.float32 [16777216.0]
OUT
diff expected seen && echo "$name: as described"
