#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The error that dcp.load and dcp.save raise is not an Exception.
#
# Versions: torch 2.13.0, torch.distributed.checkpoint.
#
# Expected: `except Exception` around dcp.load catches a load that fails. The class is called CheckpointException and its
# docstring says "Exception raised if failure was detected".
#
# Seen: it derives from BaseException, as KeyboardInterrupt does. `except Exception` lets it pass, although the cause
# inside it is an ordinary RuntimeError. (torch 2.15.0 behaves alike.)
#
# Who is hurt: a trainer that tries the newest checkpoint and falls back to an older one. It dies instead.
#
# Way round: catch torch.distributed.checkpoint.CheckpointException by its name.
set -euo pipefail
name=dcp_exception_passes_except_exception
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

python3 -m venv venv
venv/bin/pip install -q --disable-pip-version-check torch==2.13.0 numpy==2.4.6

cat > trial.py <<'PY'
import tempfile

import torch
import torch.distributed.checkpoint as dcp

folder = tempfile.mkdtemp(dir=".")
dcp.save({"weight": torch.ones(2)}, checkpoint_id=folder, no_dist=True)
try:
    dcp.load({"weight": torch.zeros(2), "bias": torch.zeros(2)}, checkpoint_id=folder, no_dist=True)
except Exception as error:
    print("except Exception:", type(error).__name__)
except BaseException as error:
    print("only except BaseException:", type(error).__name__)
    print("cause:", *(type(cause).__name__ for cause, _ in error.failures.values()))
print("bases:", *(base.__name__ for base in dcp.CheckpointException.__mro__))
PY
cat > stated <<'TXT'
only except BaseException: CheckpointException
cause: RuntimeError
bases: CheckpointException BaseException object
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
