# SPDX-License-Identifier: Apache-2.0
"""Tests blocks of 4 KiB that are zeroed, repeated, exchanged or left from another save, as disks and caches do it.

The damage is random, from a seed: 400 cases, or 100,000 with BCP_LONG=1 (``make torture``).
"""

from __future__ import annotations

import os
import random
import shutil
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.fork_server import ForkServer
from support.saves import BOTH_RANKS, SaveRequest, are_equal, gloo, names_in
from torch.distributed.checkpoint.api import CheckpointException

from bytecheckpoint import BcpLoadPlanner, BcpReader, BcpWriter, Config, verify
from bytecheckpoint.errors import CorruptCheckpointError

# Reads are buffered, because the damage has just been written through the cache.
CONFIG = Config(ring_bytes=16 << 20, direct_io=False, io_threads=1)
BLOCK = 4096
NUM_PROCESSES = 2
NUM_DAMAGES = 100_000 if os.environ.get("BCP_LONG") == "1" else 400
SEED = int(os.environ.get("BCP_SEED", "20241122"))
KINDS = ("zeros", "repeated", "swapped", "of the other rank", "of another save", "noise")


def state(ranks: tuple[int, ...], generation: int) -> dict[str, Any]:
    """Returns a state with a file of three quarters of a megabyte for each rank, and metadata of several blocks."""
    values: dict[str, Any] = {}
    for rank in ranks:
        generator = torch.Generator().manual_seed(100 * generation + rank)
        values[f"large{rank}"] = torch.rand(300, 500, generator=generator)
        values.update({f"small{rank}.{i}": torch.rand(64, generator=generator) for i in range(100)})
        values[f"step{rank}"] = generation
    return values


def save_state(request: SaveRequest) -> None:
    with gloo(request):
        dcp.save(
            state((request.rank,), request.generation), storage_writer=BcpWriter(request.path, config=request.config)
        )


def failure(path: Path, wanted: dict[str, Any]) -> BaseException | None:
    """Returns what a load raised, or None if it gave ``wanted``; fails on anything else."""
    target = {key: torch.zeros_like(v) if isinstance(v, torch.Tensor) else -1 for key, v in wanted.items()}
    try:
        dcp.load(target, storage_reader=BcpReader(path, config=CONFIG), planner=BcpLoadPlanner(), no_dist=True)
    except CheckpointException as caught:
        return caught.failures[0][0]
    assert are_equal(target, wanted), "the load gave wrong values"
    return None


class Damager:
    """Damages one block of a file in a random way."""

    def __init__(self, path: Path, other_save: Path) -> None:
        self._files = {name: (path / name).read_bytes() for name in names_in(path)}
        self._data = [name for name in self._files if name.endswith(".distcp")]
        self._others = [(other_save / name).read_bytes() for name in names_in(other_save)]

    def draw(self, rng: random.Random) -> tuple[str, str, bytes]:
        """Returns the kind of the damage, the name of the file, and its damaged content."""
        kind = rng.choice(KINDS)
        name = rng.choice(self._data if kind == "of the other rank" else list(self._files))
        content = self._files[name]
        if kind == "of the other rank":
            source = self._files[next(other for other in self._data if other != name)]
        elif kind == "of another save":
            source = rng.choice(self._others)
        else:
            source = content
        at, there = (BLOCK * rng.randrange(len(of) // BLOCK) for of in (content, source))
        damaged = bytearray(content)
        if kind == "zeros":
            damaged[at : at + BLOCK] = bytes(BLOCK)
        elif kind == "noise":
            damaged[at : at + BLOCK] = rng.randbytes(BLOCK)
        else:
            damaged[at : at + BLOCK] = source[there : there + BLOCK]
        if kind == "swapped":
            damaged[there : there + BLOCK] = content[at : at + BLOCK]
        return kind, name, bytes(damaged)

    def whole(self, name: str) -> bytes:
        return self._files[name]


def damage_blocks(original: Path, other_save: Path, copy: Path, part: int) -> tuple[Counter[str], list[str]]:
    """Returns how often each kind was tried, and the damage that was missed or reported wrongly."""
    warnings.simplefilter("ignore")
    shutil.copytree(original, copy)
    damager, wanted = Damager(copy, other_save), state(BOTH_RANKS, 1)
    assert failure(copy, wanted) is None
    seen: Counter[str] = Counter()
    faults = []
    for number in range(part, NUM_DAMAGES, NUM_PROCESSES):
        kind, name, damaged = damager.draw(random.Random(f"{SEED}-{number}"))
        (copy / name).write_bytes(damaged)
        error, problems = failure(copy, wanted), verify(copy, config=CONFIG).problems
        if damaged == damager.whole(name):
            kind = "no damage"
            is_right = error is None and problems == []
        else:
            is_right = type(error) is CorruptCheckpointError and name in str(error) and bool(problems)
            is_right = is_right and {problem.file for problem in problems} == {name}
        (copy / name).write_bytes(damager.whole(name))
        seen[kind] += 1
        if not is_right:
            faults.append(f"damage {number}, {kind} in {name}: load: {error!r}, verify: {problems}")
    return seen, faults


@pytest.mark.timeout(3600)
def test_damaged_blocks(server: ForkServer, tmp_path: Path) -> None:
    paths = [tmp_path / "ckpt", tmp_path / "other"]
    for generation, path in enumerate(paths, start=1):
        request = SaveRequest(path, generation, num_ranks=2, store=str(tmp_path / f"store{generation}"), config=CONFIG)
        for pid in [server.start(save_state, replace(request, rank=rank)) for rank in BOTH_RANKS]:
            server.wait(pid).unwrap()
    pids = [server.start(damage_blocks, *paths, tmp_path / str(part), part) for part in range(NUM_PROCESSES)]
    results = [server.wait(pid, 3500).unwrap() for pid in pids]
    seen = sum((counter for counter, _ in results), Counter())
    print(f"seed {SEED}: {seen.total()} damaged blocks: {dict(seen)}")
    assert [fault for _, faults in results for fault in faults] == []
    assert seen.total() == NUM_DAMAGES
    assert set(KINDS) <= set(seen)
