#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# A DCP checkpoint that Python 3.13 writes cannot be opened by Python 3.11.
#
# Versions: torch 2.13.0 under CPython 3.11 and 3.13.0.
#
# Expected: what a checkpoint needs depends on torch, and on nothing else. The tensors and their description have
# nothing to do with the version of Python.
#
# Seen: .metadata is a pickle, and it holds the path of the folder as a pathlib object. Python 3.13.0 pickles that under
# the name of a private module, pathlib._local, which Python 3.11 lacks. The load stops there, before any
# tensor. The other direction works.
#
# Who is hurt: clusters whose machines for training and for evaluation or serving differ in Python.
#
# Way round: on the old side, put a module of that name, with PosixPath, into sys.modules before the load.
set -euo pipefail
name=dcp_metadata_tied_to_python_313
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

for version in 3.11 3.13; do
  python=$(python_of_version "$version")
  "$python" -m venv "venv$version"
  "venv$version/bin/pip" install -q --no-compile --disable-pip-version-check torch==2.13.0 numpy==2.4.6
done

cat > trial.py <<'PY'
import pathlib
import sys
import types

import torch
import torch.distributed.checkpoint as dcp

task, version = sys.argv[1:]
if task == "save":
    dcp.save({"x": torch.ones(2)}, checkpoint_id=f"by{version}", no_dist=True)
    with open(f"by{version}/.metadata", "rb") as file:
        print(f"written by {version}: names pathlib._local:", b"pathlib._local" in file.read())
else:

    def load(writer):
        target = {"x": torch.zeros(2)}
        dcp.load(target, checkpoint_id=f"by{writer}", no_dist=True)
        return target["x"].tolist()

    for writer in ("3.11", "3.13"):
        try:
            print(f"written by {writer}, read by {version}:", load(writer))
        except dcp.CheckpointException as error:
            missing = "No module named 'pathlib._local'" in str(error)
            print(f"written by {writer}, read by {version}: no module pathlib._local: {missing}")
            sys.modules["pathlib._local"] = types.ModuleType("pathlib._local")
            sys.modules["pathlib._local"].PosixPath = pathlib.PosixPath
            print("with such a module:", load(writer))
PY
cat > stated <<'TXT'
written by 3.11: names pathlib._local: False
written by 3.13: names pathlib._local: True
written by 3.11, read by 3.11: [1.0, 1.0]
written by 3.13, read by 3.11: no module pathlib._local: True
with such a module: [1.0, 1.0]
written by 3.11, read by 3.13: [1.0, 1.0]
written by 3.13, read by 3.13: [1.0, 1.0]
TXT

trial() {
  for version in 3.11 3.13; do "venv$version/bin/python" -W ignore trial.py save "$version" || return 1; done
  for version in 3.11 3.13; do "venv$version/bin/python" -W ignore trial.py load "$version" || return 1; done
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
