# SPDX-License-Identifier: Apache-2.0
"""A memory tier beside what the memory itself takes, and beside a disk of limited speed; restores from each tier.

The ceiling of a commit is a copy of the same bytes to memory that was not used before, and their CRC, by as many
threads as the engine has; that of a restore is a copy into the tensors. The limited disk is our own save with
`write_bytes_per_s`, which holds back the writing threads. Everything runs in turn, in one process; restarts are
processes of their own, timed from the first line behind their imports until the state is loaded.
"""

from __future__ import annotations

import argparse
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

import torch
from measurement import machine
from measurement.conditions import Stopwatch, add_arguments, drop_page_cache
from rich.console import Console
from rich.table import Table

import bytecheckpoint
from bytecheckpoint import Config, MemoryTier, Tiers
from bytecheckpoint._testing import crc32
from bytecheckpoint.storage.memory.client import stop_holder

LIMITED_B_PER_S = 500_000_000
PIECE = 8 << 20
RESTART = """
import sys, time, warnings
import torch, torch.distributed.checkpoint as dcp
import bytecheckpoint
from bytecheckpoint import MemoryTier, Tiers
begin = time.perf_counter()
warnings.simplefilter("ignore")
run, num, numel, how = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
state = {f"w{n}": torch.zeros(numel) for n in range(num)}
if how == "memory":
    resumed = bytecheckpoint.resume(Tiers(memory=MemoryTier(), near=run), state, no_dist=True)
    assert resumed is not None and resumed.path.startswith("held://"), resumed
elif how == "disk":
    resumed = bytecheckpoint.resume(run, state, no_dist=True)
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


def copy_and_check(state: dict[str, torch.Tensor], num_threads: int) -> None:
    """Copies all tensors to fresh memory piece by piece, and computes the CRC of each piece."""
    every = [piece for tensor in state.values() for piece in tensor.view(torch.uint8).split(PIECE)]
    to = torch.empty(sum(map(len, every)), dtype=torch.uint8)  # so large that the allocator maps new pages for it
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of the state (default 1)")
    parser.add_argument("--tensors", type=int, default=10, help="(default 10)")
    add_arguments(parser)
    args = parser.parse_args()
    numel = int(args.gigabytes * 1e9 / 4 / args.tensors)
    state = {f"w{n}": torch.ones(numel) for n in range(args.tensors)}
    into = {name: torch.zeros(numel) for name in state}
    num_bytes = numel * 4 * args.tensors
    folder = Path(tempfile.mkdtemp(dir=args.dir, prefix="tiers-"))
    name = f"benchmark-{folder.name}"
    config = Config.from_env()
    memory = Tiers(memory=MemoryTier(keep=1, name=name))
    both = Tiers(memory=MemoryTier(keep=1), near=folder / "near")
    limited = Config(write_bytes_per_s=LIMITED_B_PER_S)
    steps = iter(range(1, 10_000))

    def save(tiers: Tiers | Path, config: Config) -> None:
        bytecheckpoint.save_state_dict(tiers / f"step-{next(steps)}", state, no_dist=True, config=config)

    def staged(tiers: Tiers | Path) -> None:
        handle = bytecheckpoint.async_save_state_dict(tiers / f"step-{next(steps)}", state, no_dist=True)
        handle.staged.result()
        waiting.append(handle)

    def load() -> None:
        bytecheckpoint.load_state_dict(str(bytecheckpoint.latest(memory)), into, no_dist=True)

    waiting: list[bytecheckpoint.SaveHandle] = []
    calls: dict[str, Callable[[], None]] = {
        "copy and CRC": lambda: copy_and_check(state, config.io_threads),
        "commit to memory": lambda: save(memory, config),
        f"commit to a disk at {LIMITED_B_PER_S / 1e6:.0f} MB/s": lambda: save(folder / "limited", limited),
        "copy into the tensors": lambda: copy_back(state, into),
        "restore from memory": load,
        "stall, memory and disk": lambda: staged(both),
        "stall, disk": lambda: staged(folder / "plain"),
    }
    seconds: dict[str, list[float]] = {each: [] for each in calls}
    try:
        with Stopwatch(args.warm_gib, args.idle_limit_s) as watch:
            for repetition in range(args.repetitions + 1):
                for each, call in calls.items():
                    took = watch.time(call)
                    while waiting:
                        waiting.pop().committed.result()
                    for run in ("limited", "plain", "near"):
                        shutil.rmtree(folder / run, ignore_errors=True)
                    if repetition:
                        seconds[each].append(took)
            steps = iter([1])
            save(both, config)
            restart = [sys.executable, "-c", RESTART, str(folder / "near"), str(args.tensors), str(numel)]
            for repetition in range(args.repetitions + 1):
                for how in ("memory", "disk", "stock DCP"):
                    drop_page_cache(folder)
                    said = subprocess.run([*restart, how], check=True, capture_output=True, text=True).stdout
                    if repetition:
                        seconds.setdefault(f"restart from {how}", []).append(float(said.split()[-1]))
    finally:
        for tiers in (memory, both):
            stop_holder(tiers.in_memory.rpartition("/")[2])
        shutil.rmtree(folder)
    medians = {each: statistics.median(of_one) for each, of_one in seconds.items()}
    table = Table("", "seconds", "GB/s", title=f"{num_bytes / 1e9:.2f} GB in {args.tensors} tensors")
    for each, median in medians.items():
        table.add_row(each, f"{median:.3f}", f"{num_bytes / 1e9 / median:.2f}")
    console = Console()
    console.print(table)
    slow = next(each for each in medians if each.startswith("commit to a disk"))
    ratios = {
        "memory: of copy and CRC": medians["copy and CRC"] / medians["commit to memory"],
        "memory: times the limited disk": medians[slow] / medians["commit to memory"],
        "restore: of a copy": medians["copy into the tensors"] / medians["restore from memory"],
        "stall with memory: times that without": medians["stall, memory and disk"] / medians["stall, disk"],
        "restart from memory: times stock DCP": medians["restart from memory"] / medians["restart from stock DCP"],
    }
    for what, ratio in ratios.items():
        console.print(f"{what}: {ratio:.2f}")
    console.print(f"{watch.busy_starts} of {watch.num_calls} calls began on a busy machine")
    if args.json:
        args.json.write_text(
            json.dumps({"seconds": seconds, "ratios": ratios, "machine": machine.facts(args.dir)}, indent=1)
        )


if __name__ == "__main__":
    main()
