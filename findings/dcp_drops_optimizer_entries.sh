#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# get_optimizer_state_dict leaves out what an optimizer keeps beside 'state' and 'param_groups'.
#
# Versions: torch 2.13.0, pytorch_optimizer 4.1.0 (Ranger21, StableSPAM).
#
# Expected: the function gives back all entries of Optimizer.state_dict(), or refuses entries that it does not know.
#
# Seen: it takes 'state' and 'param_groups' and drops the rest silently. Ranger21 loses the position of its lookahead
# and its learning rate, StableSPAM its step count, so after a resume both follow their schedules from the start.
#
# Who is hurt: users of optimizers that extend state_dict(), which torch allows by hooks and by overriding it.
#
# Way round: save the other entries of optimizer.state_dict() under a key of their own, and set them after the load.
set -euo pipefail
name=dcp_drops_optimizer_entries
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

python3 -m venv venv
venv/bin/pip install -q --no-compile --disable-pip-version-check torch==2.13.0 numpy==2.4.6 pytorch_optimizer==4.1.0

cat > trial.py <<'PY'
import pytorch_optimizer
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

for name, arguments in (("Ranger21", {"num_iterations": 10}), ("StableSPAM", {}), ("AdaBelief", {})):
    model = torch.nn.Linear(4, 4)
    optimizer = getattr(pytorch_optimizer, name)(model.parameters(), **arguments)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    own, dcp = optimizer.state_dict(), get_optimizer_state_dict(model, optimizer)
    print(f"{name}: dropped", {key: own[key] for key in sorted(own.keys() - dcp.keys())})
PY
cat > stated <<'TXT'
Ranger21: dropped {'current_lr': 0.0005, 'lookahead_step': 1, 'starting_lr': 0.001}
StableSPAM: dropped {'total_step': 1}
AdaBelief: dropped {}
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
