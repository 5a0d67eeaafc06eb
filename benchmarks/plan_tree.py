# SPDX-License-Identifier: Apache-2.0
"""Simulates how the ranks of a save exchange plans through a tree: the critical path, by number of ranks and fan-out.

Every rank runs the code of a real save on its own inventory of about 200 chunks: ``PlanTree`` receives, merges, pickles
and sends, and ``plan_tree`` plans at the root. One process runs all ranks, one after another. Each rank has a clock of
its own that adds the processor seconds of its work and the time of its messages. So ranks count as if each had a core
for itself.

A message takes latency + bytes / bandwidth. Both are fitted to messages that two gloo ranks of this machine send each
other over ``Channel``. With --latency-us and --gb-per-s they are those of a network instead. The latency is that of an
empty message. It is more than that of a packet, because ``Channel`` sends the size first and gloo waits for the
receiver before it sends. A message begins when its sender and its receiver are ready, and keeps both until it has
arrived. The time to connect is not included.

Without a tree, the coordinator receives the inventory of each rank and sends it an assignment, one after another, and
plans with ``plan_ranks``. DCP's own gather may overlap the latencies, so this is an upper bound. The last column has no
latencies at all, and so is a lower bound: the bytes / bandwidth, and the plan.

    python benchmarks/plan_tree.py fsdp --ranks 1000 10000
    python benchmarks/plan_tree.py --ranks 100000 --latency-us 200 --gb-per-s 3
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from measurement import machine
from planning import KINDS, blob_of
from rich.console import Console
from rich.table import Table

from bytecheckpoint import Config
from bytecheckpoint.distributed.channel import Channel, Peers
from bytecheckpoint.native import _C
from bytecheckpoint.planning.plan_cache import CachedPlan, EncodedAssignment
from bytecheckpoint.planning.plan_tree import PlanTree

# Size and number of the messages that are timed.
MESSAGES = {1_000: 400, 100_000: 200, 10_000_000: 15}
OPTIONS: dict[str, Any] = {"dedup_to_lowest_rank": False, "is_nested": True}


@dataclass(frozen=True)
class Network:
    """What a message takes."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, num_bytes: int) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s


def time_messages(channel: Channel, rank: int) -> dict[int, float]:
    """Returns the seconds of a message by its size: half of the time there and back, the median of many."""
    medians = {}
    for num_bytes, times in MESSAGES.items():
        message, seconds = bytes(num_bytes), []
        for _ in range(times + times // 10 + 1):
            begin = time.perf_counter()
            if rank == 0:
                channel.send(message, 1)
                channel.receive(1)
            else:
                channel.send(channel.receive(0), 0)
            seconds.append((time.perf_counter() - begin) / 2)
        medians[num_bytes] = statistics.median(seconds[-times:])  # the first ones warm up
    return medians


def run_rank(rank: int, root: str) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{root}/store", rank=rank, world_size=2)
    seconds = time_messages(Peers(None, rank, 2, 0).connect(), rank)
    if rank == 0:
        Path(root, "seconds.json").write_text(json.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group()


def measure_messages() -> dict[int, float]:
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    with tempfile.TemporaryDirectory(prefix="plan-tree-") as root:
        mp.spawn(run_rank, (root,), 2)
        return {int(size): s for size, s in json.loads(Path(root, "seconds.json").read_text()).items()}


def fit(seconds: dict[int, float]) -> Network:
    """Fits latency and bandwidth so that the relative errors are least: small messages count as much as large ones."""
    sizes, times = torch.tensor(list(seconds), dtype=torch.float64), torch.tensor(list(seconds.values())).double()
    factors = torch.stack([1 / times, sizes / times], dim=1)
    latency_s, s_per_byte = torch.linalg.lstsq(factors, torch.ones(len(times), 1).double()).solution.flatten().tolist()
    return Network(max(latency_s, 0.0), 1 / s_per_byte)


class Sent(NamedTuple):
    """A message on its way."""

    message: bytes
    begin_s: float
    work_s: float
    num_hops: int


class SimulatedChannel:
    """Stands for the ``Channel`` of one rank, and has its clock.

    Attributes:
        now_s: Time of this rank, as of its last message or ``tick``.
        work_s: The part of it that is work of this or another rank. The rest is messages. Waiting is neither: the
            rank that is waited for says what it did meanwhile.
        num_hops: The longest way of a message that has led to this rank.
        sent_bytes: Bytes sent.
    """

    def __init__(self, rank: int, network: Network, on_way: dict[tuple[int, int], Sent]) -> None:
        self._rank = rank
        self._network = network
        self._on_way = on_way
        self.now_s = self.work_s = 0.0
        self.num_hops = self.sent_bytes = 0
        self.resume()

    def resume(self) -> None:
        """Begins to time work."""
        self._began_s = time.thread_time()

    def tick(self) -> float:
        """Adds the work since the last message or ``resume``, and returns the time."""
        end_s = time.thread_time()
        self.now_s += end_s - self._began_s
        self.work_s += end_s - self._began_s
        self.resume()
        return self.now_s

    def send(self, data: bytes, to: int) -> None:
        self.tick()
        self._on_way[self._rank, to] = Sent(data, self.now_s, self.work_s, self.num_hops)
        self.now_s += self._network.seconds(len(data))
        self.sent_bytes += len(data)
        self.resume()

    def receive(self, sender: int) -> bytes:
        self.tick()
        sent = self._on_way.pop((sender, self._rank))
        if sent.begin_s > self.now_s:
            self.now_s, self.work_s = sent.begin_s, sent.work_s
        self.now_s += self._network.seconds(len(sent.message))
        self.num_hops = max(self.num_hops, sent.num_hops + 1)
        self.resume()
        return sent.message


def simulate(blobs: list[bytes], fan_out: int, network: Network) -> tuple[dict[str, Any], list[EncodedAssignment]]:
    """Returns the figures of one exchange, and what each rank is to write."""
    on_way: dict[tuple[int, int], Sent] = {}
    channels = [SimulatedChannel(rank, network, on_way) for rank in range(len(blobs))]
    trees: list[Any] = [
        PlanTree(channel, Peers(None, rank, len(blobs), 0), fan_out)  # type: ignore[arg-type]
        for rank, channel in enumerate(channels)
    ]
    for rank in range(len(blobs) - 1, 0, -1):  # the nodes below a node have higher numbers
        channels[rank].resume()
        below, failure = trees[rank]._take_from_below()
        trees[rank]._hand_up(blobs[rank], below, failure)
    root = channels[0]
    figures: dict[str, Any] = {}
    plans: list[CachedPlan] = []  # a save keeps its plan, so freeing it is no part of the exchange

    def plan(below: list[bytes]) -> list[EncodedAssignment]:
        figures.update(up_s=root.tick(), up_work_s=root.work_s, depth=root.num_hops)
        plans.append(CachedPlan.of(b"", (), _C.plan_tree(blobs[0], 0, below, **OPTIONS)))
        figures.update(plan_s=root.tick() - figures["up_s"], planned_s=root.now_s, planned_work_s=root.work_s)
        return plans[0].assignments

    up_bytes = sum(channel.sent_bytes for channel in channels)
    root.resume()
    received = [trees[0].exchange(blobs[0], plan)]
    root.tick()
    for rank in range(1, len(blobs)):
        channels[rank].resume()
        assignments, failure = trees[rank]._await_assignments()
        if failure is not None:
            raise failure
        trees[rank]._hand_down(assignments, failure)
        received.append(assignments[rank])
        channels[rank].tick()
    last = max(channels, key=lambda channel: channel.now_s)
    figures.update(down_s=last.now_s - figures["planned_s"], down_work_s=last.work_s - figures["planned_work_s"])
    down_bytes = sum(channel.sent_bytes for channel in channels) - up_bytes
    return figures | {"sum_s": last.now_s, "up_bytes": up_bytes, "down_bytes": down_bytes}, received


def without_tree(blobs: list[bytes], network: Network) -> tuple[dict[str, Any], list[EncodedAssignment]]:
    """Returns the same, if the coordinator receives from each rank, and sends to each."""
    begin = time.thread_time()
    planned = CachedPlan.of(b"", (), _C.plan_ranks(blobs, **OPTIONS))
    plan_s = time.thread_time() - begin
    up_bytes = sum(map(len, blobs[1:]))
    down_bytes = sum(len(assignment.encoded) for assignment in planned.assignments[1:])
    num_messages = 2 * (len(blobs) - 1)
    bytes_s = (up_bytes + down_bytes) / network.bytes_per_s
    figures = {"up_bytes": up_bytes, "down_bytes": down_bytes, "plan_s": plan_s}
    figures |= {"sum_s": plan_s + bytes_s + num_messages * network.latency_s, "without_latency_s": plan_s + bytes_s}
    return figures, planned.assignments


def measure(kind: str, num_ranks: int, fan_outs: list[int], network: Network, repetitions: int) -> list[dict[str, Any]]:
    """Returns the figures of each fan-out: those of the repetition whose sum is the median, and all sums.

    Raises:
        RuntimeError: A rank got another assignment through the tree than without it.
    """
    blobs = [blob_of(rank, KINDS[kind](rank, num_ranks)) for rank in range(num_ranks)]

    def median_of(run: Callable[[], tuple[dict[str, Any], Any]]) -> tuple[dict[str, Any], Any]:
        runs = []
        for _ in range(repetitions):
            gc.collect()
            runs.append(run())
        figures, received = sorted(runs, key=lambda of_run: float(of_run[0]["sum_s"]))[repetitions // 2]
        return figures | {"sums_s": [of_run[0]["sum_s"] for of_run in runs]}, received

    flat, wanted = median_of(lambda: without_tree(blobs, network))
    figures = []
    for fan_out in fan_outs:
        of_tree, received = median_of(lambda fan_out=fan_out: simulate(blobs, fan_out, network))  # type: ignore[misc]
        if received != wanted:
            raise RuntimeError(f"{kind}, {num_ranks} ranks, fan-out {fan_out}: assignments differ from plan_ranks")
        figures.append({"kind": kind, "ranks": num_ranks, "fan_out": fan_out, "tree": of_tree, "flat": flat})
    return figures


def table_of(rows: list[dict[str, Any]]) -> Table:
    table = Table()
    for column in ("", "ranks", "fan-out", "depth", "up, s", "of it work", "root's plan", "down", "of it work", "sum"):
        table.add_column(column, justify="right" if column else "left")
    table.add_column("no tree, s", justify="right")
    table.add_column("without latency", justify="right")
    for row in rows:
        tree, flat = row["tree"], row["flat"]
        parts = ("up_s", "up_work_s", "plan_s", "down_s", "down_work_s", "sum_s")
        table.add_row(
            row["kind"],
            f"{row['ranks']:,}",
            str(row["fan_out"]),
            str(tree["depth"]),
            *(f"{tree[part]:.3f}" for part in parts),
            f"{flat['sum_s']:.3f}",
            f"{flat['without_latency_s']:.3f}",
        )
    return table


def parse() -> tuple[argparse.Namespace, argparse.ArgumentParser]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Config().tree_topo_fan_out
    parser.add_argument("kinds", nargs="*", help=f"layouts: {', '.join(KINDS)} (default: fsdp 3-d)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1000, 10000], help="default 1000 10000")
    parser.add_argument("--fan-out", type=int, nargs="+", default=[default, 64], help=f"default {default} 64")
    parser.add_argument("--latency-us", type=float, help="of an empty message, in place of the measured one")
    parser.add_argument("--gb-per-s", type=float, help="bandwidth of a message, in place of the measured one")
    parser.add_argument("--repetitions", type=int, default=1, help="rounds of each (default 1)")
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    arguments = parser.parse_args()
    arguments.kinds = arguments.kinds or ["fsdp", "3-d"]
    if unknown := set(arguments.kinds) - KINDS.keys():
        parser.error(f"unknown layout: {', '.join(sorted(unknown))}")
    return arguments, parser


def main() -> None:
    arguments, parser = parse()
    seconds = measure_messages()
    measured = network = fit(seconds)
    origin = "measured on this machine, over loopback"
    if arguments.latency_us is not None or arguments.gb_per_s is not None:
        latency_s = measured.latency_s if arguments.latency_us is None else arguments.latency_us / 1e6
        bytes_per_s = measured.bytes_per_s if arguments.gb_per_s is None else arguments.gb_per_s * 1e9
        network, origin = Network(latency_s, bytes_per_s), "as given"
    # The garbage collector would look at the objects of all simulated ranks, and count that as work of one of them.
    gc.disable()
    rows: list[dict[str, Any]] = []
    for kind in arguments.kinds:
        for num_ranks in arguments.ranks:
            rows += measure(kind, num_ranks, arguments.fan_out, network, arguments.repetitions)
    facts = machine.facts(Path.cwd())
    console = Console(highlight=False, width=150)
    console.print(table_of(rows))
    console.print(
        f"a message: {network.latency_s * 1e6:.0f} us + bytes / {network.bytes_per_s / 1e9:.2f} GB/s, {origin}; "
        f"work: processor seconds; {machine.summary(facts)}"
    )
    of_sizes = ", ".join(f"{size:,} bytes {s * 1e6:,.0f} us" for size, s in seconds.items())
    console.print(f"measured over Channel: {of_sizes}")
    if arguments.json:
        report: dict[str, Any] = {"command": machine.command("plan_tree.py", arguments, parser), "machine": facts}
        report |= {"versions": machine.versions(), "message_s": seconds}
        report["network"] = {"latency_s": network.latency_s, "bytes_per_s": network.bytes_per_s, "origin": origin}
        report["figures"] = rows
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
