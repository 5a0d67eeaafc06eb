# SPDX-License-Identifier: Apache-2.0
"""A memory tier beside what the memory itself takes, and beside a disk of limited speed; restores from each tier.

The ceiling of a commit is a copy of the same bytes and their CRC, by as many threads as the engine has: to memory that
is in use, and to new memory, which the system has to find first. That of a restore is a copy into the tensors. The
limited disk is our own save with `write_bytes_per_s`, which holds back the writing threads. Everything runs in turn, in
one process; restarts are processes of their own, timed from the first line behind their imports until the state is
loaded.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from measurement import machine
from measurement.conditions import Stopwatch, add_arguments, drop_page_cache
from rich.console import Console
from rich.table import Table

import bytecheckpoint
from bytecheckpoint import Config, MemoryTier, Tiers
from bytecheckpoint._testing import crc32
from bytecheckpoint.storage.memory.connection import stop_holder

LIMITED_B_PER_S = 500_000_000
PIECE = 8 << 20
COPY, COPY_TO_NEW, COMMIT = "copy and CRC", "copy and CRC, new memory", "commit to memory"
LIMITED = f"commit to a disk at {LIMITED_B_PER_S / 1e6:.0f} MB/s"
COPY_BACK, RESTORE = "copy into the tensors", "restore from memory"
STALL, STALL_OF_DISK = "stall, memory and disk", "stall, disk"
RESTART_FROM = "restart from "
RESTART = """
import sys, time, warnings
import torch, torch.distributed.checkpoint as dcp
from bytecheckpoint import MemoryTier, Tiers, resume
begin = time.perf_counter()
warnings.simplefilter("ignore")
run, num, numel, how = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
state = {f"w{n}": torch.zeros(numel) for n in range(num)}
if how == "memory":
    resumed = resume(Tiers(memory=MemoryTier(), near=run), state, no_dist=True)
    assert resumed is not None and resumed.path.startswith("held://"), resumed
elif how == "disk":
    resumed = resume(run, state, no_dist=True)
    assert resumed is not None
else:
    dcp.load(state, checkpoint_id=f"{run}/step-1", no_dist=True)
assert state["w0"].eq(1).all()
print(time.perf_counter() - begin)
"""


def in_threads(num: int, work: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=work, args=(number,)) for number in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def copy_and_check(state: dict[str, torch.Tensor], num_threads: int, to: torch.Tensor) -> None:
    """Copies all tensors to ``to`` piece by piece, and computes the CRC of as many bytes."""
    every = [piece for tensor in state.values() for piece in tensor.view(torch.uint8).split(PIECE)]
    ends = list(accumulate(map(len, every)))
    sample = every[0].numpy().tobytes()

    def work(number: int) -> None:
        for at in range(number, len(every), num_threads):
            to[ends[at] - len(every[at]) : ends[at]].copy_(every[at])
            crc32(sample)

    in_threads(num_threads, work)


def copy_back(state: dict[str, torch.Tensor], into: dict[str, torch.Tensor]) -> None:
    for name, tensor in state.items():
        into[name].copy_(tensor)


Seconds = dict[str, list[float]]


def in_this_process(state: dict[str, torch.Tensor], memory: Tiers, both: Tiers, folder: Path, args: Any) -> Seconds:
    """Times commits, restores and stalls, in turn."""
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    num_bytes = sum(tensor.nbytes for tensor in state.values())
    in_use = torch.zeros(num_bytes, dtype=torch.uint8)
    num_threads = Config.from_env().io_threads
    steps = itertools.count(1)
    waiting: list[bytecheckpoint.SaveHandle] = []

    def save(tiers: Tiers | Path, config: Config | None = None) -> None:
        bytecheckpoint.save_state_dict(tiers / f"step-{next(steps)}", state, no_dist=True, config=config)

    def stage(tiers: Tiers | Path) -> None:
        handle = bytecheckpoint.async_save_state_dict(tiers / f"step-{next(steps)}", state, no_dist=True)
        handle.staged.result()
        waiting.append(handle)

    def load() -> None:
        bytecheckpoint.load_state_dict(str(bytecheckpoint.latest(memory)), into, no_dist=True)

    limited = Config(write_bytes_per_s=LIMITED_B_PER_S)
    calls: dict[str, Callable[[], None]] = {
        COPY: lambda: copy_and_check(state, num_threads, in_use),
        COPY_TO_NEW: lambda: copy_and_check(state, num_threads, torch.empty(num_bytes, dtype=torch.uint8)),
        COMMIT: lambda: save(memory),
        LIMITED: lambda: save(folder / "limited", limited),
        COPY_BACK: lambda: copy_back(state, into),
        RESTORE: load,
        STALL: lambda: stage(both),
        STALL_OF_DISK: lambda: stage(folder / "plain"),
    }
    seconds: Seconds = {each: [] for each in calls}
    with Stopwatch(args.warm_gib, args.idle_limit_s) as watch:
        for repetition in range(args.repetitions + 1):
            # Forth and back: what ran before has left its traces in the caches.
            for each, call in list(calls.items())[:: -1 if repetition % 2 else 1]:
                took = watch.time(call)
                while waiting:
                    waiting.pop().committed.result()
                for run in ("limited", "plain", "near"):
                    shutil.rmtree(folder / run, ignore_errors=True)
                if repetition:
                    seconds[each].append(took)
    print(f"{watch.busy_starts} of {watch.num_calls} calls began on a busy machine")
    return seconds


def restarts(state: dict[str, torch.Tensor], both: Tiers, repetitions: int) -> Seconds:
    """Times processes that load what another one has saved, in turn."""
    bytecheckpoint.save_state_dict(both / "step-1", state, no_dist=True)
    numel = next(iter(state.values())).numel()
    command = [sys.executable, "-c", RESTART, str(both.near), str(len(state)), str(numel)]
    seconds: Seconds = {f"{RESTART_FROM}{how}": [] for how in ("memory", "disk", "stock DCP")}
    for repetition in range(repetitions + 1):
        for each, times in seconds.items():
            drop_page_cache(Path(both.near))
            how = each.removeprefix(RESTART_FROM)
            said = subprocess.run([*command, how], check=True, capture_output=True, text=True).stdout
            times += [float(said.split()[-1])] if repetition else []
    return seconds


def show(seconds: Seconds, num_bytes: int) -> dict[str, float]:
    """Prints medians and ratios, and returns the ratios."""
    medians = {each: statistics.median(of_one) for each, of_one in seconds.items()}
    table = Table("", "seconds", "GB/s", title=f"{num_bytes / 1e9:.2f} GB")
    for each, median in medians.items():
        table.add_row(each, f"{median:.3f}", f"{num_bytes / 1e9 / median:.2f}")
    console = Console()
    console.print(table)
    ratios = {
        "commit to memory, of a copy with CRC": medians[COPY] / medians[COMMIT],
        "commit to memory, of a copy with CRC to new memory": medians[COPY_TO_NEW] / medians[COMMIT],
        "commit to memory, times as fast as the limited disk": medians[LIMITED] / medians[COMMIT],
        "restore from memory, of a copy": medians[COPY_BACK] / medians[RESTORE],
        "stall with memory, times that without": medians[STALL] / medians[STALL_OF_DISK],
        "restart from memory, of stock DCP's time": medians[f"{RESTART_FROM}memory"]
        / medians[f"{RESTART_FROM}stock DCP"],
    }
    for what, ratio in ratios.items():
        console.print(f"{what}: {ratio:.2f}")
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of the state (default 1)")
    parser.add_argument("--tensors", type=int, default=10, help="(default 10)")
    add_arguments(parser)
    args = parser.parse_args()
    numel = int(args.gigabytes * 1e9 / 4 / args.tensors)
    state = {f"w{n}": torch.ones(numel) for n in range(args.tensors)}
    folder = Path(tempfile.mkdtemp(dir=args.dir, prefix="tiers-"))
    memory = Tiers(memory=MemoryTier(keep=1, name=f"benchmark-{folder.name}"))
    both = Tiers(memory=MemoryTier(keep=1), near=folder / "near")
    try:
        seconds = in_this_process(state, memory, both, folder, args)
        seconds |= restarts(state, both, args.repetitions)
    finally:
        for tiers in (memory, both):
            stop_holder(tiers.in_memory.rpartition("/")[2])
        shutil.rmtree(folder)
    ratios = show(seconds, numel * 4 * args.tensors)
    if args.json:
        facts = machine.facts(args.dir)
        args.json.write_text(json.dumps({"seconds": seconds, "ratios": ratios, "machine": facts}, indent=1))


if __name__ == "__main__":
    main()
