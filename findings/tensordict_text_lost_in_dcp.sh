#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# A TensorDict that goes through DCP keeps its tensors and silently loses its text.
#
# Versions: torch 2.13.0, tensordict 0.15.3.
#
# Expected: TensorDict has state_dict and load_state_dict, so dcp.save and dcp.load restore all of it, as torch.save of
# its state dict does.
#
# Seen: text and other values that are no tensors are not entries of that state dict. They are in the attribute
# _metadata of the OrderedDict. torch.save pickles the attribute; DCP flattens the dict and drops it. After dcp.load
# the tensors are the saved ones and the text is that of the target.
#
# Who is hurt: users of TorchRL and TensorDict who keep prompts, names or settings beside tensors (NonTensorData).
#
# Way round: save the values that are no tensors under keys of their own.
set -euo pipefail
name=tensordict_text_lost_in_dcp
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

python3 -m venv venv
venv/bin/pip install -q --no-compile --disable-pip-version-check torch==2.13.0 numpy==2.4.6 tensordict==0.15.3

cat > trial.py <<'PY'
import io
import tempfile

import torch
import torch.distributed.checkpoint as dcp
from tensordict import NonTensorData, TensorDict


def make(text, number):
    return TensorDict({"prompt": NonTensorData(text), "reward": torch.full((2,), number)}, [2])


def show(title, loaded):
    print(f"{title}: prompt {loaded['prompt']!r}, reward {loaded['reward'].tolist()}")


saved = make("saved", 1.0)
print("entries of the state dict:", list(saved.state_dict()))

buffer = io.BytesIO()
torch.save(saved.state_dict(), buffer)
buffer.seek(0)
target = make("target", 0.0)
target.load_state_dict(torch.load(buffer, weights_only=False))
show("torch.save", target)

folder = tempfile.mkdtemp(dir=".")
dcp.save({"data": saved}, checkpoint_id=folder, no_dist=True)
target = make("target", 0.0)
dcp.load({"data": target}, checkpoint_id=folder, no_dist=True)
show("DCP", target)
PY
cat > stated <<'TXT'
entries of the state dict: ['reward']
torch.save: prompt 'saved', reward [1.0, 1.0]
DCP: prompt 'target', reward [1.0, 1.0]
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
