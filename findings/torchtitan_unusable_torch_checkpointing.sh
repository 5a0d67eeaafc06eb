#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# torchtitan requires torch_checkpointing, and has no use for any version of it.
#
# Versions: torchtitan 0.3.0, torch_checkpointing 0.1.0 and 0.1.1, torch 2.13.0.
#
# Expected: torchtitan has a checkpoint manager on torch_checkpointing beside the one on DCP, and lists
# torch_checkpointing>=0.1.0 among what it needs. So what pip installs for that gives a manager that saves and loads.
#
# Seen: pip takes 0.1.1, which no longer has the module dtensor_resharder, and torchtitan's module cannot be imported.
# With 0.1.0 it can be, and then its _load and _save, which load() and save() of its base call, do nothing but raise
# NotImplementedError. Nothing else in torchtitan imports torch_checkpointing.
#
# Who is hurt: whoever picks this manager from the sources, and whoever looks for what a dependency of a job is for.
#
# Way round: use torchtitan's manager on DCP. torchtitan works without torch_checkpointing.
set -euo pipefail
name=torchtitan_unusable_torch_checkpointing
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

python3 -m venv venv
venv/bin/pip install -q --no-compile --disable-pip-version-check \
  torch==2.13.0 numpy==2.4.6 tyro==1.0.17 torchdata==0.11.0 spmd_types==0.2.3
venv/bin/pip install -q --no-compile --no-deps --disable-pip-version-check torchtitan==0.3.0

cat > trial.py <<'PY'
import importlib.metadata
from pathlib import Path

import torchtitan

wanted = [line for line in importlib.metadata.requires("torchtitan") if line.startswith("torch_checkpointing")]
print("torch_checkpointing", importlib.metadata.version("torch_checkpointing"), "for", wanted)
root = Path(next(iter(torchtitan.__path__)))
names = [str(file.relative_to(root)) for file in root.rglob("*.py") if "torch_checkpointing" in file.read_text()]
print("named in:", names)
try:
    from torchtitan.components.checkpointer.torch_checkpointing import TorchCheckpointingManager as Manager
except ImportError as error:
    print("import:", error)
else:
    for function in (Manager._load, Manager._save):
        try:
            function(None, 1)
        except NotImplementedError as error:
            print(f"{function.__name__}:", error)
from torchtitan.components.checkpointer import CheckpointManager

print("on DCP:", CheckpointManager.__module__)
PY
cat > stated <<'TXT'
torch_checkpointing 0.1.0 for ['torch_checkpointing>=0.1.0']
named in: ['components/checkpointer/torch_checkpointing.py']
_load: TorchCheckpointingManager does not implement load() yet.
_save: TorchCheckpointingManager does not implement save() yet.
on DCP: torchtitan.components.checkpointer.dcp
torch_checkpointing 0.1.1 for ['torch_checkpointing>=0.1.0']
named in: ['components/checkpointer/torch_checkpointing.py']
import: No module named 'torch_checkpointing.dtensor_resharder'
on DCP: torchtitan.components.checkpointer.dcp
TXT

trial() {
  local version
  for version in 0.1.0 0.1.1; do
    venv/bin/pip install -q --no-compile --no-deps --disable-pip-version-check \
      "torch_checkpointing==$version" || return 1
    venv/bin/python -W ignore trial.py || return 1
  done
}
if ! trial > seen 2> stderr; then
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
