#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The state dict of a 4-bit layer of bitsandbytes has a tensor whose shape depends on the weights.
#
# Versions: bitsandbytes 0.50.2, torch 2.13.0 on the CPU.
#
# Expected: two layers of one configuration have state dicts of equal shapes, so a fresh one is a template for dcp.load.
#
# Seen: with compress_statistics (the default), `weight.quant_state.bitsandbytes__nf4` is JSON as a uint8 tensor, and it
# has the mean of the scales as a decimal number. 0.0 takes 3 bytes, 0.0010000000474974513 takes 21. dcp.load of one
# layer into another then fails for a mismatch of sizes, or works by chance.
#
# Who is hurt: QLoRA users who save the whole model with DCP, or check shapes before a load.
#
# Way round: load these entries as whole tensors (with torch.load or safetensors), or leave the frozen base model out
# of the checkpoint.
set -euo pipefail
name=bitsandbytes_shape_depends_on_values
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

python3 -m venv venv
venv/bin/pip install -q --no-compile --disable-pip-version-check torch==2.13.0 numpy==2.4.6 packaging==26.4
venv/bin/pip install -q --no-compile --no-deps --disable-pip-version-check bitsandbytes==0.50.2

cat > trial.py <<'PY'
import tempfile

import bitsandbytes
import torch
import torch.distributed.checkpoint as dcp

KEY = "weight.quant_state.bitsandbytes__nf4"


def state(value):
    layer = bitsandbytes.nn.Linear4bit(64, 64, bias=False, quant_type="nf4")
    torch.nn.init.constant_(layer.weight, value)
    return layer.to("cpu").state_dict()


saved, other = state(0.001), state(0.0)
print("entries of other shapes:", [key for key in saved if saved[key].shape != other[key].shape])
for each in (saved, other):
    print(tuple(each[KEY].shape), bytes(each[KEY].tolist()).decode()[-40:])

folder = tempfile.mkdtemp(dir=".")
dcp.save(saved, checkpoint_id=folder, no_dist=True)
try:
    dcp.load(other, checkpoint_id=folder, no_dist=True)
    print("loaded")
except dcp.CheckpointException as error:
    print("dcp.load:", *(f"{type(cause).__name__}: {cause}" for cause, _ in error.failures.values()))
PY
cat > stated <<'TXT'
entries of other shapes: ['weight.quant_state.bitsandbytes__nf4']
(169,)  "nested_offset": 0.0010000000474974513}
(151,) dtype": "float32", "nested_offset": 0.0}
dcp.load: ValueError: Size mismatch between saved torch.Size([169]) and current: torch.Size([151]) for weight.quant_state.bitsandbytes__nf4
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
