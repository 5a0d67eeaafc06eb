#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The weights that DeepSpeed's own tool makes of a ZeRO-1 checkpoint lack the frozen parameters.
#
# Versions: deepspeed 0.19.8, torch 2.13.0, 2 ranks of gloo on CPUs.
#
# Expected: zero_to_fp32 gives the whole model, whatever the stage: a model of a frozen and a trained layer, saved with
# ZeRO-1 and with ZeRO-2, gives the same names.
#
# Seen: ZeRO-1 does not record what is frozen (frozen_param_shapes is None), so zero_to_fp32 leaves these weights out,
# without a warning. They are in the checkpoint, in the module's state. With ZeRO-2 they are in the result.
#
# Who is hurt: who trains adapters or single layers with ZeRO-1, and deletes the checkpoint after the conversion.
#
# Way round: take the missing names from "module" of mp_rank_00_model_states.pt.
set -euo pipefail
name=deepspeed_zero1_to_fp32_drops_frozen
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
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[0].requires_grad_(False)
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
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    weights = get_fp32_state_dict_from_zero_checkpoint(f"run{stage}", tag="step")
    module = torch.load(f"run{stage}/step/mp_rank_00_model_states.pt", weights_only=False)["module"]
    print(f"ZeRO-{stage}: in the module {sorted(module)}", flush=True)
    print(f"ZeRO-{stage}: in the result {sorted(weights)}", flush=True)
PY
for stage in 1 2; do venv/bin/python trial.py $stage 2> errors | grep '^ZeRO' || { tail -5 errors; exit 1; }; done | tee seen

cat > expected <<'OUT'
ZeRO-1: in the module ['0.bias', '0.weight', '1.bias', '1.weight']
ZeRO-1: in the result ['1.bias', '1.weight']
ZeRO-2: in the module ['0.bias', '0.weight', '1.bias', '1.weight']
ZeRO-2: in the result ['0.bias', '0.weight', '1.bias', '1.weight']
OUT
diff expected seen && echo "$name: as described"
