#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# huggingface_hub leaves a tensor out of the file if it is a slice of another, and notes it as another name of the whole.
#
# Versions: huggingface_hub 2.4.0, safetensors 0.8.0, torch 2.13.0.
#
# Expected: save_torch_state_dict stores one copy of tensors that are the same, and both of two tensors that differ in
# shape, even if they share memory.
#
# Seen: a state dict with a table and its first rows becomes a file with the table alone. The metadata say that `head`
# is `table`. Reading gives no `head`; whoever follows the note gets a tensor of another shape. There is no error. The
# key is removed from the caller's dict, too, so a second save or a comparison afterwards does not show the loss.
#
# Who is hurt: models that keep a view of a larger parameter in their state dict (a shared vocabulary, a truncated
# positional table, slices of a fused matrix), and tools that rebuild a state dict from the file.
#
# Way round: clone() the slices before saving.
set -euo pipefail
name=hub_save_drops_slices
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

python3 -m venv venv
venv/bin/pip install -q --no-compile --disable-pip-version-check torch==2.13.0 numpy==2.4.6 huggingface_hub==2.4.0 safetensors==0.8.0

cat > trial.py <<'PY'
import tempfile

import torch
from huggingface_hub import load_state_dict_from_file, save_torch_state_dict
from safetensors import safe_open


def trial(title, state_dict):
    folder = tempfile.mkdtemp(dir=".")
    shapes = {key: list(value.shape) for key, value in state_dict.items()}
    save_torch_state_dict(state_dict, folder)
    path = folder + "/model.safetensors"
    with safe_open(path, "pt") as file:
        note = {key: value for key, value in file.metadata().items() if key != "format"}
    print(f"{title}: handed over {shapes}, the caller's dict then has", list(state_dict))
    print(f"{title}: found", {key: list(value.shape) for key, value in load_state_dict_from_file(path).items()}, note)


table = torch.arange(6.0).reshape(3, 2)
trial("same tensor", {"table": table, "tied": table})
trial("slice", {"table": table, "head": table[:2]})
trial("clone", {"table": table, "head": table[:2].clone()})
PY
cat > stated <<'TXT'
same tensor: handed over {'table': [3, 2], 'tied': [3, 2]}, the caller's dict then has ['table']
same tensor: found {'table': [3, 2]} {'tied': 'table'}
slice: handed over {'table': [3, 2], 'head': [2, 2]}, the caller's dict then has ['table']
slice: found {'table': [3, 2]} {'head': 'table'}
clone: handed over {'table': [3, 2], 'head': [2, 2]}, the caller's dict then has ['table', 'head']
clone: found {'head': [2, 2], 'table': [3, 2]} {}
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
