# SPDX-License-Identifier: Apache-2.0
"""Simulates planning a save of very many ranks in one process: the coordinator's work on what they send.

Each rank holds about 200 chunks. Ours begins with the ranks' inventories as bytes and ends with assignments as bytes.
Stock DCP begins with the ranks' pickled plans and ends with pickled plans for them. Stock needs minutes and gigabytes
where ours needs a second, so it runs at separate sizes (--stock-ranks). One thread runs without waiting. The table
shows processor seconds, which vary less than wall-clock seconds on a machine that others use. The kernel's part is the
clearing of memory before the kernel hands it out. Figures are medians of --repetitions. If ranks do not divide evenly,
some shards have one replica more, and no plan is even.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import pickle
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from measurement import machine
from measurement.conditions import wait_until_idle
from rich.console import Console
from rich.table import Table

from bytecheckpoint import _testing

MIB = 1 << 20
NUM_TENSORS = 200
# Rows of the tensors of a layer. Sizes that do not divide evenly give some ranks less than others, and some nothing.
ROWS = (1_000_003, 524_288, 131_072, 262_144, 1_000_000, 524_288, 131_072, 262_147)
COLUMNS = 1024
CLOCKS: dict[str, Callable[[], float]] = {
    "wall_s": time.perf_counter,
    "cpu_s": time.process_time,
    "kernel_s": lambda: resource.getrusage(resource.RUSAGE_SELF).ru_stime,
}
STEPS = ("receive", "validate", "dedup, balance", "assign")

Box = tuple[list[int], list[int]]


@dataclasses.dataclass(frozen=True)
class LocalInventory:
    """A tensor of the model, and the box of it that one rank holds."""

    fqn: str
    sizes: list[int]
    box: Box
    is_whole: bool = False


def _chunk(size: int, num_chunks: int, number: int) -> tuple[int, int]:
    """Returns offset and size of one chunk, as torch.chunk cuts. An empty chunk lies at the end, as in DTensor."""
    full = -(-size // num_chunks)
    begin = min(full * number, size)
    return begin, min(full, size - begin)


def _name(tensor: int) -> str:
    return f"model.layers.{tensor // len(ROWS)}.block.{tensor % len(ROWS)}.weight"


def _sharded(rank: int, num_shards: int, first: int = 0) -> Iterator[LocalInventory]:
    for tensor in range(first, first + NUM_TENSORS):
        rows = ROWS[tensor % len(ROWS)]
        begin, size = _chunk(rows, num_shards, rank % num_shards)
        yield LocalInventory(_name(tensor), [rows, COLUMNS], ([begin, 0], [size, COLUMNS]))


def ddp(rank: int, num_ranks: int) -> Iterator[LocalInventory]:
    """Every rank holds everything."""
    for tensor in range(NUM_TENSORS):
        sizes = [ROWS[tensor % len(ROWS)], COLUMNS]
        yield LocalInventory(_name(tensor), sizes, ([0, 0], sizes), is_whole=True)


def fsdp(rank: int, num_ranks: int) -> Iterator[LocalInventory]:
    """Every tensor is cut into as many shards as there are ranks."""
    return _sharded(rank, num_ranks)


def hsdp(rank: int, num_ranks: int) -> Iterator[LocalInventory]:
    """There are eight replicas, each cut into shards."""
    return _sharded(rank, max(num_ranks // 8, 1))


def three_d(rank: int, num_ranks: int) -> Iterator[LocalInventory]:
    """Five pipeline stages of 200 tensors, tensor parallelism of 4 by columns, FSDP by rows.

    A quarter of the tensors are not tensor parallel, so four ranks hold each of their shards.
    """
    num_shards = max(num_ranks // 20, 1)
    stage, place = divmod(rank, 4 * num_shards)
    shard, column = divmod(place, 4)
    for held in _sharded(shard, num_shards, first=stage * NUM_TENSORS):
        if held.fqn.endswith(("3.weight", "7.weight")):
            yield held
            continue
        begin, size = _chunk(COLUMNS, 4, column)
        yield dataclasses.replace(held, box=([held.box[0][0], begin], [held.box[1][0], size]))


KINDS: dict[str, Callable[[int, int], Iterator[LocalInventory]]] = {
    "ddp": ddp,
    "fsdp": fsdp,
    "hsdp": hsdp,
    "3-d": three_d,
}


def blob_of(rank: int, held: Iterator[LocalInventory]) -> bytes:
    entries = [
        (h.fqn, "tensor" if h.is_whole else "shard", b"", True, "bfloat16", h.sizes, [h.box], False, False, 0)
        for h in held
    ]
    return _testing.Inventory.of_rank(rank, entries).encode()


def _status_bytes(field: str) -> int:
    return int(Path("/proc/self/status").read_text().split(f"{field}:")[1].split()[0]) * 1024


class Timer:
    """Seconds of each step by clock and repetition."""

    def __init__(self) -> None:
        self.seconds: dict[str, dict[str, list[float]]] = {clock: {step: [] for step in STEPS} for clock in CLOCKS}

    def time(self, step: str, call: Callable[[], Any]) -> Any:
        begin = {clock: read() for clock, read in CLOCKS.items()}
        result = call()
        for clock, read in CLOCKS.items():
            self.seconds[clock][step].append(read() - begin[clock])
        return result

    def take_off(self, step: str, part: str) -> None:
        """Subtracts ``part``, which was timed separately, from the last time of ``step``."""
        for seconds in self.seconds.values():
            seconds[step][-1] -= seconds[part][-1]


def measure_ours(kind: str, num_ranks: int, repetitions: int, idle_limit_s: float) -> dict[str, Any]:
    begin = time.perf_counter()
    blobs = [blob_of(rank, KINDS[kind](rank, num_ranks)) for rank in range(num_ranks)]
    generated_s = time.perf_counter() - begin
    timer = Timer()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM counts from here
    before = _status_bytes("VmRSS")
    for _ in range(repetitions):
        inventory = plan = assignments = None  # a coordinator holds them only once
        wait_until_idle(idle_limit_s)
        inventory = timer.time("receive", lambda: _testing.Inventory.merge(blobs))
        timer.time("validate", inventory.validate)
        plan = timer.time("dedup, balance", lambda inventory=inventory: _testing.plan_save(inventory))
        timer.take_off("dedup, balance", "validate")  # plan_save validates, too
        assignments = timer.time("assign", lambda plan=plan: [plan.assignment(rank) for rank in range(num_ranks)])
    summary = plan.summary()
    return {
        "seconds": timer.seconds,
        "generated_s": generated_s,
        "ranks": num_ranks,
        "boxes": inventory.num_boxes,
        "chunks": summary["num_chunks"],
        "max_over_mean": summary["max_bytes"] * num_ranks / max(summary["total_bytes"], 1),
        "blob_bytes": sum(map(len, blobs)),
        "merged_bytes": len(inventory.encode()),
        "assignment_bytes": sum(map(len, assignments)),
        "peak_bytes": _status_bytes("VmHWM"),
        "added_bytes": _status_bytes("VmHWM") - before,
    }


def measure_kept(num_ranks: int, repetitions: int, idle_limit_s: float) -> dict[str, Any]:
    """Measures a save whose plan is cached: from the ranks' unpickled digests to what DCP pickles for them."""
    from torch.distributed.checkpoint.planner import SavePlan

    from bytecheckpoint import BcpSavePlanner
    from bytecheckpoint.native import _C
    from bytecheckpoint.planning.inventory import LazyPaths, RemoteInventory
    from bytecheckpoint.planning.plan_cache import CachedPlan, EncodedAssignment, part_of, plan_cache
    from bytecheckpoint.planning.plan_items import PlanItems, source_of

    planner = BcpSavePlanner()
    ranks: list[Any] = [
        RemoteInventory((0, "", rank), rank.to_bytes(16, "little"), None, NUM_TENSORS, {}, True)
        for rank in range(num_ranks)
    ]
    plans = [SavePlan(PlanItems(of_rank), planner_data=LazyPaths(of_rank)) for of_rank in ranks]
    key = source_of(planner.create_global_plan(plans)[0][0].items).key  # the key of the exchange that the plan requests
    for rank, of_rank in enumerate(ranks):
        of_rank.known_hashes = {part_of(key, rank): b""}
    assignments = [EncodedAssignment(b"", NUM_TENSORS)] * num_ranks
    plan_cache().keep_plan(key, CachedPlan(assignments, _C.without_records({}), key=key), 8)
    seconds = []
    for _ in range(repetitions):
        wait_until_idle(idle_limit_s)
        begin = time.process_time()
        told = planner.create_global_plan(plans)[0]
        seconds.append(time.process_time() - begin)
        if len(told) != num_ranks or source_of(told[-1].items).fan_out is not None:
            raise RuntimeError("the plan was not found")
    return {"ranks": num_ranks, "cpu_s": seconds}


def _stock_plan(held: Iterator[LocalInventory]) -> Any:
    import torch
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    items = []
    for h in held:
        offsets, sizes = torch.Size(h.box[0]), torch.Size(h.box[1])
        write = TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offsets, sizes=sizes),
            properties=TensorProperties(dtype=torch.bfloat16),
            size=torch.Size(h.sizes),
        )
        kind = WriteItemType.TENSOR if h.is_whole else WriteItemType.SHARD
        items.append(WriteItem(index=MetadataIndex(h.fqn, offsets), type=kind, tensor_data=write))
    return SavePlan(items)


def measure_stock(kind: str, num_ranks: int, repetitions: int, idle_limit_s: float) -> dict[str, Any]:
    from torch.distributed.checkpoint import default_planner
    from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans

    pickled = [pickle.dumps(_stock_plan(KINDS[kind](rank, num_ranks))) for rank in range(num_ranks)]
    timer = Timer()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = _status_bytes("VmRSS")
    for _ in range(repetitions):
        plans = planned = metadata = assignments = None
        wait_until_idle(idle_limit_s)
        plans = timer.time("receive", lambda: [pickle.loads(plan) for plan in pickled])
        planned, metadata = timer.time(
            "dedup, balance",
            lambda plans=plans: default_planner.create_default_global_save_plan(dedup_save_plans(plans)),
        )
        errors = timer.time("validate", lambda p=planned, m=metadata: default_planner._validate_global_plan(p, m))
        if errors:
            raise RuntimeError(errors[0])
        assignments = timer.time("assign", lambda planned=planned: [pickle.dumps(plan) for plan in planned])
    rank_bytes = [sum(item.tensor_storage_size() or 0 for item in plan.items) for plan in planned]
    return {
        "seconds": timer.seconds,
        "ranks": num_ranks,
        "chunks": sum(len(plan.items) for plan in planned),
        "max_over_mean": max(rank_bytes) * num_ranks / max(sum(rank_bytes), 1),
        "blob_bytes": sum(map(len, pickled)),
        "assignment_bytes": sum(map(len, assignments)),
        "peak_bytes": _status_bytes("VmHWM"),
        "added_bytes": _status_bytes("VmHWM") - before,
    }


def medians_of(figures: dict[str, Any], clock: str) -> list[float]:
    """Returns the median seconds of each step."""
    return [statistics.median(figures["seconds"][clock][step]) for step in STEPS]


def table_of(rows: list[tuple[str, str, dict[str, Any]]]) -> Table:
    table = Table()
    steps = [f"{step}, s" for step in (*STEPS, "sum", "of it kernel")]
    for column in ("", "ranks", "chunks", "in, MB", *steps, "max/mean", "MiB"):
        table.add_column(column, justify="right" if column else "left")
    for kind, who, figures in rows:
        medians = medians_of(figures, "cpu_s")
        table.add_row(
            f"{kind}, {who}",
            f"{figures['ranks']:,}",
            f"{figures['chunks']:,}",
            f"{figures['blob_bytes'] / 1e6:.1f}",
            *(f"{s:.3f}" for s in (*medians, sum(medians), sum(medians_of(figures, "kernel_s")))),
            f"{figures['max_over_mean']:.3f}",
            f"{figures['peak_bytes'] / MIB:.0f}",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", help=f"layouts: {', '.join(KINDS)} (default: all)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[100, 1000, 10000], help="ranks of ours")
    parser.add_argument("--stock-ranks", type=int, nargs="*", default=[100], help="ranks of stock DCP; none to skip it")
    parser.add_argument("--repetitions", type=int, default=3, help="rounds of each (default 3)")
    parser.add_argument("--idle-limit-s", type=float, default=20.0, help="longest wait for idleness (default 20)")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    arguments = parser.parse_args()
    kinds = arguments.kinds or list(KINDS)
    if unknown := set(kinds) - KINDS.keys():
        parser.error(f"unknown layout: {', '.join(sorted(unknown))}")

    # Measurements that need torch run later, and stock last, so that imports and garbage do not count in our figures.
    limits = (arguments.repetitions, arguments.idle_limit_s)
    rows = [(kind, "ours", measure_ours(kind, size, *limits)) for kind in kinds for size in arguments.ranks]
    kept = [measure_kept(num_ranks, *limits) for num_ranks in arguments.ranks]
    rows += [
        (kind, "stock DCP", measure_stock(kind, size, *limits)) for kind in kinds for size in arguments.stock_ranks
    ]
    facts = machine.facts(Path.cwd())
    console = Console(highlight=False, width=150)
    console.print(table_of(rows))
    console.print(f"processor seconds; MiB: the highest resident size of the whole process; {machine.summary(facts)}")
    for figures in kept:
        console.print(f"a plan that was kept, {figures['ranks']:,} ranks: {statistics.median(figures['cpu_s']):.4f} s")
    if arguments.json:
        report: dict[str, Any] = {"command": machine.command("planning.py", arguments, parser), "machine": facts}
        report["versions"] = machine.versions()
        report["kept"] = kept
        report["figures"] = [{"kind": kind, "who": who} | figures for kind, who, figures in rows]
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
