#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# DCP asks a model for its state dict only at the top level; one level deeper it pickles the whole model.
#
# Versions: torch 2.13.0, torch.distributed.checkpoint.
#
# Expected: the docs say that for each Stateful object in the dict, save calls state_dict() and load calls
# load_state_dict(). So {"train": {"model": model}} works like {"model": model}.
#
# Seen: it is silently otherwise. The nested model becomes one object without shards. dcp.load puts a new model into the
# dict, and the live model keeps its values.
#
# Who is hurt: whoever groups the state by parts ({"actor": {...}, "critic": {...}}). The loss after a resume is that of
# a fresh model.
#
# Way round: hand over model.state_dict() yourself below the top level.
set -euo pipefail
name=dcp_nested_stateful_is_pickled
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

python3 -m venv venv
venv/bin/pip install -q --disable-pip-version-check torch==2.13.0 numpy==2.4.6

cat > trial.py <<'PY'
import tempfile

import torch
import torch.distributed.checkpoint as dcp


def model(value):
    linear = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(linear.weight, value)
    return linear


folder = tempfile.mkdtemp(dir=".")
dcp.save({"top": model(5.0), "train": {"model": model(5.0)}}, checkpoint_id=folder, no_dist=True)
for key, entry in sorted(dcp.FileSystemReader(folder).read_metadata().state_dict_metadata.items()):
    print("stored:", key, type(entry).__name__)

top, nested = model(0.0), model(0.0)
state = {"top": top, "train": {"model": nested}}
dcp.load(state, checkpoint_id=folder, no_dist=True)
print("live model at the top:", top.weight.item())
print("live model below:", nested.weight.item())
print("the dict still holds the live model:", state["train"]["model"] is nested)
PY
cat > stated <<'TXT'
stored: top.weight TensorStorageMetadata
stored: train.model BytesStorageMetadata
live model at the top: 5.0
live model below: 0.0
the dict still holds the live model: False
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
