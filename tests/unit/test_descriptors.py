# SPDX-License-Identifier: Apache-2.0
"""Tests that the number of descriptors a process needs does not grow with the number of tensors it saves and loads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import resource, sys
import torch
import torch.distributed.checkpoint as dcp
from bytecheckpoint import BcpReader, BcpWriter, Config, verify

path, sync, timeout_s = sys.argv[1], sys.argv[2] == "True", float(sys.argv[3])
resource.setrlimit(resource.RLIMIT_NOFILE, (140, 140))
config = Config(io_timeout_s=timeout_s)
state = {f"layer.{number}": torch.full((3, 5), number) for number in range(200)}
writer = BcpWriter(path, single_file_per_rank=False, sync_files=sync, config=config)
dcp.save(state, storage_writer=writer, no_dist=True)
assert verify(path).problems == []
loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
dcp.load(loaded, storage_reader=BcpReader(path, config=config), no_dist=True)
assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
"""


@pytest.mark.parametrize(("sync", "timeout_s"), [(True, 60.0), (False, 60.0), (True, 0.0)])
def test_a_file_a_tensor(tmp_path: Path, sync: bool, timeout_s: float) -> None:
    command = [sys.executable, "-c", CODE, str(tmp_path / "ckpt"), str(sync), str(timeout_s)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(list((tmp_path / "ckpt").glob("*.distcp"))) == 200
