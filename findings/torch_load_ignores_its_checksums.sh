#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# torch.save stores a checksum of every storage, and nothing in torch that loads compares it.
#
# Version: torch 2.13.0 (CPU).
#
# Expected: files of torch.save are zip archives with a CRC-32 of each entry, which takes time to compute. So a load
# compares them, at least one that reads the whole file, and a bit that a disk has changed is an error, as it is for unzip.
#
# Seen: one changed bit in a storage is loaded as another value, without an error or a warning, by torch.load with and
# without mmap, and by dcp.load for an object, whose record is such an archive. Python's zipfile names the entry.
#
# Who is hurt: whoever takes a load that succeeds for a check of the file: random number states and optimizer states in
# objects of a checkpoint differ from what was saved, and training goes on with them.
#
# Way round: zipfile.ZipFile(path).testzip() before the load.
set -euo pipefail
name=torch_load_ignores_its_checksums
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

python3 -m venv venv
venv/bin/pip install -q --no-compile --disable-pip-version-check torch==2.13.0 numpy==2.3.5

cat > trial.py <<'PY'
import io
import logging
import warnings
import zipfile
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

warnings.simplefilter("ignore", UserWarning)
logging.disable(logging.CRITICAL)
values = torch.arange(1000)


def damage(path):
    """Changes one bit of element 500, and returns the place."""
    written = bytearray(path.read_bytes())
    at = written.index(values.numpy().tobytes()) + 8 * 500
    written[at] ^= 1
    path.write_bytes(written)
    return at


def seen(loaded):
    different = (loaded != values).nonzero().flatten().tolist()
    return f"element {different[0]} is {int(loaded[different[0]])}" if different else "as it was saved"


torch.save(values, "values.pt")
damage(Path("values.pt"))
print("zipfile:", zipfile.ZipFile("values.pt").testzip())
print("torch.load:", seen(torch.load("values.pt")))
print("torch.load with mmap:", seen(torch.load("values.pt", mmap=True)))
print("torch.load of a buffer:", seen(torch.load(io.BytesIO(Path("values.pt").read_bytes()))))

dcp.save({"state": (values, "text")}, checkpoint_id="checkpoint", no_dist=True)
damage(next(Path("checkpoint").glob("*.distcp")))
state = {"state": None}
dcp.load(state, checkpoint_id="checkpoint", no_dist=True)
print("dcp.load of an object:", seen(state["state"][0]))
PY

cat > stated <<'TEXT'
zipfile: values/data/0
torch.load: element 500 is 501
torch.load with mmap: element 500 is 501
torch.load of a buffer: element 500 is 501
dcp.load of an object: element 500 is 501
TEXT

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
