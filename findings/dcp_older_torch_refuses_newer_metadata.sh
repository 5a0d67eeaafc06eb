#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# A DCP checkpoint that torch 2.15 writes cannot be loaded by torch 2.13.
#
# Versions: torch 2.15.0 and 2.13.0 under CPython 3.11.
#
# Expected: plain contiguous tensors of float32, saved in the default way, load with the version of a few months before.
# The data files have not changed, and nothing new is used.
#
# Seen: .metadata is a pickle, and the description of each tensor has a sixth value since 2.15, its strides. The older
# class unpacks exactly five, for every tensor, so no checkpoint of 2.15 can be opened. The message of the load has the
# reason only at its end. The other direction works.
#
# Who is hurt: a cluster that moves to the new torch, and whose evaluation, export or serving has not moved yet; and
# whoever goes back to the old torch after a failed upgrade, with the checkpoints of the new one.
#
# Way round: on the old side, let the class drop what it does not know, before the load.
set -euo pipefail
name=dcp_older_torch_refuses_newer_metadata
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

# Prints how to call the Python of version $1: python3.11, say, or the same through pyenv.
python_of_version() {
  local full
  if "python$1" -c pass 2> /dev/null; then
    command -v "python$1"
  elif full=$(pyenv versions --bare 2> /dev/null | grep -m 1 "^$1\."); then
    PYENV_VERSION=$full pyenv which python
  else
    echo "$name: needs Python $1" >&2
    return 1
  fi
}

python=$(python_of_version 3.11)
for version in 2.13.0 2.15.0; do
  "$python" -m venv "venv$version"
  "venv$version/bin/pip" install -q --no-compile --disable-pip-version-check "torch==$version" numpy==2.4.6
done

cat > trial.py <<'PY'
import sys

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorProperties

task, version = sys.argv[1:]
if task == "save":
    dcp.save({"x": torch.ones(2)}, checkpoint_id=f"by{version}", no_dist=True)
else:

    def load(writer):
        target = {"x": torch.zeros(2)}
        dcp.load(target, checkpoint_id=f"by{writer}", no_dist=True)
        return target["x"].tolist()

    for writer in ("2.13.0", "2.15.0"):
        try:
            print(f"written by {writer}, read by {version}:", load(writer))
        except dcp.CheckpointException as error:
            (reason, _), = error.failures.values()
            print(f"written by {writer}, read by {version}:", str(reason).split("; ")[1])
            theirs = TensorProperties.__setstate__
            TensorProperties.__setstate__ = lambda self, state: theirs(self, state[:5])
            print("with five of the values:", load(writer))
PY
cat > stated <<'TXT'
written by 2.13.0, read by 2.13.0: [1.0, 1.0]
written by 2.15.0, read by 2.13.0: global metadata read failed: too many values to unpack (expected 5)
with five of the values: [1.0, 1.0]
written by 2.13.0, read by 2.15.0: [1.0, 1.0]
written by 2.15.0, read by 2.15.0: [1.0, 1.0]
TXT

trial() {
  for version in 2.13.0 2.15.0; do "venv$version/bin/python" -W ignore trial.py save "$version" || return 1; done
  for version in 2.13.0 2.15.0; do "venv$version/bin/python" -W ignore trial.py load "$version" || return 1; done
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
