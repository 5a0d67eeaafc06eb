# SPDX-License-Identifier: Apache-2.0
"""A memory tier of two machines, with a copy of each part on the other one, beside a TCP stream between them.

The machines are network namespaces of this one, with a cable of their own; making them takes root, and ``ip``. They
share the cores, so that without ``--gbit`` the processor is the limit. Each has one rank. The ceiling is a stream of
the same bytes, both ways at once: from a file in memory by sendfile, into memory that is in use, with a CRC there.
Everything runs in turn, in one job.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from measurement import machine
from measurement.conditions import add_arguments
from rich.console import Console
from rich.table import Table

import bytecheckpoint
from bytecheckpoint import MemoryTier, Tiers
from bytecheckpoint._testing import crc32

NUM_TENSORS = 8
PIECE = 8 << 20
STREAM, ALONE, COPIED = "stream both ways, with CRC", "commit, no copy", "commit, a copy each"
STALL_ALONE, STALL_COPIED = "stall, no copy", "stall, a copy each"
OWN, OF_PEER, STREAM_ONE = "restore, from here", "restore, from the other", "stream one way, with CRC"
SPACES = tuple(f"bcpb{os.getpid()}-{number}" for number in range(2))


def address(rank: int) -> str:
    return f"10.98.0.{1 + rank}"


@contextmanager
def two_machines(gbit: float) -> Iterator[None]:
    """Makes two network namespaces with a cable between them, of so many Gbit/s each way; 0: as fast as it can be."""

    def ip(*arguments: str, check: bool = True) -> None:
        subprocess.run(["ip", *arguments], check=check, capture_output=not check)

    try:
        for space in SPACES:
            ip("netns", "add", space)
            ip("-n", space, "link", "set", "lo", "up")
        ip("-n", SPACES[0], "link", "add", "e0", "type", "veth", "peer", "name", "e0", "netns", SPACES[1])
        for rank, space in enumerate(SPACES):
            ip("-n", space, "addr", "add", f"{address(rank)}/24", "dev", "e0")
            ip("-n", space, "link", "set", "e0", "up")
            if gbit:
                limit = ["rate", f"{gbit:g}gbit", "burst", "4mb", "latency", "50ms"]
                ip("netns", "exec", space, "tc", "qdisc", "add", "dev", "e0", "root", "tbf", *limit)
        yield
    finally:
        for space in SPACES:
            ip("netns", "del", space, check=False)


class Stream:
    """Sends a file in memory to the other rank, and receives as much into memory that is in use."""

    def __init__(self, rank: int, num_bytes: int) -> None:
        self._fd = os.memfd_create("stream")
        self._into = bytearray(num_bytes)
        self._sample = bytes(PIECE)
        for begin in range(0, num_bytes, PIECE):
            os.write(self._fd, self._sample[: min(PIECE, num_bytes - begin)])
        listener = socket.create_server((address(rank), 29700))
        dist.barrier()
        self._to = socket.create_connection((address(1 - rank), 29700))
        self._from, _ = listener.accept()
        listener.close()

    def send(self) -> None:
        size, sent = len(self._into), 0
        while sent < size:
            sent += os.sendfile(self._to.fileno(), self._fd, sent, size - sent)

    def receive(self) -> None:
        """Receives all, and computes the CRC of as many bytes."""
        view, at = memoryview(self._into), 0
        for end in [*range(PIECE, len(view), PIECE), len(view)]:
            while at < end:
                at += self._from.recv_into(view[at:end])
            crc32(self._sample)

    def both_ways(self) -> None:
        sender = threading.Thread(target=self.send)
        sender.start()
        self.receive()
        sender.join()

    def one_way(self) -> None:
        """From the second rank to the first."""
        (self.receive if dist.get_rank() == 0 else self.send)()


def of_rank(rank: int, num_bytes: int, repetitions: int, name: str) -> dict[str, list[float]]:
    """Runs everything in turn, and returns the seconds of the first rank, which waits for the other."""
    dist.init_process_group(
        "gloo", init_method=f"tcp://{address(0)}:29600", rank=rank, world_size=2, timeout=timedelta(seconds=120)
    )
    numel = num_bytes // 4 // NUM_TENSORS
    state = {f"of_{rank}.{n}": torch.ones(numel) for n in range(NUM_TENSORS)}
    into = {of: {f"of_{of}.{n}": torch.zeros(numel) for n in range(NUM_TENSORS)} for of in range(2)}
    stream = Stream(rank, num_bytes)
    tiers = {
        replicas: Tiers(memory=MemoryTier(name=f"{name}{replicas}", keep=1, replicas=replicas, interface=address(rank)))
        for replicas in (0, 1)
    }
    number = itertools.count(1)
    waiting: list[bytecheckpoint.SaveHandle] = []

    def save(replicas: int) -> None:
        bytecheckpoint.save_state_dict(tiers[replicas] / f"step-{next(number)}", state)

    def stage(replicas: int) -> None:
        handle = bytecheckpoint.async_save_state_dict(tiers[replicas] / f"step-{next(number)}", state)
        handle.staged.result()
        waiting.append(handle)

    def load(of: int) -> None:
        # The first rank loads a part, the other one nothing.
        path = bytecheckpoint.latest(tiers[0], process_group=dist.group.WORLD)
        assert path is not None
        bytecheckpoint.load_state_dict(path, into[of] if rank == 0 else {})
        assert rank or into[of][f"of_{of}.0"][-1] == 1

    calls: dict[str, Callable[[], None]] = {
        STREAM: stream.both_ways,
        ALONE: lambda: save(0),
        COPIED: lambda: save(1),
        STALL_ALONE: lambda: stage(0),
        STALL_COPIED: lambda: stage(1),
        STREAM_ONE: stream.one_way,
        OWN: lambda: load(0),
        OF_PEER: lambda: load(1),
    }
    seconds: dict[str, list[float]] = {each: [] for each in calls}
    for repetition in range(repetitions + 1):
        # Forth and back: what ran before has left its traces in the caches.
        for each, call in list(calls.items())[:: -1 if repetition % 2 else 1]:
            dist.barrier()
            begin = time.perf_counter()
            call()
            dist.barrier()
            seconds[each] += [time.perf_counter() - begin] if repetition else []
            while waiting:
                waiting.pop().committed.result()
    bytecheckpoint.shutdown()
    return seconds


def show(seconds: dict[str, list[float]], num_bytes: int) -> dict[str, float]:
    """Prints medians and ratios, and returns the ratios."""
    medians = {each: statistics.median(of_one) for each, of_one in seconds.items()}
    table = Table("", "seconds", "GB/s each", title=f"{num_bytes / 1e9:.2f} GB a rank")
    for each, median in medians.items():
        table.add_row(each, f"{median:.3f}", f"{num_bytes / 1e9 / median:.2f}")
    console = Console()
    console.print(table)
    ratios = {
        "commit with a copy each, of the stream": medians[STREAM] / medians[COPIED],
        "restore from the other machine, of the stream": medians[STREAM_ONE] / medians[OF_PEER],
        "stall with a copy, times that without": medians[STALL_COPIED] / medians[STALL_ALONE],
    }
    for what, ratio in ratios.items():
        console.print(f"{what}: {ratio:.2f}")
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of each rank (default 1)")
    parser.add_argument("--gbit", type=float, default=0.0, help="of the cable, each way (default 0: no limit)")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--name", default=f"benchmark-{os.getpid()}", help=argparse.SUPPRESS)
    add_arguments(parser)
    args = parser.parse_args()
    num_bytes = int(args.gigabytes * 1e9)
    if args.rank is not None:
        seconds = of_rank(args.rank, num_bytes, args.repetitions, args.name)
        if args.rank == 0:
            print(json.dumps(seconds))
        return
    with two_machines(args.gbit):
        ranks = []
        for rank, space in enumerate(SPACES):
            command = ["ip", "netns", "exec", space, sys.executable, __file__, "--rank", str(rank), "--name", args.name]
            command += ["--gigabytes", str(args.gigabytes), "--repetitions", str(args.repetitions)]
            environment = os.environ | {"GLOO_SOCKET_IFNAME": "e0"}
            ranks.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment))
        said = [rank.communicate()[0] for rank in ranks]
    assert not any(rank.returncode for rank in ranks)
    seconds = json.loads(said[0].splitlines()[-1])
    ratios = show(seconds, num_bytes)
    if args.json:
        facts = machine.facts(args.dir)
        args.json.write_text(json.dumps({"seconds": seconds, "ratios": ratios, "machine": facts}, indent=1))


if __name__ == "__main__":
    main()
