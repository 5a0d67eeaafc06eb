#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# set_optimizer_state_dict matches parameter groups by name, except for an optimizer without state.
#
# Versions: torch 2.13.0, torch.distributed.checkpoint.state_dict.
#
# Expected: the function's format holds names instead of numbers so that it does not depend on the order of parameters
# and groups. Groups that were saved as (a, b) load into an optimizer with groups (b, a) with each learning rate at
# its own parameter.
#
# Seen: so it is for SGD with momentum. For plain SGD, which holds no state, the groups are matched by position: the
# learning rates are swapped, without a message.
#
# Who is hurt: whoever fine-tunes with plain SGD and groups (other rates for backbone and head), and builds the groups
# in another order after a resume.
#
# Way round: keep the order of groups fixed, or compare the rates after the load.
set -euo pipefail
name=dcp_groups_of_stateless_optimizer_by_position
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

python3 -m venv venv
venv/bin/pip install -q --disable-pip-version-check torch==2.13.0 numpy==2.4.6

cat > trial.py <<'PY'
import copy

import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

for momentum in (0.9, 0.0):
    model = torch.nn.ModuleDict({n: torch.nn.Linear(1, 1, bias=False) for n in "ab"})
    a, b = model["a"].weight, model["b"].weight
    saved = torch.optim.SGD([{"params": [a], "lr": 0.1}, {"params": [b], "lr": 0.01}], momentum=momentum)
    (a + b).sum().backward()
    saved.step()
    state = copy.deepcopy(get_optimizer_state_dict(model, saved))
    print(f"momentum {momentum}: saved", [(g["params"], g["lr"]) for g in state["param_groups"]])

    other = torch.optim.SGD([{"params": [b], "lr": 7.0}, {"params": [a], "lr": 8.0}], momentum=momentum)
    set_optimizer_state_dict(model, other, state)
    print(f"momentum {momentum}: loaded", [("b" if g["params"][0] is b else "a", g["lr"]) for g in other.param_groups])
PY
cat > stated <<'TXT'
momentum 0.9: saved [(['a.weight'], 0.1), (['b.weight'], 0.01)]
momentum 0.9: loaded [('b', 0.01), ('a', 0.1)]
momentum 0.0: saved [(['a.weight'], 0.1), (['b.weight'], 0.01)]
momentum 0.0: loaded [('b', 0.1), ('a', 0.01)]
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
