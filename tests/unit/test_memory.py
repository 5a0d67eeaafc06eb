# SPDX-License-Identifier: Apache-2.0
"""Tests that a save and a load add only the ring to the memory of a process; a background save adds the state, too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys, warnings
from pathlib import Path
import torch
import torch.distributed.checkpoint as dcp
from bytecheckpoint import BcpReader, BcpWriter, Config, async_save_state_dict

warnings.filterwarnings("ignore")

def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024

def added(call):
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = peak()
    call()
    return peak() - before

path = sys.argv[1]
config = Config(ring_bytes=32 << 20)
dcp.save({"warm": torch.ones(1)}, storage_writer=BcpWriter(path, config=config))
state = {f"t{i}": torch.full((16 << 20,), i, dtype=torch.float32) for i in range(6)}
print(added(lambda: dcp.save(state, storage_writer=BcpWriter(path, config=config))))
print(added(lambda: dcp.load(state, storage_reader=BcpReader(path, config=config))))
print(added(lambda: async_save_state_dict(path, state, config=config).committed.result()))
"""


def test_memory_is_bounded_by_the_ring(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    save, load, async_save = map(int, done.stdout.split())
    # 32 MiB of slots in the ring, and room for Python and the allocator. The state has 384 MiB.
    assert save < 96 << 20
    assert load < 96 << 20
    # What the process gives back meanwhile comes off it.
    assert (384 - 8) << 20 <= async_save < (384 + 96) << 20, "the state once, and the same as any save"
