#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# A tensor that is asked for where the checkpoint has a number stays unfilled, without an error.
#
# Versions: torch 2.13.0, torch.distributed.checkpoint.
#
# Expected: dcp.load refuses both ways, if one side is a tensor and the other a Python number.
#
# Seen: a number asked for where a tensor is stored raises. A tensor asked for where a number is stored does not: the
# entry of the dict becomes the number, and the tensor, which a model or an optimizer may hold, keeps its old values.
#
# Who is hurt: code that turned a counter or a scale from a float into a buffer, as torch itself did with Adam's step.
# With an old checkpoint, the live buffer is silently the initial one.
#
# Way round: after dcp.load, compare the types of the entries with those before, or hand the dict on to load_state_dict.
set -euo pipefail
name=dcp_object_leaves_tensor_unfilled
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

python3 -m venv venv
venv/bin/pip install -q --disable-pip-version-check torch==2.13.0 numpy==2.4.6

cat > trial.py <<'PY'
import tempfile

import torch
import torch.distributed.checkpoint as dcp


def load(saved, target):
    folder = tempfile.mkdtemp(dir=".")
    dcp.save({"scale": saved}, checkpoint_id=folder, no_dist=True)
    state = {"scale": target}
    try:
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    except dcp.CheckpointException as error:
        return "raises " + ", ".join(type(cause).__name__ for cause, _ in error.failures.values())
    return f"loads, the entry is {state['scale']}, what was handed over is {target}"


print("tensor saved, number asked:", load(torch.tensor(3.0), 0.0))
print("number saved, tensor asked:", load(3.0, torch.zeros(())))
PY
cat > stated <<'TXT'
tensor saved, number asked: raises ValueError
number saved, tensor asked: loads, the entry is 3.0, what was handed over is 0.0
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
