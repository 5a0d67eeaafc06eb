#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The same tensors and metadata give another safetensors file each time.
#
# Versions: safetensors 0.8.0 (0.4.5 to 0.7.0 alike), numpy 2.4.6.
#
# Expected: saving the same dict twice gives the same bytes. Tensors are sorted, and Python dicts keep their order.
#
# Seen: so it is without metadata, or with one entry. Two or more entries of `metadata` are written in an order that
# is new in every call. Of 20 saves of one tensor with 8 entries, more than one file comes out, mostly 20.
#
# Who is hurt: stores that address content by digest, deduplicating uploads, reproducible builds, and tests that
# compare files. Each save looks like a new model.
#
# Way round: put all metadata into one entry (as JSON with sorted keys), or compare tensors instead of files.
set -euo pipefail
name=safetensors_metadata_in_random_order
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

python3 -m venv venv
venv/bin/pip install -q --no-compile --disable-pip-version-check numpy==2.4.6 safetensors==0.8.0

cat > trial.py <<'PY'
import numpy
import safetensors.numpy


def files(num_entries, num_tensors):
    tensors = {f"t{i}": numpy.ones(1) for i in range(num_tensors)}
    metadata = {f"m{i}": str(i) for i in range(num_entries)}
    return len({safetensors.numpy.save(tensors, metadata) for _ in range(20)})


print("8 tensors, no metadata, one file:", files(0, 8) == 1)
print("8 tensors, one entry, one file:", files(1, 8) == 1)
print("1 tensor, 8 entries, one file:", files(8, 1) == 1)
PY
cat > stated <<'TXT'
8 tensors, no metadata, one file: True
8 tensors, one entry, one file: True
1 tensor, 8 entries, one file: False
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
