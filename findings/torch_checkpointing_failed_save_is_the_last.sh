#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# After one failed asynchronous save, torch_checkpointing never saves again.
#
# Versions: torch_checkpointing 0.1.1, torch 2.13.0, on CPUs, configured for them.
#
# Expected: the future of the failed save raises the error. As soon as its cause is gone, the next save works: a full
# disk or a lost mount for one step costs one checkpoint.
#
# Seen: each later save raises the error of the old one, with the old path, at once and without writing anything, though
# the caller has taken the error from the future already. The process that writes has ended, too, and nothing starts
# another. A run that catches errors of saves goes on without any checkpoint. close() raises what the last future held.
#
# Who is hurt: long runs that log a failed save and train on.
#
# Way round: after an error, close the manager, catch what that raises, and build another.
set -euo pipefail
name=torch_checkpointing_failed_save_is_the_last
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

python3 -m venv venv
venv/bin/pip install -q --no-compile --disable-pip-version-check torch==2.13.0 numpy==2.4.6 torch_checkpointing==0.1.1

cat > trial.py <<'PY'
import os

import torch
from torch_checkpointing import CheckpointManager
from torch_checkpointing.config import AsyncCheckpointSaverConfig
from torch_checkpointing.staging import CheckpointStagerConfig
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig


def build():
    on_cpus = CheckpointStagerConfig(
        use_pinned_memory=False, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=False
    )
    return CheckpointManager(
        CheckpointManager.Config(
            storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
            save=AsyncCheckpointSaverConfig(staging_config=on_cpus),
        )
    )


def save(manager, step):
    future = None
    try:
        future = manager.save(os.path.abspath(f"run/{step}"), {"model": {"w": torch.ones(10)}})
        future.result()
        print(f"step {step}: saved")
    except Exception as error:
        where = "its future" if future else "save()"
        last = str(error).strip().splitlines()[-1]
        print(f"step {step}: {where} raises {type(error).__name__} about", last.split("/")[-1].strip("'"))


if __name__ == "__main__":
    os.mkdir("run")
    manager = build()
    save(manager, 1)
    os.rename("run", "away")
    with open("run", "w"):
        save(manager, 2)
    os.remove("run")
    os.rename("away", "run")
    for step in (3, 4):
        save(manager, step)
    try:
        manager.close()
        print("closed")
    except Exception as error:
        print("close() raises", type(error).__name__)
    print("written:", sorted(os.listdir("run")))
    manager = build()
    save(manager, 5)
    manager.close()
    print("written:", sorted(os.listdir("run")))
PY
cat > stated <<'TXT'
step 1: saved
step 2: its future raises NotADirectoryError about tmp_2
step 3: save() raises NotADirectoryError about tmp_2
step 4: save() raises NotADirectoryError about tmp_2
close() raises NotADirectoryError
written: ['1']
step 5: saved
written: ['1', '5']
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
