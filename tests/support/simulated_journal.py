# SPDX-License-Identifier: Apache-2.0
"""Journals of saves and loads that nobody ran: ranks with noise, and stragglers of a chosen kind.

A rank fills slots (copy, checksum) while its I/O threads write them, so the slower of the two takes the time and the
other waits. All ranks begin to write when the last plan has arrived, and the coordinator commits after the last rank.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["KINDS_OF_LOADS", "KINDS_OF_SAVES", "Job", "Straggler", "simulate_load", "simulate_save", "write_run"]

COPY_BYTES_PER_S = 6e9
CHECKSUM_BYTES_PER_S = 15e9
SLOT_BYTES = 8 << 20
KINDS_OF_SAVES = ("more_bytes", "slow_storage", "slow_sync", "slow_memory", "late_arrival", "slow_planning")
KINDS_OF_LOADS = ("more_bytes", "slow_storage", "slow_memory", "late_arrival", "shared_reading")


@dataclass(frozen=True)
class Straggler:
    """Something that is wrong in one call.

    Attributes:
        kind: One of ``KINDS_OF_SAVES`` or ``KINDS_OF_LOADS``, or a phase of the coordinator.
        ranks: Ranks that it slows down; none for a phase of the coordinator.
        factor: How many times as long they take, or how many times as many bytes they have.
        seconds: What a late rank, or a phase of the coordinator, takes in addition.
    """

    kind: str
    ranks: tuple[int, ...] = ()
    factor: float = 3.0
    seconds: float = 0.0


@dataclass(frozen=True)
class Job:
    """What stays the same in a run.

    Attributes:
        world_size: Number of ranks.
        bytes_per_rank: Bytes that each rank has.
        disk_bytes_per_s: What storage takes from one rank.
        noise: The most by which a phase of a rank differs from the others, as a ratio.
        ranks_per_host: Number of ranks on a host.
        mesh: Names and sizes of the mesh's axes.
        is_async: Whether saves are in the background.
        with_timelines: Whether some ranks have timelines.
    """

    world_size: int
    bytes_per_rank: float = 2e9
    disk_bytes_per_s: float = 1e9
    noise: float = 0.2
    ranks_per_host: int = 8
    mesh: tuple[tuple[str, int], ...] = ()
    is_async: bool = False
    with_timelines: bool = True


class _World:
    """Figures of all ranks in one call; every phase has noise of its own."""

    def __init__(self, job: Job, rng: random.Random, straggler: Straggler | None) -> None:
        self.job, self._rng, self._straggler = job, rng, straggler
        self._slow = frozenset(straggler.ranks if straggler else ())
        self.arrived = [0.0] + [rng.uniform(-0.002, 0.002) for _ in range(job.world_size - 1)]
        if straggler is not None and straggler.kind == "late_arrival":
            self.arrived = [
                at + straggler.seconds if rank in self._slow else at for rank, at in enumerate(self.arrived)
            ]
            self.arrived = [at - self.arrived[0] for at in self.arrived]
        self.num_bytes = [int(value) for value in self.times(job.bytes_per_rank, "more_bytes", noise=job.noise / 4)]

    def times(self, value: float | Sequence[float], *slow_kinds: str, noise: float | None = None) -> list[float]:
        """Returns a value of each rank with noise, larger by the factor for ranks that are slow in that way."""
        noise = self.job.noise if noise is None else noise
        values = [value] * self.job.world_size if isinstance(value, int | float) else value
        slow = self._slow if self._straggler is not None and self._straggler.kind in slow_kinds else frozenset()
        factor = self._straggler.factor if self._straggler is not None else 1.0
        uniform = self._rng.uniform
        return [
            each * uniform(1 - noise, 1 + noise) * (factor if rank in slow else 1.0) for rank, each in enumerate(values)
        ]

    def once(self, name: str, value: float) -> float:
        """Returns the seconds of a phase that only the coordinator has."""
        value *= self._rng.uniform(1 - self.job.noise, 1 + self.job.noise)
        return value + (self._straggler.seconds if self._straggler is not None and self._straggler.kind == name else 0)

    def record(
        self, kind: str, at: float, step: int | None, columns: dict[str, Any], phases: dict[str, list[float]]
    ) -> dict[str, Any]:
        """Returns what records of saves and loads have in common."""
        job = self.job
        num_hosts = -(-job.world_size // job.ranks_per_host)
        return {
            "format": 1,
            "kind": kind,
            "at": at,
            "path": f"step_{step}",
            "step": step,
            "save_id": f"{self._rng.getrandbits(128):032x}",
            "world_size": job.world_size,
            "rank": 0,
            "is_async": job.is_async and kind == "save",
            "hosts": [f"node{number}" for number in range(num_hosts)],
            "ranks": {
                "rank": list(range(job.world_size)),
                "host": [rank // job.ranks_per_host for rank in range(job.world_size)],
                "arrived_s": [_rounded(at) for at in self.arrived],
                "clock_error_s": [0.0] + [_rounded(self._rng.uniform(1e-4, 5e-4)) for _ in range(job.world_size - 1)],
                **{name: [_rounded(value) for value in column] for name, column in columns.items()},
                "phases": {name: [_rounded(value) for value in column] for name, column in phases.items()},
            },
            "mesh": {"names": [name for name, _ in job.mesh], "shape": [size for _, size in job.mesh]}
            if job.mesh
            else None,
            "config": {},  # what is not the default
            "versions": {"bytecheckpoint": "0.1.0", "torch": "2.15.0", "python": "3.11.2"},
        }


def _rounded(value: float) -> float | int:
    return value if isinstance(value, int) else round(value, 6)


def simulate_save(
    job: Job,
    seed: int,
    *,
    step: int = 100,
    at: float = 1764088000.0,
    straggler: Straggler | None = None,
    cache: str = "hit",
) -> dict[str, Any]:
    """Returns the record of one save."""
    rng = random.Random(seed)
    world = _World(job, rng, straggler)
    num_bytes = world.num_bytes
    stage = world.times([b / COPY_BYTES_PER_S for b in num_bytes]) if job.is_async else None
    plan = world.times(0.003 if cache == "hit" else 0.04, "slow_planning")
    if straggler is not None and straggler.kind == "slow_planning":
        plan = [value + straggler.seconds * (rank in straggler.ranks) for rank, value in enumerate(plan)]
    global_plan = world.once("global_plan", (1e-6 if cache == "hit" else 4e-5) * job.world_size + 5e-4)
    begin = world.once("begin", 0.002)
    ready = [a + p + (stage[r] if stage else 0.0) for r, (a, p) in enumerate(zip(world.arrived, plan, strict=True))]
    start = max(ready) + global_plan + begin
    copy = world.times([b / COPY_BYTES_PER_S for b in num_bytes], "slow_memory")
    checksum = world.times([b / CHECKSUM_BYTES_PER_S for b in num_bytes], "slow_memory")
    filling = [c + k for c, k in zip(copy, checksum, strict=True)]
    phases = {
        **({"stage": stage} if stage else {}),
        "plan": plan,
        "exchange": [start - at_ready for at_ready in ready],
        "copy": copy,
        "checksum": checksum,
        **_writing(world, filling),
    }
    ended = _ended(world, start, filling, phases)
    alone = {
        "wait": max(ended) - ended[0],
        "assemble": world.once("assemble", 2e-6 * job.world_size + 0.001),
        "commit": world.once("commit", 0.02 + 2e-5 * job.world_size),
        "sweep": world.once("sweep", 0.0),
    }
    phases |= {name: [s] + [0.0] * (job.world_size - 1) for name, s in alone.items() if s}
    columns = {"num_bytes": num_bytes, "num_records": [40 + rng.randrange(4) for _ in num_bytes], "ended_s": ended}
    record = world.record("save", at, step, columns, phases)
    record["report"] = _save_report(record, plan[0], global_plan, begin, start, ended, alone, cache)
    record["report"]["blocked_s"] = stage[0] + 0.01 if stage else record["report"]["total_s"]
    _add_sizes_and_timelines(record, start, job)
    return record


def _writing(world: _World, filling: Sequence[float]) -> dict[str, list[float]]:
    """Returns the phases of two I/O threads beside a thread that fills slots in these seconds."""
    job = world.job
    writing = world.times([b / job.disk_bytes_per_s for b in world.num_bytes], "slow_storage")
    return {
        "wait_slot": [max(0.0, 0.97 * (w - f)) for w, f in zip(writing, filling, strict=True)],
        "write": [2 * 0.95 * w for w in writing],
        "flush": [0.03 * w for w in writing],
        "sync": world.times(0.02 + job.bytes_per_rank / 5e10, "slow_sync"),
    }


def _ended(world: _World, start: float, filling: Sequence[float], phases: dict[str, list[float]]) -> list[float]:
    writing = [write / (2 * 0.95) for write in phases["write"]]
    return [
        start + max(f, w) + phases["flush"][r] + phases["sync"][r]
        for r, (f, w) in enumerate(zip(filling, writing, strict=True))
    ]


def _save_report(
    record: dict[str, Any],
    plan_s: float,
    global_plan_s: float,
    begin_s: float,
    start: float,
    ended: Sequence[float],
    alone: dict[str, float],
    cache: str,
) -> dict[str, Any]:
    num_bytes = record["ranks"]["num_bytes"]
    total_s = max(ended) + alone["assemble"] + alone["commit"] + alone["sweep"]
    return {
        "rank": 0,
        "plan_s": plan_s,
        "global_plan_s": global_plan_s,
        "begin_s": begin_s,
        "exchange_s": max(0.0, start - plan_s - global_plan_s - begin_s),
        "write_s": ended[0] - start,
        "wait_s": alone["wait"],
        "assemble_s": alone["assemble"],
        "digest_s": 0.0,
        "commit_s": alone["commit"],
        "sweep_s": alone["sweep"],
        "total_s": total_s,
        "total_bytes": sum(num_bytes),
        "gb_per_s": sum(num_bytes) / 1e9 / total_s,
        "balance": max(num_bytes) * len(num_bytes) / sum(num_bytes),
        "total_requests": 0,
        "files_swept": 0,
        "warnings": [],
        "plan": {"cache": cache, "bytes_sent": 100, "bytes_received": 100, "seconds": plan_s},
    }


def simulate_load(
    job: Job,
    seed: int,
    *,
    step: int = 100,
    at: float = 1764088000.0,
    straggler: Straggler | None = None,
    reading: str = "independent",
) -> dict[str, Any]:
    """Returns the record of one load. Where ranks share their reading, all of them wait for the slowest reader."""
    rng = random.Random(seed)
    world = _World(job, rng, straggler)
    metadata = world.times(0.01)
    plan = world.times(0.01, "slow_planning")
    start = max(sum(each) for each in zip(world.arrived, metadata, plan, strict=True)) + 0.001
    verify = world.times([b / CHECKSUM_BYTES_PER_S for b in world.num_bytes], "slow_memory")
    scatter = world.times([b / COPY_BYTES_PER_S for b in world.num_bytes], "slow_memory")
    read = world.times([b / job.disk_bytes_per_s for b in world.num_bytes], "slow_storage", "shared_reading")
    objects = world.times(0.005)
    placing = [v + s for v, s in zip(verify, scatter, strict=True)]
    own = [start + max(r, p) for r, p in zip(read, placing, strict=True)]
    phases = {
        "metadata": metadata,
        "plan": plan,
        "exchange": [start - sum(each) for each in zip(world.arrived, metadata, plan, strict=True)],
        "read": [2 * 0.95 * value for value in read],
        "wait_read": [max(0.0, r - p) for r, p in zip(read, placing, strict=True)],
        "verify": verify,
        "scatter": scatter,
    }
    if reading == "cooperative":
        phases["send"] = world.times([b / 8e9 for b in world.num_bytes])
        phases["receive"] = world.times([3 * b / 8e9 for b in world.num_bytes])
        phases["wait_peer"] = [max(own) - end for end in own]
        own = [max(own)] * len(own)
    phases["objects"] = objects
    ended = [end + extra for end, extra in zip(own, objects, strict=True)]
    phases["wait"] = [max(ended) - ended[0]] + [0.0] * (job.world_size - 1)
    columns = {"num_bytes": world.num_bytes, "num_records": [40] * job.world_size, "ended_s": ended}
    if reading == "cooperative":
        columns["bytes_received"] = [3 * b for b in world.num_bytes]
    record = world.record("load", at, step, columns, phases)
    total_s, total_bytes = max(ended), sum(world.num_bytes)
    record["report"] = {
        "rank": 0,
        "metadata_s": metadata[0],
        "plan_s": plan[0],
        "exchange_s": phases["exchange"][0],
        "read_s": own[0] - start,
        "objects_s": objects[0],
        "wait_s": phases["wait"][0],
        "total_s": total_s,
        "total_bytes_wanted": total_bytes * (4 if reading == "cooperative" else 1),
        "total_bytes_read": total_bytes,
        "gb_per_s": total_bytes / 1e9 / total_s,
        "reading": reading,
        "num_missing_keys": 0,
        "total_requests": 0,
    }
    _add_sizes_and_timelines(record, start, job)
    return record


def _add_sizes_and_timelines(record: dict[str, Any], start: float, job: Job) -> None:
    ranks = record["ranks"]
    record["sizes"] = {
        name: _size_classes(sum(ranks["phases"][name]), sum(ranks["num_bytes"]))
        for name in ("copy", "write", "read", "scatter")
        if name in ranks["phases"]
    }
    if not job.with_timelines:
        return
    by_end = sorted(range(job.world_size), key=lambda rank: ranks["ended_s"][rank])
    chosen = sorted({0, by_end[0], by_end[len(by_end) // 2], *by_end[-13:]})[:16]
    record["timelines"] = {str(rank): {"lanes": _lanes(record, rank, start)} for rank in chosen}


def _size_classes(seconds: float, num_bytes: int) -> list[list[float]]:
    """Returns work on pieces of 4 KiB to 8 MiB: most bytes are in large pieces, small ones take longer by the byte."""
    shares = {12: 0.01, 16: 0.04, 20: 0.15, 23: 0.8}
    weights = {log2: share * (1 + 40 / 2 ** (log2 - 12)) for log2, share in shares.items()}
    return [
        [
            log2,
            max(1, int(num_bytes * share) >> log2),
            round(seconds * weights[log2] / sum(weights.values()), 6),
            int(num_bytes * share),
        ]
        for log2, share in shares.items()
    ]


def _lanes(record: dict[str, Any], rank: int, start: float) -> list[dict[str, Any]]:
    columns, phases = record["ranks"], {name: column[rank] for name, column in record["ranks"]["phases"].items()}
    num_bytes, at = columns["num_bytes"][rank], columns["arrived_s"][rank]
    call, begin = [], int(at * 1e6)
    for name in ("stage", "metadata", "plan", "exchange"):
        if phases.get(name):
            call.append([name, begin, int(phases[name] * 1e6), int(phases[name] * 1e6), 1, 0])
            begin += int(phases[name] * 1e6)
    working = int((columns["ended_s"][rank] - start) * 1e6)
    main = "write" if record["kind"] == "save" else "read"
    call.append([main, int(start * 1e6), working, working, 1, num_bytes])
    begin = int(start * 1e6) + working
    for name in ("wait", "assemble", "commit", "sweep"):
        if phases.get(name):
            call.append([name, begin, int(phases[name] * 1e6), int(phases[name] * 1e6), 1, 0])
            begin += int(phases[name] * 1e6)
    middle = ("copy", "checksum", "wait_slot") if main == "write" else ("wait_read", "verify", "scatter")
    rounds = 12
    fill, begin = [], int(start * 1e6)
    for _ in range(rounds):
        for name in middle:
            if length := int(phases[name] * 1e6 / rounds):
                fill.append(
                    [name, begin, length, length, max(1, num_bytes // SLOT_BYTES // rounds), num_bytes // rounds]
                )
                begin += length
    end = begin
    lanes = [{"name": "call", "spans": call}, {"name": "fill" if main == "write" else "scatter", "spans": fill}]
    for thread in range(2):
        begin = int(start * 1e6) + thread * 1000
        busy, length = int(phases[main] * 1e6 / 2 / rounds), max(1, (end - begin) // rounds)
        spans = [
            [main, begin + number * length, length, min(busy, length), 8, num_bytes // 2 // rounds]
            for number in range(rounds)
        ]
        if main == "write":
            spans.append(["sync", begin + rounds * length, int(phases["sync"] * 1e6), int(phases["sync"] * 1e6), 1, 0])
        lanes.append({"name": f"{main} {thread}", "spans": spans})
    return lanes


def write_run(folder: Path, records: Iterable[dict[str, Any]]) -> Path:
    """Writes a run folder with a journal of these records. Returns the folder."""
    (folder / ".bcp").mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records)
    (folder / ".bcp" / "journal.jsonl").write_text(lines)
    return folder


def factors_of(world_size: int) -> tuple[int, int]:
    """Returns two factors of a number of ranks that are as equal as they can be, for a mesh."""
    first = next(each for each in range(math.isqrt(world_size), 0, -1) if world_size % each == 0)
    return first, world_size // first
