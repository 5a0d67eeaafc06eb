#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# torch_checkpointing as it is configured by default cannot save anything on ext4.
#
# Versions: torch_checkpointing 0.1.1, torch 2.13.0. The temporary folder must be on ext4 or another file system that
# wants direct writes aligned; the trial asks that first.
#
# Expected: a manager with nothing configured but synchronous saves writes a dict of one tensor into a folder on a disk.
#
# Seen: the local storage opens files with O_DIRECT and has a way back for file systems that refuse that. ext4 takes the
# open, and refuses the write: the bytes of torch.save come in lengths and from addresses that are not aligned. This
# EINVAL is not caught, so the save raises OSError, whatever the size of the tensor, and leaves its folder tmp_NAME with
# an empty file. On tmpfs, which takes such writes, all works. Reads have a way back for both.
#
# Who is hurt: whoever tries it on tmpfs or on storage of a network, and then saves to a local disk.
#
# Way round: storage_config=LocalFileSystemStorageConfig(use_direct_io=False).
set -euo pipefail
name=torch_checkpointing_default_cannot_save_on_ext4
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

python3 -m venv venv
venv/bin/pip install -q --no-compile --disable-pip-version-check torch==2.13.0 numpy==2.4.6 torch_checkpointing==0.1.1

cat > trial.py <<'PY'
import errno
import os
import sys

import torch
from torch_checkpointing import CheckpointManager
from torch_checkpointing.config import SyncCheckpointSaverConfig
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

file = os.open("probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
try:
    os.write(file, b"1")
    sys.exit("the temporary folder takes unaligned direct writes: set TMPDIR to a folder on ext4")
except OSError as error:
    print("an unaligned direct write is refused:", errno.errorcode[error.errno])

on_page_cache = CheckpointManager.Config(
    save=SyncCheckpointSaverConfig(), storage_config=LocalFileSystemStorageConfig(use_direct_io=False)
)
for title, config in (("default", CheckpointManager.Config.with_sync_save()), ("no direct I/O", on_page_cache)):
    for size in (1, 1024, 1_000_000):
        name = f"{title}-{size}"
        manager = CheckpointManager(config)
        try:
            manager.save(os.path.abspath(name), {"model": {"w": torch.ones(size)}})
            print(f"{name}: saved")
        except OSError as error:
            print(f"{name}: {errno.errorcode[error.errno]}")
        manager.close()
for name in sorted(name for name in os.listdir() if name.startswith("tmp_")):
    print(f"left: {name}/model_0.pt of {os.path.getsize(os.path.join(name, 'model_0.pt'))} bytes")
PY
cat > stated <<'TXT'
an unaligned direct write is refused: EINVAL
default-1: EINVAL
default-1024: EINVAL
default-1000000: EINVAL
no direct I/O-1: saved
no direct I/O-1024: saved
no direct I/O-1000000: saved
left: tmp_default-1/model_0.pt of 0 bytes
left: tmp_default-1000000/model_0.pt of 0 bytes
left: tmp_default-1024/model_0.pt of 0 bytes
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
