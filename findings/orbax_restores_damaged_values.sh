#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Orbax restores an array from a damaged file without an error: what it stores has no checksum on the values.
#
# Versions: orbax-checkpoint 0.12.8, jax 0.10.2, tensorstore 0.1.86.
#
# Expected: three formats below can hold checksums: OCDBT has them, zarr3 has a codec crc32c, and zstd has its own.
# So a byte that a disk or a network has changed is an error when the array is restored.
#
# Seen: in each of the four settings, one changed bit in the values is restored as other values. OCDBT has checksums on
# its manifest and its index, and none on values that lie there. zarr3 has crc32c on its index alone, and its zstd says
# "checksum": false. Since values are compressed, one bit may change many of them, and can make some NaN. Only at a few
# other places, where zstd can no longer unpack, is a changed bit an error.
#
# Who is hurt: whoever keeps checkpoints on disks or copies them between machines, and takes a restore for a check.
#
# Way round: store a digest of each file beside the checkpoint, and compare before the restore.
set -euo pipefail
name=orbax_restores_damaged_values
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

python3 -m venv venv
venv/bin/pip install -q --no-compile --disable-pip-version-check \
  jax==0.10.2 jaxlib==0.10.2 orbax-checkpoint==0.12.8 tensorstore==0.1.86

cat > trial.py <<'PY'
import json
import logging
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

logging.disable(logging.CRITICAL)
values = np.random.default_rng(0).standard_normal(1024).astype(np.float32)

for uses_ocdbt in (True, False):
    for uses_zarr3 in (False, True):
        title = f"{'OCDBT' if uses_ocdbt else 'files'} of {'zarr3' if uses_zarr3 else 'zarr'}"
        path = Path(title.replace(" ", "_")).absolute()

        def checkpointer():
            return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=uses_ocdbt, use_zarr3=uses_zarr3))

        with checkpointer() as saver:
            saver.save(path, args=ocp.args.PyTreeSave({"a": jnp.asarray(values)}))
        largest = max((file for file in path.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
        written = largest.read_bytes()
        silent, most = 0, 0
        for place in range(300, 3300, 300):
            damaged = bytearray(written)
            damaged[place] ^= 1
            largest.write_bytes(damaged)
            try:
                with checkpointer() as loader:
                    restored = np.asarray(loader.restore(path)["a"])
            except Exception:
                continue
            changed = int((restored != values).sum())
            silent += changed > 0
            most = max(most, changed)
        print(f"{title}: restored to other values without an error: {silent} of 10; over 20 in one case: {most > 20}")

codecs = json.loads(Path("files_of_zarr3/a/zarr.json").read_text())["codecs"][0]["configuration"]
print("zarr3's codecs of values:", [[codec["name"], codec["configuration"]] for codec in codecs["codecs"]])
print("zarr3's codecs of the index:", [codec["name"] for codec in codecs["index_codecs"]])
default = Path("default").absolute()
with ocp.StandardCheckpointer() as saver:
    saver.save(default, {"a": jnp.asarray(values)})
    saver.wait_until_finished()
print("StandardCheckpointer writes OCDBT:", (default / "manifest.ocdbt").exists())
PY
cat > stated <<'TXT'
OCDBT of zarr: restored to other values without an error: 10 of 10; over 20 in one case: True
OCDBT of zarr3: restored to other values without an error: 10 of 10; over 20 in one case: True
files of zarr: restored to other values without an error: 10 of 10; over 20 in one case: True
files of zarr3: restored to other values without an error: 10 of 10; over 20 in one case: True
zarr3's codecs of values: [['bytes', {'endian': 'little'}], ['zstd', {'checksum': False, 'level': 3}]]
zarr3's codecs of the index: ['bytes', 'crc32c']
StandardCheckpointer writes OCDBT: True
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
