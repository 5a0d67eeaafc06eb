# SPDX-License-Identifier: Apache-2.0
"""Conversions, and loads of safetensors, beside the disk's own speed and beside others, in turn, in one run.

A conversion reads as many bytes as it writes, so its ceiling is a disk that reads one file and writes another at the
same time, with O_DIRECT. Memory is what a conversion adds to a process of its own that has imported what it needs,
which is without torch. The others are what DCP offers to join shards of safetensors, and what torchtitan's script
does: it loads a checkpoint whole, and saves it with DCP's writer of safetensors. They do not sync, so a sync is added.
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
from functools import partial
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from measurement import machine
from measurement.conditions import Stopwatch, add_arguments, drop_page_cache, sync_directories, sync_files
from measurement.raw_disk import Disk, has_direct_io
from measurement.states import KINDS, make_state
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from bytecheckpoint import load_state_dict, save_state_dict
from bytecheckpoint.convert import convert
from bytecheckpoint.convert.conversion import Format

CEILING = "disk, reading and writing"
MEMORY = """
import sys
from bytecheckpoint.convert import convert
def peak_kib():  # not ru_maxrss: a process inherits that of the one that started it
    status = open("/proc/self/status").read()
    return int(status.partition("VmHWM:")[2].split()[0])
before = peak_kib()
convert(sys.argv[1], sys.argv[2], to=sys.argv[3])
print(peak_kib() - before)
"""


def read_and_write(reader: Disk, writer: Disk, source: Path, target: Path, num_bytes: int) -> None:
    reading = threading.Thread(target=reader.read, args=(source, num_bytes))
    reading.start()
    writer.write(target, num_bytes)
    reading.join()


def converted(source: Path, target: Path, to: Format) -> None:
    convert(source, target, to=to, shard_size="256MB")


def converted_by_workers(source: Path, target: Path) -> None:
    """In a process of its own: workers import what the main module imports."""
    command = ["convert", source, target, "--shard-size", "256MB", "--workers", "2"]
    subprocess.run([sys.executable, "-m", "bytecheckpoint", *command], check=True, stdout=subprocess.DEVNULL)


def joined_by_dcp(shards: Path, target: Path, files: dict[str, int]) -> None:
    target.mkdir()
    consolidate_safetensors_files(str(shards), str(target), files, num_threads=2)
    sync_files(target)


def exported_by_dcp(source: Path, target: Path, files: dict[str, int], into: dict[str, torch.Tensor]) -> None:
    dcp.load(into, storage_reader=dcp.FileSystemReader(source), no_dist=True)
    dcp.save(into, storage_writer=HuggingFaceStorageWriter(str(target), files, thread_count=2), no_dist=True)
    sync_directories(target)


def added_memory(source: Path, target: Path, to: Format) -> int:
    """Returns the KiB that a conversion adds."""
    command = [sys.executable, "-c", MEMORY, source, target, to]
    added = subprocess.run(command, check=True, capture_output=True, text=True)
    remove(target)
    return int(added.stdout)


def remove(target: Path) -> None:
    if target.is_dir():
        shutil.rmtree(target)
    target.unlink(missing_ok=True)


def loaded(path: Path, state: dict[str, torch.Tensor]) -> None:
    load_state_dict(path, state, no_dist=True)


def loaded_by_dcp(path: Path, state: dict[str, torch.Tensor]) -> None:
    dcp.load(state, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)


def loaded_by_safetensors(path: Path, state: dict[str, torch.Tensor]) -> None:
    for file in path.glob("*.safetensors"):
        for name, value in load_file(file).items():
            state[name].copy_(value)


def measure(arguments: argparse.Namespace, root: Path) -> tuple[dict[str, list[float]], int, dict[str, int], str]:
    """Returns seconds by contender, the bytes of the state, the KiB that conversions add, and the state in words."""
    ours, hf, shards, raw, target = root / "ours", root / "hf", root / "shards", root / "raw", root / "target"
    state = make_state(arguments.kind, arguments.gigabytes)
    tensors = state.named_tensors()
    save_state_dict(ours, tensors, no_dist=True)
    converted(ours, hf, "safetensors")
    files = {name: 1 + number * 4 // len(tensors) for number, name in enumerate(tensors)}
    writer = HuggingFaceStorageWriter(str(shards), files, thread_count=2, save_distributed=True)
    dcp.save(tensors, storage_writer=writer, no_dist=True)
    added = {
        "ours to safetensors": added_memory(ours, target, "safetensors"),
        "safetensors to ours": added_memory(hf, target, "bcp"),
    }
    disks = Disk(2), Disk(2)  # each has buffers of its own
    disks[1].write(raw, state.num_bytes)
    into: dict[str, torch.Tensor] = {}
    contenders: dict[str, Callable[[], None]] = {
        CEILING: partial(read_and_write, *disks, raw, target, state.num_bytes),
        "ours to safetensors": partial(converted, ours, target, "safetensors"),
        "ours to safetensors, bcp with 2 workers": partial(converted_by_workers, ours, target),
        "safetensors to safetensors": partial(converted, hf, target, "safetensors"),
        "safetensors to ours": partial(converted, hf, target, "bcp"),
        "safetensors to DCP's": partial(converted, hf, target, "dcp"),
        "ours to torch.save's": partial(converted, ours, target, "torch"),
        "shards to safetensors, by DCP": partial(joined_by_dcp, shards, target, files),
        "ours to safetensors, by DCP": partial(exported_by_dcp, ours, target, files, into),
        "load by bytecheckpoint": partial(loaded, hf, into),
        "load by DCP's reader": partial(loaded_by_dcp, hf, into),
        "load by safetensors": partial(loaded_by_safetensors, hf, into),
    }
    if arguments.only is not None:
        wanted = {CEILING, *(name.strip() for name in arguments.only.split(";"))}
        contenders = {name: call for name, call in contenders.items() if name in wanted}
    if any("load" in name or "by DCP" in name for name in contenders):
        into |= {name: torch.zeros_like(value) for name, value in tensors.items()}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    with Stopwatch(arguments.warm_gib, arguments.idle_limit_s) as stopwatch:
        for repetition in range(arguments.repetitions + 1):
            for name in contenders if repetition % 2 == 0 else reversed(contenders):
                for source in (ours, hf, shards):
                    drop_page_cache(source)
                took = stopwatch.time(contenders[name])
                remove(target)
                if repetition:
                    seconds[name].append(took)
    return seconds, state.num_bytes, added, state.description


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", nargs="?", choices=KINDS, default="large", help="kind of state; see compare.py --help")
    parser.add_argument("--gigabytes", type=float, help="size of the state, instead of the kind's own")
    parser.add_argument("--only", help=f"contenders between semicolons, beside '{CEILING}'; default: all")
    add_arguments(parser)
    arguments = parser.parse_args()
    if not has_direct_io(arguments.dir):
        sys.exit(f"{arguments.dir}: this file system has no O_DIRECT")
    with tempfile.TemporaryDirectory(dir=arguments.dir, prefix="convert-") as folder:
        seconds, num_bytes, added, description = measure(arguments, Path(folder))
    facts = machine.facts(arguments.dir)
    console = Console(highlight=False, width=100)
    memory = ", ".join(f"{name}: {kib >> 10} MiB" for name, kib in added.items())
    console.print(f"{description}; memory that is added, {memory}; {machine.summary(facts)}")
    medians = {name: statistics.median(of_rounds) for name, of_rounds in seconds.items()}
    table = Table()
    for column in ("", "s", "GB/s", "of the ceiling"):
        table.add_column(column, justify="right" if column else "left")
    for name, s in medians.items():
        share = f"{medians[CEILING] / s:.0%}" if " to " in name else ""
        table.add_row(name, f"{s:.3f}", f"{num_bytes / s / 1e9:.2f}", share)
    console.print(table)
    if arguments.json:
        report = {"command": machine.command("convert.py", arguments, parser), "machine": facts}
        report |= {"versions": machine.versions(), "state": description, "bytes": num_bytes, "seconds": seconds}
        report |= {"added_kib": added}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
