#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# A checkpoint that torch_checkpointing calls durable has not been synced to the disk.
#
# Versions: torch_checkpointing 0.1.1, torch 2.13.0, on CPUs, configured for them.
#
# Expected: save() says of the future that it returns: "await it to block until the checkpoint is durable". So each file
# is synced before the rename that publishes the folder, and the folder above after it.
#
# Seen: neither the process that trains nor the one that writes syncs anything, with synchronous and asynchronous saves.
# The files are renamed into place while the page cache may hold all of them. After a power cut, the folder can be there
# with files that are empty or cut short, and the step before it may have been deleted already.
#
# Who is hurt: whoever deletes the last checkpoint, or reports a step as saved, when the future is done.
#
# Way round: after the future is done, open each file and the folders and call os.fsync, and only then count the step.
set -euo pipefail
name=torch_checkpointing_durable_without_sync
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

python3 -m venv venv
venv/bin/pip install -q --no-compile --disable-pip-version-check torch==2.13.0 numpy==2.4.6 torch_checkpointing==0.1.1
# Every process of this environment notes its calls. The package has no compiled code of its own.
cat > noted.py <<'PY'
import os


def note(name):
    real = getattr(os, name)

    def noted(*args, **options):
        with open(os.environ["NOTES"], "a") as file:
            file.write(" ".join([name, *(os.path.basename(str(arg)) for arg in args)]) + "\n")
        return real(*args, **options)

    setattr(os, name, noted)


if "NOTES" in os.environ:
    for name in ("fsync", "fdatasync", "sync", "rename", "replace"):
        note(name)
PY
site=$(venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cp noted.py "$site/noted.py"
echo "import noted" > "$site/noted.pth"

cat > trial.py <<'PY'
import os
from pathlib import Path

import torch
import torch_checkpointing
from torch_checkpointing import CheckpointManager
from torch_checkpointing.config import AsyncCheckpointSaverConfig, SyncCheckpointSaverConfig
from torch_checkpointing.staging import CheckpointStagerConfig
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig


def trial(title, saver):
    os.environ["NOTES"] = notes = os.path.abspath(f"notes_{title}")
    storage = LocalFileSystemStorageConfig(use_direct_io=False)
    manager = CheckpointManager(CheckpointManager.Config(save=saver, storage_config=storage))
    future = manager.save(os.path.abspath(title), {"model": {"w": torch.ones(1_000_000)}})
    if future is not None:
        future.result()
    manager.close()
    print(f"{title}: {Path(notes).read_text().splitlines()}, files {sorted(os.listdir(title))}")


if __name__ == "__main__":
    print("promised:", "checkpoint is durable" in CheckpointManager.save.__doc__)
    print("compiled files:", len(list(Path(torch_checkpointing.__file__).parent.rglob("*.so"))))
    with open("file", "w") as file:
        os.fsync(file.fileno())
    print("a call that is noted:", Path("notes").read_text().split()[0])
    trial("synchronous", SyncCheckpointSaverConfig())
    on_cpus = CheckpointStagerConfig(
        use_pinned_memory=False, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=False
    )
    trial("asynchronous", AsyncCheckpointSaverConfig(staging_config=on_cpus))
PY
cat > stated <<'TXT'
promised: True
compiled files: 0
a call that is noted: fsync
synchronous: ['rename tmp_synchronous synchronous'], files ['model_0.pt']
asynchronous: ['rename tmp_asynchronous asynchronous'], files ['model_0.pt']
TXT

if ! NOTES=notes venv/bin/python -W ignore trial.py > seen 2> stderr; then
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
