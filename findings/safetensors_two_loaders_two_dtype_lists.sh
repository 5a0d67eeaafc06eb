#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# safetensors reads MX scales from a file, but not from the same bytes in memory.
#
# Versions: torch 2.13.0, numpy 2.4.6, ml_dtypes 0.6.0, safetensors 0.8.0.
#
# Expected: load(bytes) and load_file(path) are two ways to the same tensors.
#
# Seen: they know different dtypes. float8_e8m0fnu (the scales of MX formats) and float4_e2m1fn_x2 are saved and load
# from a file; load() raises KeyError. The flavour for NumPy has the same gap with bfloat16.
#
# Who is hurt: servers and downloaders that hold a file in memory (object stores, tests, weight transfer between
# processes). They fail for MX checkpoints that all other tools read.
#
# Way round: write the bytes to a file (a RAM disk will do) and use load_file.
set -euo pipefail
name=safetensors_two_loaders_two_dtype_lists
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

python3 -m venv venv
venv/bin/pip install -q --no-compile --disable-pip-version-check torch==2.13.0 numpy==2.4.6 ml_dtypes==0.6.0 safetensors==0.8.0

cat > trial.py <<'PY'
import ml_dtypes
import numpy
import safetensors.numpy
import safetensors.torch
import torch


def trial(title, flavour, value):
    flavour.save_file({"x": value}, "x.safetensors")
    same_bytes = flavour.save({"x": value})
    results = []
    for call, source in ((flavour.load_file, "x.safetensors"), (flavour.load, same_bytes)):
        try:
            results.append(f"{call.__name__}: {call(source)['x'].dtype}")
        except KeyError as error:
            results.append(f"{call.__name__}: KeyError {error}")
    print(f"{title}:", *results, sep="  ")


for dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2):
    trial(str(dtype), safetensors.torch, torch.zeros(2, 2, dtype=torch.uint8).view(dtype))
trial("numpy bfloat16", safetensors.numpy, numpy.ones(2, ml_dtypes.bfloat16))
PY
cat > stated <<'TXT'
torch.float8_e4m3fn:  load_file: torch.float8_e4m3fn  load: torch.float8_e4m3fn
torch.float8_e8m0fnu:  load_file: torch.float8_e8m0fnu  load: KeyError 'F8_E8M0'
torch.float4_e2m1fn_x2:  load_file: torch.float4_e2m1fn_x2  load: KeyError 'F4'
numpy bfloat16:  load_file: bfloat16  load: KeyError 'BF16'
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
