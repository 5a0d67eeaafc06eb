#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# safetensors 0.8 stores column-major NumPy arrays with their elements in the wrong places.
#
# Versions: safetensors 0.8.0 against 0.7.0 (0.4.5, 0.5.3 and 0.6.2 are as 0.7.0), numpy 2.4.6.
#
# Expected: safetensors.numpy.save stores a column-major array (numpy.asfortranarray, a transposed matrix, what LAPACK
# and some loaders return) so that it loads with equal elements, as it did for years. The flavour for torch refuses a
# transposed tensor, so at worst an error.
#
# Seen: 0.8.0 hands over the address of the first element and copies the memory as it lies. The shape is right, the
# elements are not. There is no error. The docstring asks for "contiguous and dense" arrays; a column-major array is
# both.
#
# Who is hurt: converters that transpose weights (Keras or JAX to PyTorch) and save without a copy. It worked before the
# upgrade.
#
# Way round: numpy.ascontiguousarray before safetensors.numpy.save and save_file.
set -euo pipefail
name=safetensors_numpy_writes_memory_order
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

python3 -m venv venv
venv/bin/pip install -q --no-compile --disable-pip-version-check numpy==2.4.6 safetensors==0.8.0
venv/bin/pip install -q --no-deps --disable-pip-version-check --target old safetensors==0.7.0

cat > trial.py <<'PY'
import subprocess
import sys

TRIAL = """
import numpy, safetensors, safetensors.numpy
matrix = numpy.arange(6.0).reshape(2, 3)
for title, array in {"row-major": matrix, "column-major": numpy.asfortranarray(matrix), "transposed": matrix.T}.items():
    loaded = safetensors.numpy.load(safetensors.numpy.save({"x": array}))["x"]
    print(safetensors.__version__, title, "equal:", numpy.array_equal(loaded, array), loaded.astype(int).tolist())
"""
for path in ("old", ""):
    subprocess.run([sys.executable, "-c", TRIAL], env={"PYTHONPATH": path}, check=True)
PY
cat > stated <<'TXT'
0.7.0 row-major equal: True [[0, 1, 2], [3, 4, 5]]
0.7.0 column-major equal: True [[0, 1, 2], [3, 4, 5]]
0.7.0 transposed equal: True [[0, 3], [1, 4], [2, 5]]
0.8.0 row-major equal: True [[0, 1, 2], [3, 4, 5]]
0.8.0 column-major equal: False [[0, 3, 1], [4, 2, 5]]
0.8.0 transposed equal: False [[0, 1], [2, 3], [4, 5]]
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
