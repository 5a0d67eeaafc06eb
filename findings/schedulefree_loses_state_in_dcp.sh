#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# A resume of Schedule-Free with DCP silently loses the optimizer's state.
#
# Versions: torch 2.13.0, schedulefree 1.4.1.
#
# Expected: the usual order works: build the optimizer, call its train() as its docs ask, make the template with
# get_optimizer_state_dict, dcp.load into it, set_optimizer_state_dict.
#
# Seen: train() looks up optimizer.state for each parameter, and the look-up makes an empty entry. torch takes that for a
# state that exists, and fills nothing in. The template asks for no tensors, so dcp.load brings none, and both tensors
# of the state (z, exp_avg_sq) are gone. The parameter groups are loaded, so the step count is right and nothing looks
# wrong. Without train(), the template fails, since torch takes a step for it.
#
# Who is hurt: users of schedulefree who resume with DCP. Training goes on from a wrong average.
#
# Way round: call optimizer.state.clear() after train() and before the template is made.
set -euo pipefail
name=schedulefree_loses_state_in_dcp
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

python3 -m venv venv
venv/bin/pip install -q --no-compile --disable-pip-version-check torch==2.13.0 numpy==2.4.6 schedulefree==1.4.1

cat > trial.py <<'PY'
import tempfile

import schedulefree
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict


def fresh():
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1, bias=False)
    return model, schedulefree.AdamWScheduleFree(model.parameters(), lr=0.1)


folder = tempfile.mkdtemp(dir=".")
model, optimizer = fresh()
optimizer.train()
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder, no_dist=True)
print("saved:", sorted(optimizer.state[model.weight]), "k =", optimizer.param_groups[0]["k"])

for title, prepare in (
    ("train()", lambda o: o.train()),
    ("train(), state.clear()", lambda o: (o.train(), o.state.clear())),
    ("no train()", lambda o: None),
):
    model, optimizer = fresh()
    prepare(optimizer)
    try:
        state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    except Exception as error:
        print(f"{title}: {str(error)[:56]}")
        continue
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    print(f"{title}: loaded", sorted(optimizer.state[model.weight]), "k =", optimizer.param_groups[0]["k"])
PY
cat > stated <<'TXT'
saved: ['exp_avg_sq', 'z'] k = 1
train(): loaded [] k = 1
train(), state.clear(): loaded ['exp_avg_sq', 'z'] k = 1
no train(): Optimizer was not in train mode when step is called. Ple
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
