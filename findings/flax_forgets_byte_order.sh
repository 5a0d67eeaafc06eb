#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Flax's msgpack format stores a big-endian array as if it were little-endian.
#
# Versions: flax 0.12.8, jax 0.10.2, numpy 2.4.6.
#
# Expected: flax.serialization keeps the values of an array that NumPy read from a big-endian source (FITS, IDX, HDF5,
# network data), or refuses it.
#
# Seen: it writes the dtype's name ("float32", "int32"), which has no byte order, and then the bytes as they lie. The
# values come back wrong, without an error: 1 becomes 16777216. A column-major array, the other unusual layout, is
# kept rightly.
#
# Who is hurt: whoever stores statistics or tables in a Flax train state that came straight from such a file.
#
# Way round: array.astype(array.dtype.newbyteorder("=")) before the call.
set -euo pipefail
name=flax_forgets_byte_order
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

python3 -m venv venv
venv/bin/pip install -q --no-compile --disable-pip-version-check jax==0.10.2 jaxlib==0.10.2 flax==0.12.8 numpy==2.4.6

cat > trial.py <<'PY'
import numpy
from flax import serialization

little = numpy.arange(3, dtype="<i4")
for title, array in {
    "little-endian": little,
    "column-major": numpy.asfortranarray(numpy.arange(4, dtype="<i4").reshape(2, 2)),
    "big-endian": little.astype(">i4"),
}.items():
    loaded = serialization.msgpack_restore(serialization.msgpack_serialize({"x": array}))["x"]
    print(f"{title}: {array.tolist()} -> {loaded.tolist()}, {loaded.dtype}")
PY
cat > stated <<'TXT'
little-endian: [0, 1, 2] -> [0, 1, 2], int32
column-major: [[0, 1], [2, 3]] -> [[0, 1], [2, 3]], int32
big-endian: [0, 1, 2] -> [0, 16777216, 33554432], int32
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
