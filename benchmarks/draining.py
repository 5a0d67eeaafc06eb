# SPDX-License-Identifier: Apache-2.0
"""What training loses while a step of `Tiers` goes on from the near disk to the durable place.

A training step is a product of matrices on all cores. Steps without a copy, beside one as fast as it goes, and beside
one that `drain_bytes_per_s` limits, run in turn; near and durable place are folders of one disk, which is the hardest
case for the copy, not for training.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
from measurement import machine
from measurement.conditions import add_arguments, wait_until_idle
from rich.console import Console
from rich.table import Table

from bytecheckpoint import Tiers, async_save_state_dict, shutdown

ALONE, COPIED, LIMITED = WAYS = "no copy", "beside a copy", "beside a limited copy"
LIMITED_B_PER_S = 200_000_000
MIN_STEPS = 40


State = dict[str, torch.Tensor]


class Training:
    """A step takes some hundredths of a second on all cores."""

    def __init__(self, width: int) -> None:
        self._weights = torch.randn(width, width)
        self._sample = torch.randn(width, width)

    def step(self) -> float:
        begin = time.perf_counter()
        self._sample = torch.mm(self._weights, self._sample).clamp_(-1, 1)
        return time.perf_counter() - begin


def steps_beside(
    training: Training, state: dict[str, torch.Tensor], folder: Path, way: str
) -> tuple[list[float], float]:
    """Returns the seconds of each step, and for how long a copy was under way."""
    if way == ALONE:
        return [training.step() for _ in range(MIN_STEPS)], 0.0
    limit = LIMITED_B_PER_S if way == LIMITED else 0
    tiers = Tiers(near=folder / way / "near", durable=folder / way / "durable", drain_bytes_per_s=limit)
    handle = async_save_state_dict(tiers / "step-1", state, no_dist=True)
    handle.near.result()
    begin, times = time.perf_counter(), [training.step()]
    while not handle.durable.done():
        times.append(training.step())
    took = time.perf_counter() - begin
    shutdown()
    shutil.rmtree(folder / way)
    return times, took


def show(seconds: dict[str, list[float]], copies: dict[str, list[float]], num_bytes: int) -> dict[str, float]:
    alone = statistics.mean(seconds[ALONE])
    table = Table("", "steps", "ms a step", "lost while it copies", "seconds lost", "copy, seconds")
    ratios = {}
    for way, times in seconds.items():
        mean = statistics.mean(times)
        took = statistics.median(copies[way]) if copies[way] else 0.0
        ratios[f"lost {way}"] = mean / alone - 1
        cells = f"{1e3 * mean:.1f}", f"{mean / alone - 1:.1%}", f"{took * (1 - alone / mean):.2f}", f"{took:.2f}"
        table.add_row(way, str(len(times)), *cells)
    console = Console()
    console.print(f"{num_bytes / 1e9:.2f} GB")
    console.print(table)
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of the state (default 1)")
    parser.add_argument("--width", type=int, default=1500, help="of the matrices (default 1500)")
    add_arguments(parser)
    args = parser.parse_args()
    state = {f"w{n}": torch.ones(int(args.gigabytes * 1e9 / 40)) for n in range(10)}
    training = Training(args.width)
    folder = Path(tempfile.mkdtemp(dir=args.dir, prefix="draining-"))
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    copies: dict[str, list[float]] = {way: [] for way in WAYS}
    try:
        for repetition in range(args.repetitions + 1):
            for way in WAYS[:: -1 if repetition % 2 else 1]:
                wait_until_idle(args.idle_limit_s)
                times, took = steps_beside(training, state, folder, way)
                if repetition:
                    seconds[way] += times
                    copies[way] += [took] if took else []
    finally:
        shutil.rmtree(folder)
    ratios = show(seconds, copies, sum(tensor.nbytes for tensor in state.values()))
    if args.json:
        facts = machine.facts(args.dir)
        args.json.write_text(json.dumps({"seconds": seconds, "ratios": ratios, "machine": facts}, indent=1))


if __name__ == "__main__":
    main()
