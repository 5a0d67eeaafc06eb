# SPDX-License-Identifier: Apache-2.0
"""Save and load of one state by bytecheckpoint and by stock DCP, interleaved in one run.

Every save is durable (files and directory synced), every load goes into existing tensors with the files' page cache
dropped. Before each timed call a child process touches 4 GiB of huge pages, so that all contenders find the memory of a
virtual machine warm. Prints medians and ratios to DCP with two threads; absolute figures move with the machine.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from rich.progress import track

import bytecheckpoint

BASELINE = "dcp, 2 threads"
TOUCH = """
import mmap
memory = mmap.mmap(-1, 4 << 30)
memory.madvise(mmap.MADV_HUGEPAGE)
for offset in range(0, 4 << 30, 2 << 20):
    memory[offset] = 1
"""

Contender = tuple[Callable[[Path], Any], Callable[[Path], Any]]
CONTENDERS: dict[str, Contender] = {
    "dcp, 1 thread": (dcp.FileSystemWriter, dcp.FileSystemReader),
    BASELINE: (lambda path: dcp.FileSystemWriter(path, thread_count=2), dcp.FileSystemReader),
    "bytecheckpoint": (bytecheckpoint.BcpWriter, bytecheckpoint.BcpReader),
}


def make_state(kind: str, gigabytes: float) -> dict[str, torch.Tensor]:
    """`large`: tensors of 11 MiB. `small`: tensors of 16 KiB."""
    generator = torch.Generator().manual_seed(1)
    shape, dtype = ((2048, 2752), torch.bfloat16) if kind == "large" else ((4096,), torch.float32)
    one = torch.empty(shape, dtype=dtype).nbytes
    count = max(1, round(gigabytes * 1e9 / one))
    return {f"layers.{i}.weight": torch.empty(shape, dtype=dtype).normal_(generator=generator) for i in range(count)}


def sync_directory(path: Path) -> None:
    """Stock DCP syncs its files but not the directory; durability is matched here."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def drop_page_cache(path: Path) -> None:
    for file in path.iterdir():
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def timed(call: Callable[[], Any]) -> float:
    gc.collect()
    subprocess.run([sys.executable, "-S", "-c", TOUCH], check=True)
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def one_round(state: dict[str, torch.Tensor], contender: Contender, path: Path) -> tuple[float, float]:
    make_writer, make_reader = contender
    wanted = {name: tensor[..., :8].clone() for name, tensor in state.items()}

    def save() -> None:
        dcp.save(state, storage_writer=make_writer(path), no_dist=True)
        sync_directory(path)

    save_s = timed(save)
    drop_page_cache(path)
    for tensor in state.values():
        tensor[..., :8].zero_()
    load_s = timed(lambda: dcp.load(state, storage_reader=make_reader(path), no_dist=True))
    for name, head in wanted.items():
        if not torch.equal(state[name][..., :8], head):
            raise SystemExit(f"{name}: loaded something else than was saved")
    shutil.rmtree(path)
    return save_s, load_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", nargs="?", choices=("large", "small"), default="large")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the state (default 1)")
    parser.add_argument("--repetitions", type=int, default=5, help="timed rounds; one more is not counted")
    parser.add_argument("--dir", type=Path, help="where to write; default: a temporary directory here")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")

    state = make_state(arguments.kind, arguments.gigabytes)
    gigabytes = sum(tensor.nbytes for tensor in state.values()) / 1e9
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in CONTENDERS}
    with tempfile.TemporaryDirectory(dir=arguments.dir or Path.cwd(), prefix="compare-") as root:
        for repetition in track(range(arguments.repetitions + 1), description="rounds"):
            for name, contender in CONTENDERS.items():
                figures = one_round(state, contender, Path(root) / "ckpt")
                if repetition:
                    times[name].append(figures)

    medians = {
        name: [statistics.median(column) for column in zip(*all_s, strict=True)] for name, all_s in times.items()
    }
    print(f"{arguments.kind}: {gigabytes:.2f} GB in {len(state)} tensors, medians of {arguments.repetitions}")
    for name, (save_s, load_s) in medians.items():
        save_ratio, load_ratio = medians[BASELINE][0] / save_s, medians[BASELINE][1] / load_s
        print(
            f"{name:16} save {save_s:6.3f} s {gigabytes / save_s:5.2f} GB/s x{save_ratio:5.2f}   "
            f"load {load_s:6.3f} s {gigabytes / load_s:5.2f} GB/s x{load_ratio:5.2f}"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps({"kind": arguments.kind, "gigabytes": gigabytes, "seconds": times}))


if __name__ == "__main__":
    main()
