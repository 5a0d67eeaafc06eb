# SPDX-License-Identifier: Apache-2.0
"""Saves of a state of which a part trains, with and without `link_unchanged`, on ranks of this machine.

The disk is limited by `write_bytes_per_s`, which holds back the writing threads of each rank. "Staging with hash" is
what a background save costs before anything is written. A full training state shows what looking costs where
everything has changed: its saves without and with `link_unchanged` run in turn.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measurement import machine
from measurement.conditions import add_arguments
from measurement.job_of_ranks import run_job
from rich.console import Console
from rich.table import Table

import bytecheckpoint
from bytecheckpoint import Config
from bytecheckpoint.dcp.stager import BcpStager

LIMITED_B_PER_S = 500_000_000
FULL, LINKED, STAGED, STAGED_PLAIN = "limited, all written", "limited, linked", "staged with hashes", "staged"
TRAINS, TRAINS_LOOKED = "all has changed", "all has changed, looked at"
LINK = Config(link_unchanged=True, link_rewrite_every=1000)


class Rank:
    """One rank with its part of a frozen base, adapters, and a state that trains."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self._folder, self._num = folder, dist.get_world_size()
        rank = dist.get_rank()
        numel = int(args.gigabytes * 1e9 / 4 / args.tensors / self._num)
        self._base = {f"base.{rank}.{n}": torch.randn(numel) for n in range(args.tensors)}
        self._adapters = {f"lora.{rank}.{n}": torch.zeros(max(1, numel // 250)) for n in range(args.tensors)}
        self._trained = {f"w.{rank}.{n}": torch.randn(numel) for n in range(args.tensors)}
        self._step = 0
        self.seconds: dict[str, list[float]] = {}
        self.written: list[float] = []

    def save(self, what: str, run: str, state: dict[str, torch.Tensor], config: Config) -> None:
        self._step += 1
        dist.barrier()
        begin = time.perf_counter()
        report = bytecheckpoint.async_save_state_dict(self._folder / run / f"step-{self._step}", state, config=config)
        done = report.committed.result()
        self.seconds.setdefault(what, []).append(time.perf_counter() - begin)
        if what == LINKED:
            changed = sum(tensor.nbytes for tensor in self._adapters.values())
            self.written.append(done.bytes_written / changed)
        if dist.get_rank() == 0:
            for old in sorted((self._folder / run).glob("step-*"), key=lambda path: path.stat().st_mtime)[:-1]:
                shutil.rmtree(old)

    def stage(self, what: str, state: dict[str, torch.Tensor], config: Config) -> None:
        dist.barrier()
        begin = time.perf_counter()
        staged = BcpStager(config=config).stage(state)
        dist.barrier()  # a save is over when all ranks are
        self.seconds.setdefault(what, []).append(time.perf_counter() - begin)
        del staged

    def round(self, is_counted: bool) -> None:
        """Every kind of save once."""
        limit = LIMITED_B_PER_S // self._num
        all_of_it = {**self._base, **self._adapters}
        for tensor in self._adapters.values():
            tensor += 1
        self.save(FULL, "full", all_of_it, Config(write_bytes_per_s=limit))
        self.save(LINKED, "linked", all_of_it, replace(LINK, write_bytes_per_s=limit))
        self.stage(STAGED, all_of_it, LINK)
        self.stage(STAGED_PLAIN, all_of_it, Config())
        for what, config in ((TRAINS, Config()), (TRAINS_LOOKED, LINK)):
            for tensor in self._trained.values():
                tensor += 1
            self.save(what, f"trains-{config.link_unchanged}", self._trained, config)
        if not is_counted:
            self.seconds.clear()
            self.written.clear()


def work_as_a_rank(folder: Path, args: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    rank = Rank(folder, args)
    # The second save of a run with links writes all of the base once more, if too much of its file has changed.
    for repetition in range(args.repetitions + 2):
        rank.round(is_counted=repetition >= 2)
    if dist.get_rank() == 0:
        said = {"seconds": rank.seconds, "written": rank.written}
        (folder / "said").write_text(json.dumps(said))
    bytecheckpoint.shutdown()
    dist.destroy_process_group()


def show(said: dict[str, Any], num_bytes: float) -> dict[str, float]:
    medians = {what: statistics.median(times) for what, times in said["seconds"].items()}
    table = Table("", "seconds", "GB/s", title=f"{num_bytes / 1e9:.2f} GB")
    for what, median in medians.items():
        table.add_row(what, f"{median:.3f}", f"{num_bytes / 1e9 / median:.2f}")
    console = Console()
    console.print(table)
    ratios = {
        "bytes written, of those that changed": statistics.median(said["written"]),
        "linked save, times staging with hashes": medians[LINKED] / medians[STAGED],
        "linked save, of the full one": medians[LINKED] / medians[FULL],
        "staging with hashes, times staging": medians[STAGED] / medians[STAGED_PLAIN],
        "looking where all has changed, times not": medians[TRAINS_LOOKED] / medians[TRAINS],
    }
    for what, ratio in ratios.items():
        console.print(f"{what}: {ratio:.3f}")
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of the base, of all ranks (default 1)")
    parser.add_argument("--tensors", type=int, default=50, help="of each rank (default 50)")
    parser.add_argument("--ranks", type=int, default=2, help="(default 2)")
    parser.add_argument("--as-rank", type=Path, help=argparse.SUPPRESS)
    add_arguments(parser)
    args = parser.parse_args()
    if args.as_rank:
        work_as_a_rank(args.as_rank, args)
        return
    folder = Path(tempfile.mkdtemp(dir=args.dir, prefix="unchanged-"))
    try:
        run_job([*sys.argv, "--as-rank", str(folder)], args.ranks)
        said = json.loads((folder / "said").read_text())
    finally:
        shutil.rmtree(folder)
    ratios = show(said, args.gigabytes * 1e9)
    if args.json:
        args.json.write_text(json.dumps({**said, "ratios": ratios, "machine": machine.facts(args.dir)}, indent=1))


if __name__ == "__main__":
    main()
