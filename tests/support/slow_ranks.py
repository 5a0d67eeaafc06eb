# SPDX-License-Identifier: Apache-2.0
"""Jobs of several processes that save the steps of a run, of which one rank is slow, in one of three ways.

storage   each write of the rank to its files takes longer (slow_pwrite.c, preloaded)
bytes     the rank holds several times as much as the others
late      the rank comes to the save later than the others
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from support.preloading import preloaded

__all__ = ["FINDING_OF", "save_steps"]

_SLOW_PWRITE = Path(__file__).with_name("slow_pwrite.c")

FINDING_OF = {
    "storage": ("slow_storage", "write"),
    "bytes": ("more_bytes", "write"),
    "late": ("late_arrival", "exchange"),
}
"""What a finding should say for each way to be slow: its kind, and the phase in which time was lost."""

_MIB = 1 << 20
_DELAY_MS = 300
_LATE_S = 1.5
_TIMES_AS_MUCH = 8
_LIMIT_S = 120.0

_RANK = """
import os, sys, time
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from bytecheckpoint import BcpSavePlanner, BcpWriter, Config
from bytecheckpoint.observability.observers import flush

run, store, rank, num_ranks, mib, late_s = *sys.argv[1:3], *map(int, sys.argv[3:6]), float(sys.argv[6])
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
state = {f"of_rank_{rank}.{number}": torch.full((1 << 18,), float(number)) for number in range(mib)}
planner = BcpSavePlanner()
dcp.save({}, storage_writer=BcpWriter(f"{run}/warm", config=Config(journal="off")), planner=planner)
for step in map(int, sys.argv[7:]):
    dist.barrier()
    time.sleep(late_s)
    dcp.save(state, storage_writer=BcpWriter(f"{run}/step_{step}"), planner=planner)
assert flush()
dist.barrier()
"""


def save_steps(
    run: Path, steps: Sequence[int], *, kind: str = "", slow: int = 0, num_ranks: int = 4, mib: int = 48
) -> None:
    """Saves steps of a run in processes of their own.

    Args:
        run: Folder of the run.
        steps: Numbers of the steps.
        kind: In which way a rank is slow; "" if none is.
        slow: The rank that is slow.
        num_ranks: Number of processes.
        mib: What each rank holds, in MiB; a rank with more bytes holds more.

    Raises:
        RuntimeError: A rank failed.
    """
    with tempfile.TemporaryDirectory(prefix="slow-") as folder:
        processes = []
        for rank in range(num_ranks):
            is_slow = bool(kind) and rank == slow
            environment = dict(os.environ)
            if is_slow and kind == "storage":
                library = preloaded(_SLOW_PWRITE, Path(folder), untested="SLOW STORAGE")
                environment |= {"LD_PRELOAD": str(library), "SLOW_PWRITE_MS": str(_DELAY_MS)}
            holds = mib * _TIMES_AS_MUCH if is_slow and kind == "bytes" else mib
            late_s = _LATE_S if is_slow and kind == "late" else 0.0
            numbers = map(str, (rank, num_ranks, holds, late_s, *steps))
            command = [sys.executable, "-c", _RANK, str(run), f"{folder}/store", *numbers]
            processes.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
        errors = [process.communicate(timeout=_LIMIT_S)[1] for process in processes]
        failed = [rank for rank, process in enumerate(processes) if process.returncode != 0]
        if failed:
            raise RuntimeError(f"rank {failed[0]}: {errors[failed[0]][-2000:]}")
