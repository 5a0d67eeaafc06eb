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
import time
from collections.abc import Sequence
from pathlib import Path

from support.ending_ranks import TESTS, Ended, EndingRanks
from support.preloading import preloaded

__all__ = ["FINDING_OF", "save_steps", "save_steps_as"]

_SLOW_PWRITE = Path(__file__).with_name("slow_pwrite.c")

FINDING_OF = {
    "storage": ("slow_storage", "write"),
    "bytes": ("more_bytes", "write"),
    "late": ("late_arrival", "exchange"),
}
"""What a finding should say for each way to be slow: its kind, and the phase in which time was lost."""

_DELAY_MS = 300
_LATE_S = 1.5
_TIMES_AS_MUCH = 8
_LIMIT_S = 120.0

_IN_A_PROCESS = (
    "import sys; from support.slow_ranks import save_steps_as; save_steps_as(int(sys.argv[1]), *sys.argv[2:])"
)


def save_steps(
    ending_ranks: EndingRanks,
    run: Path,
    steps: Sequence[int],
    *,
    kind: str = "",
    slow: int = 0,
    num_ranks: int = 4,
    mib: int = 48,
) -> None:
    """Saves steps of a run in processes of their own.

    Args:
        ending_ranks: What forks them.
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
        arguments = (str(num_ranks), str(run), f"{folder}/store", kind, str(slow), str(mib), *map(str, steps))
        others, preloading = [*range(num_ranks)], None
        if kind == "storage":  # a library can be preloaded into a new process alone
            library = preloaded(_SLOW_PWRITE, Path(folder), untested="SLOW STORAGE")
            environment = {**os.environ, "LD_PRELOAD": str(library), "SLOW_PWRITE_MS": str(_DELAY_MS)}
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH", ""))))
            others.remove(slow)
            command = [sys.executable, "-c", _IN_A_PROCESS, str(slow), *arguments]
            preloading = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        ended = ending_ranks.run(len(others), _save_as_one_of, others, arguments, limit_s=_LIMIT_S)
        by_rank = dict(zip(others, ended, strict=True))
        if preloading is not None:
            said = preloading.communicate(timeout=_LIMIT_S)[1]
            by_rank[slow] = Ended(preloading.returncode, said)
        failed = [rank for rank, of_rank in by_rank.items() if of_rank.code != 0]
        if failed:
            raise RuntimeError(f"rank {failed[0]}: {by_rank[failed[0]].said[-2000:]}")


def _save_as_one_of(place: int, ranks: Sequence[int], arguments: Sequence[str]) -> None:
    save_steps_as(ranks[place], *arguments)


def save_steps_as(rank: int, *arguments: str) -> None:
    """Does what one rank does; see ``save_steps``."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    from bytecheckpoint import BcpSavePlanner, BcpWriter, Config
    from bytecheckpoint.observability import flush

    num_ranks, run, store, kind, slow, mib, *steps = arguments
    is_slow = rank == int(slow)
    num_tensors = int(mib) * (_TIMES_AS_MUCH if is_slow and kind == "bytes" else 1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=int(num_ranks))
    state = {f"of_rank_{rank}.{number}": torch.full((1 << 18,), float(number)) for number in range(num_tensors)}
    planner = BcpSavePlanner()
    dcp.save({}, storage_writer=BcpWriter(f"{run}/warm", config=Config(journal="off")), planner=planner)
    for step in steps:
        dist.barrier()
        time.sleep(_LATE_S if is_slow and kind == "late" else 0.0)
        dcp.save(state, storage_writer=BcpWriter(f"{run}/step_{step}"), planner=planner)
    assert flush()
    dist.barrier()
