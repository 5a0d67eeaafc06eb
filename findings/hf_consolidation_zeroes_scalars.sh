#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# DCP's writer for Hugging Face's format turns tensors without dims into 0 when it consolidates.
#
# Versions: torch 2.13.0, safetensors 0.8.0; torch.distributed.checkpoint.HuggingFaceStorageWriter.
#
# Expected: enable_consolidation=True joins the shards into files with the same values.
#
# Seen: the shards are right. In the joined file, each tensor without dims (a logit scale, a counter, the scale of a
# quantized weight) is 0: the place is reserved and nothing is copied into it. There is no error. The same step raises
# for integer tensors, since it asks torch.finfo for their size.
#
# Who is hurt: whoever exports models with scalar parameters or per-tensor scales. The export loads everywhere, and
# the model is broken.
#
# Way round: compare the joined file with the shards, or consolidate with another tool.
set -euo pipefail
name=hf_consolidation_zeroes_scalars
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

python3 -m venv venv
venv/bin/pip install -q --no-compile --disable-pip-version-check torch==2.13.0 numpy==2.4.6 safetensors==0.8.0

cat > trial.py <<'PY'
import os
import tempfile

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageWriter


def export(state_dict):
    folder = tempfile.mkdtemp(dir=".")
    writer = HuggingFaceStorageWriter(
        folder,
        fqn_to_index_mapping=dict.fromkeys(state_dict, 1),
        save_distributed=True,
        enable_consolidation=True,
    )
    dcp.save(state_dict, storage_writer=writer, no_dist=True)
    return folder


def read(folder):
    names = [n for n in os.listdir(folder) if n.endswith(".safetensors")]
    return {k: v.tolist() for n in names for k, v in sorted(safetensors.torch.load_file(os.path.join(folder, n)).items())}


folder = export({"logit_scale": torch.tensor(3.0), "scale": torch.tensor(1.5, dtype=torch.bfloat16), "w": torch.ones(2)})
print("shards:", read(os.path.join(folder, "sharded")))
print("joined:", read(folder))
try:
    export({"position_ids": torch.arange(3), "w": torch.ones(2)})
    print("integers: joined")
except dcp.CheckpointException as error:
    print("integers:", *(f"{type(cause).__name__}: {str(cause)[:51]}" for cause, _ in error.failures.values()))
PY
cat > stated <<'TXT'
shards: {'logit_scale': 3.0, 'scale': 1.5, 'w': [1.0, 1.0]}
joined: {'logit_scale': 0.0, 'scale': 0.0, 'w': [1.0, 1.0]}
integers: TypeError: torch.finfo() requires a floating point input type.
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
