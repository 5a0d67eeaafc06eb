# SPDX-License-Identifier: Apache-2.0
"""Times loads by several ranks of one machine: each reads for itself, or one reads each byte and hands it to all.

All ranks load one checkpoint at once, over gloo: everything on every rank (ddp), two replicas of shards (hsdp), or only
shards (fsdp, where nothing can be shared). Modes take turns, in another order each round. A load takes as long as its
slowest rank. The page cache is dropped before each load. "page cache" is independent reading without O_DIRECT, so the
ranks of one machine find in the cache what another rank has read. "disk" is the ceiling: all ranks together read what
is stored once, O_DIRECT, in requests of 8 MiB, and do nothing with it. Elements are compared after the last round.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from measurement import machine
from measurement.conditions import drop_page_cache, wait_until_idle
from measurement.raw_disk import Disk
from rich.console import Console
from rich.table import Table

LAYOUTS = ("ddp", "hsdp", "fsdp")
MODES = {
    "independent": {"shared_reading": "independent"},
    "page cache": {"shared_reading": "independent", "direct_io": False},
    "cooperative": {"shared_reading": "cooperative"},
    "default": {},
    "disk": {},
}
TENSOR_BYTES = 16 << 20
COLUMNS = 1024


def make_state(layout: str, num_tensors: int, *, is_filled: bool) -> dict[str, Any]:
    """Makes int32 tensors whose values follow from their numbers, as this rank of the default group holds them."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    shape = (TENSOR_BYTES // 4 // COLUMNS, COLUMNS)
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, size // 2) if layout == "hsdp" else (size,))
    placements = [Replicate(), Shard(0)] if layout == "hsdp" else [Shard(0)]
    state: dict[str, Any] = {}
    for number in range(num_tensors):
        full = torch.arange(shape[0] * shape[1], dtype=torch.int32).reshape(shape) * (number + 1)
        value = full if is_filled else torch.zeros_like(full)
        state[f"t{number}"] = (
            value if layout == "ddp" else distribute_tensor(value, mesh, placements, src_data_rank=None)
        )
    return state


def check(state: dict[str, Any], wanted: dict[str, Any]) -> None:
    import torch

    for key, value in state.items():
        if not torch.equal(*(getattr(t, "to_local", lambda t=t: t)() for t in (value, wanted[key]))):
            raise RuntimeError(f"{key} is not what was saved")


def measure(rank: int, arguments: argparse.Namespace, directory: str, answers: Any) -> None:
    """Runs one rank's part. Rank 0 sends the figures of all ranks."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    from bytecheckpoint import BcpLoadPlanner, BcpReader, BcpSavePlanner, BcpWriter, Config

    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    store = f"file://{directory}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=arguments.ranks)
    num_tensors = max(1, round(arguments.gigabytes * 1e9 / TENSOR_BYTES))
    modes = list(arguments.modes)
    for layout in arguments.layouts or LAYOUTS:
        path = Path(directory) / layout
        wanted = make_state(layout, num_tensors, is_filled=True)
        dcp.save(wanted, storage_writer=BcpWriter(path), planner=BcpSavePlanner())
        stored = sum(file.stat().st_size for file in path.glob("*.distcp"))
        disk, raw = Disk(1), Path(directory) / f"raw-{rank}"
        disk.write(raw, stored // arguments.ranks)
        state = make_state(layout, num_tensors, is_filled=False)
        figures: dict[str, Any] = {mode: {"seconds": [], "bytes_read": 0, "bytes_received": 0} for mode in modes}
        for repetition in range(arguments.repetitions + 1):
            for mode in modes[repetition % len(modes) :] + modes[: repetition % len(modes)]:
                if rank == 0:
                    drop_page_cache(path)
                    wait_until_idle(arguments.idle_limit_s)
                dist.barrier()
                begin = time.perf_counter()
                if mode == "disk":
                    disk.read(raw, stored // arguments.ranks)
                    moved = [stored // arguments.ranks, 0]
                else:
                    reader = BcpReader(path, config=Config(**MODES[mode]))
                    dcp.load(state, storage_reader=reader, planner=BcpLoadPlanner())
                    report = reader.last_report
                    assert report is not None
                    moved = [report.bytes_read, report.bytes_received]
                facts = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
                counts = torch.tensor(moved)
                dist.all_reduce(facts, dist.ReduceOp.MAX)
                dist.all_reduce(counts)
                if repetition > 0:
                    figures[mode]["seconds"].append(float(facts))
                figures[mode] |= {"bytes_read": int(counts[0]), "bytes_received": int(counts[1])}
        raw.unlink()
        check(state, wanted)
        if rank == 0:
            answers.send({"layout": layout, "stored_bytes": stored, "modes": figures})
    dist.barrier()
    dist.destroy_process_group()


def table_of(results: list[dict[str, Any]]) -> Table:
    table = Table()
    for column in ("", "GB stored", "read, x stored", "received, x stored", "s", "x independent", "of the disk"):
        table.add_column(column, justify="right" if column else "left")
    for result in results:
        middle = {mode: statistics.median(figures["seconds"]) for mode, figures in result["modes"].items()}
        for mode, figures in result["modes"].items():
            table.add_row(
                f"{result['layout']}, {mode}",
                f"{result['stored_bytes'] / 1e9:.2f}",
                f"{figures['bytes_read'] / result['stored_bytes']:.3f}",
                f"{figures['bytes_received'] / result['stored_bytes']:.3f}",
                f"{middle[mode]:.3f}",
                f"{middle['independent'] / middle[mode]:.2f}" if "independent" in middle else "",
                f"{middle['disk'] / middle[mode]:.0%}" if "disk" in middle else "",
            )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layouts", nargs="*", help=f"layouts: {', '.join(LAYOUTS)} (default: all)")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="default: all")
    parser.add_argument("--ranks", type=int, default=4, help="even number of ranks (default 4)")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the state (default 1)")
    parser.add_argument("--repetitions", type=int, default=5, help="counted rounds, after one that is not (default 5)")
    parser.add_argument("--idle-limit-s", type=float, default=20.0, help="longest wait for idleness (default 20)")
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="where to write (default: here)")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    arguments = parser.parse_args()
    if unknown := set(arguments.layouts) - set(LAYOUTS):
        parser.error(f"unknown layout: {', '.join(sorted(unknown))}")

    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="sharing-", dir=arguments.dir) as directory:
        receiver, sender = context.Pipe(duplex=False)
        ranks = [
            context.Process(target=measure, args=(rank, arguments, directory, sender if rank == 0 else None))
            for rank in range(arguments.ranks)
        ]
        for process in ranks:
            process.start()
        sender.close()
        results: list[dict[str, Any]] = []
        try:
            while True:
                results.append(receiver.recv())
        except EOFError:
            pass
        for process in ranks:
            process.join()
    if len(results) != len(arguments.layouts or LAYOUTS) or any(process.exitcode for process in ranks):
        raise SystemExit("a rank has failed; its error is above")

    facts = machine.facts(arguments.dir)
    console = Console(highlight=False, width=120)
    console.print(table_of(results))
    console.print(f"{arguments.ranks} gloo ranks of one machine; {machine.summary(facts)}")
    if arguments.json:
        command = machine.command("sharing.py", arguments, parser)
        report = {"command": command, "machine": facts, "versions": machine.versions(), "figures": results}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
