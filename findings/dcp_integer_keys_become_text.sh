#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# DCP writes integer keys as text: an optimizer that was converted back starts anew, silently.
#
# Versions: torch 2.13.0, torch.distributed.checkpoint and its format_utils.dcp_to_torch_save.
#
# Expected: dcp.load fills {0: ...} where {0: ...} was saved, and dcp_to_torch_save gives back the saved state dict.
# Optimizer.state_dict() has integer keys, so this is the ordinary case.
#
# Seen: three things.
# 1. dcp.load fills tensors under integer keys. A value of another kind is left as it was, and a second entry appears
#    beside it, under the text of the number.
# 2. After dcp_to_torch_save, the optimizer's state has the keys '0' and '1'. Optimizer.load_state_dict accepts them, but
#    they belong to no parameter, so Adam goes on as a fresh Adam.
# 3. The optimizer's state of plain SGD is an empty dict. An empty dict is not saved at all, so after dcp_to_torch_save
#    the entry 'state' is missing and load_state_dict fails.
#
# Who is hurt: whoever saves optimizer.state_dict() as it is, and converts the checkpoint for a single process.
#
# Way round: save by names (get_optimizer_state_dict), or turn the keys of 'state' into integers after conversion.
set -euo pipefail
name=dcp_integer_keys_become_text
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

python3 -m venv venv
venv/bin/pip install -q --disable-pip-version-check torch==2.13.0 numpy==2.4.6

cat > trial.py <<'PY'
import tempfile

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save


def fresh(kind):
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2)
    return model, kind(model.parameters(), lr=0.1)


def step(model, optimizer):
    optimizer.zero_grad()
    (model(torch.tensor([[1.0, -2.0]])) ** 2).sum().backward()
    optimizer.step()


def convert(state_dict):
    folder = tempfile.mkdtemp(dir=".")
    dcp.save(state_dict, checkpoint_id=folder, no_dist=True)
    dcp_to_torch_save(folder, folder + "/converted.pt")
    return torch.load(folder + "/converted.pt", weights_only=True)


folder = tempfile.mkdtemp(dir=".")
dcp.save({"a": {0: 7, 1: torch.ones(1)}}, checkpoint_id=folder, no_dist=True)
target = {"a": {0: 0, 1: torch.zeros(1)}}
dcp.load(target, checkpoint_id=folder, no_dist=True)
print("1. loaded:", target)

model, adam = fresh(torch.optim.Adam)
for _ in range(5):
    step(model, adam)
converted = convert({"optimizer": adam.state_dict()})["optimizer"]
print("2. keys of the state:", list(adam.state_dict()["state"]), "converted:", list(converted["state"]))


def after_one_step(state):
    model, adam = fresh(torch.optim.Adam)
    if state is not None:
        adam.load_state_dict(state)
    step(model, adam)
    return model.weight.detach()


went_on = after_one_step(converted)
print("2. as the saved Adam goes on:", torch.equal(went_on, after_one_step(adam.state_dict())))
print("2. as a fresh Adam starts:", torch.equal(went_on, after_one_step(None)))

model, sgd = fresh(torch.optim.SGD)
converted = convert({"optimizer": sgd.state_dict()})["optimizer"]
print("3. entries:", sorted(sgd.state_dict()), "converted:", sorted(converted))
try:
    sgd.load_state_dict(converted)
except KeyError as error:
    print("3. load_state_dict: KeyError", error)
PY
cat > stated <<'TXT'
1. loaded: {'a': {0: 0, 1: tensor([1.]), '0': 7}}
2. keys of the state: [0, 1] converted: ['0', '1']
2. as the saved Adam goes on: False
2. as a fresh Adam starts: True
3. entries: ['param_groups', 'state'] converted: ['param_groups']
3. load_state_dict: KeyError 'state'
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
