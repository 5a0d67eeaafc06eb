#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Reading the state of a new optimizer for DCP changes what the optimizer does next.
#
# Versions: torch 2.13.0, torch.distributed.checkpoint.state_dict.get_optimizer_state_dict.
#
# Expected: the function only reads, as Optimizer.state_dict() does. A run that asks for the state before its first
# step trains exactly as a run that does not ask.
#
# Seen: if the optimizer holds no state yet, the function fills it by a step with zero gradients and learning rate 0.
# The parameters stay, but the state of that step stays, too. Adam then counts from step 1, so its bias correction
# is that of the second step; ASGD and Rprop keep a step size made from learning rate 0. Eight of the twelve
# optimizers below end three steps with other weights. The learning rate alone is put back.
#
# Who is hurt: a program that builds a template for dcp.load at every start, finds no checkpoint, and trains on with
# that optimizer. Its first run differs from one without checkpoints, and no message says so.
#
# Way round: look first whether there is a checkpoint. If there is none, clear optimizer.state before training.
set -euo pipefail
name=dcp_reading_optimizer_state_takes_a_step
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

python3 -m venv venv
venv/bin/pip install -q --disable-pip-version-check torch==2.13.0 numpy==2.4.6

cat > trial.py <<'PY'
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

OPTIMIZERS = {
    "Adam": {}, "AdamW": {}, "NAdam": {}, "RAdam": {}, "Adamax": {}, "Adafactor": {}, "ASGD": {}, "Rprop": {},
    "SGD": {"momentum": 0.9}, "RMSprop": {}, "Adagrad": {}, "Adadelta": {},
}
INPUT = torch.tensor([[1.0, 2.0, 3.0], [0.5, -1.0, 2.0]])


def train(name, ask_first, clear=False):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2, bias=False)
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01, **OPTIMIZERS[name])
    if ask_first:
        get_optimizer_state_dict(model, optimizer)
    if clear:
        optimizer.state.clear()
    for _ in range(3):
        optimizer.zero_grad()
        (model(INPUT) ** 2).sum().backward()
        optimizer.step()
    return model.weight.detach()


for name in OPTIMIZERS:
    same = torch.equal(train(name, False), train(name, True))
    print(f"{name}: asked for its state before the first step, it trains {'alike' if same else 'otherwise'}")
cleared = all(torch.equal(train(n, False), train(n, True, clear=True)) for n in OPTIMIZERS)
print("with optimizer.state cleared after asking, all train alike:", cleared)

model = torch.nn.Linear(3, 2, bias=False)
optimizer = torch.optim.Adam(model.parameters())
get_optimizer_state_dict(model, optimizer)
print("Adam's step counter after asking:", optimizer.state[model.weight]["step"].item())
PY
cat > stated <<'TXT'
Adam: asked for its state before the first step, it trains otherwise
AdamW: asked for its state before the first step, it trains otherwise
NAdam: asked for its state before the first step, it trains otherwise
RAdam: asked for its state before the first step, it trains otherwise
Adamax: asked for its state before the first step, it trains otherwise
Adafactor: asked for its state before the first step, it trains otherwise
ASGD: asked for its state before the first step, it trains otherwise
Rprop: asked for its state before the first step, it trains otherwise
SGD: asked for its state before the first step, it trains alike
RMSprop: asked for its state before the first step, it trains alike
Adagrad: asked for its state before the first step, it trains alike
Adadelta: asked for its state before the first step, it trains alike
with optimizer.state cleared after asking, all train alike: True
Adam's step counter after asking: 1.0
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
