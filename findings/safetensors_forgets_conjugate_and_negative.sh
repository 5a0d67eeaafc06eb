#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# safetensors, and DCP's writer for Hugging Face's format, store a conjugate without the conjugation.
#
# Versions: torch 2.13.0, safetensors 0.8.0.
#
# Expected: torch's conj() is lazy, it only sets a bit on the tensor, but every consumer resolves that bit. A tensor
# that prints as [1-2j] is stored as [1-2j].
#
# Seen: torch.save and DCP's own format keep the values. safetensors.torch takes the bytes under the tensor: the
# conjugate loads as [1+2j]. The imaginary part of a conjugate has a bit for its sign, and loads with the other sign,
# as float32. HuggingFaceStorageWriter calls safetensors and stores the conjugate wrongly, too. (The imaginary part
# comes out right there only because DCP copies tensors that are a part of their storage.) There is no error.
#
# Who is hurt: models with complex weights or spectra (FNO, S4, rotary tables made by conj()). The float case is the
# worse one, since nothing about a float32 tensor suggests the bit.
#
# Way round: resolve_conj() and resolve_neg() before saving.
set -euo pipefail
name=safetensors_forgets_conjugate_and_negative
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

python3 -m venv venv
venv/bin/pip install -q --no-compile --disable-pip-version-check torch==2.13.0 numpy==2.4.6 safetensors==0.8.0

cat > trial.py <<'PY'
import io
import tempfile

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

state = {"conj": torch.tensor([1 + 2j]).conj(), "imag": torch.tensor([1 + 2j]).conj().imag}


def show(title, loaded):
    print(f"{title}: conj {loaded['conj'].tolist()}, imag {loaded['imag'].tolist()}")


def through(writer, reader):
    dcp.save(state, storage_writer=writer, no_dist=True)
    target = {"conj": torch.zeros(1, dtype=torch.complex64), "imag": torch.zeros(1)}
    dcp.load(target, storage_reader=reader, no_dist=True)
    return target


show("in memory", state)
buffer = io.BytesIO()
torch.save(state, buffer)
buffer.seek(0)
show("torch.save", torch.load(buffer))
folder = tempfile.mkdtemp(dir=".")
show("DCP", through(dcp.FileSystemWriter(folder), dcp.FileSystemReader(folder)))
show("safetensors", safetensors.torch.load(safetensors.torch.save(state)))
folder = tempfile.mkdtemp(dir=".")
show("DCP, Hugging Face's format", through(HuggingFaceStorageWriter(folder), HuggingFaceStorageReader(folder)))
PY
cat > stated <<'TXT'
in memory: conj [(1-2j)], imag [-2.0]
torch.save: conj [(1-2j)], imag [-2.0]
DCP: conj [(1-2j)], imag [-2.0]
safetensors: conj [(1+2j)], imag [2.0]
DCP, Hugging Face's format: conj [(1+2j)], imag [-2.0]
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
