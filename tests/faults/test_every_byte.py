# SPDX-License-Identifier: Apache-2.0
"""Flips bits of a checkpoint and cuts its files, and tests that verify and a load see each change.

The short form tries a bit of every seventh byte and every seventh length; with BCP_LONG=1 (``make torture``) every bit
and every length. Loads call the reader's hooks, as ``dcp.load`` does, with a plan that is made once. One load of 64
goes through ``dcp.load`` itself.
"""

from __future__ import annotations

import random
import shutil
import struct
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.fork_server import ForkServer
from support.saves import data_files, names_in

from bytecheckpoint import BcpWriter, verify
from faults.crafting import DATA_TRAILER, META_TRAILER
from faults.small import CONFIG, SEED, damage_every_byte, load_small

BLOCK = 256 << 10
NUM_WORKERS = 2


def assert_all_are_seen(
    server: ForkServer, path: Path, tmp_path: Path, *, every: int, all_bits: bool, limit_s: float
) -> None:
    """Tries every ``every``-th byte and length, split between the workers; fails on any damage that was missed."""
    num_parts = every * NUM_WORKERS
    parts = range(0, num_parts, every)
    pids = [server.start(damage_every_byte, path, tmp_path / str(p), p, num_parts, all_bits) for p in parts]
    findings = [server.wait(pid, limit_s).unwrap() for pid in pids]
    num_bytes = sum(len(range(0, (path / name).stat().st_size, every)) for name in names_in(path))
    assert sum(found.num_flips for found in findings) == (8 if all_bits else 1) * num_bytes
    assert sum(found.num_cuts for found in findings) == num_bytes
    num_faults = sum(found.num_faults for found in findings)
    assert num_faults == 0, f"{num_faults}, such as\n" + "\n".join(
        fault for found in findings for fault in found.faults
    )


def test_every_seventh_byte_and_length(server: ForkServer, small_checkpoint: Path, tmp_path: Path) -> None:
    assert_all_are_seen(server, small_checkpoint, tmp_path, every=7, all_bits=False, limit_s=280)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_every_bit_and_every_length(server: ForkServer, small_checkpoint: Path, tmp_path: Path) -> None:
    assert_all_are_seen(server, small_checkpoint, tmp_path, every=1, all_bits=True, limit_s=1700)


WHERE: dict[str, tuple[int, int]] = {  # number of the file among the sorted names, position
    "pickle": (0, 100),
    "manifest": (0, -META_TRAILER - 100),
    "trailer of the metadata": (0, -META_TRAILER + 20),
    "records": (1, 5000),
    "block table": (1, -DATA_TRAILER - 2),
    "trailer of a data file": (1, -DATA_TRAILER + 20),
}


@pytest.mark.parametrize("where", WHERE)
def test_damage_is_told_with_its_offset(where: str, small_checkpoint: Path, tmp_path: Path) -> None:
    """verify gives the offset as a number, in the right block or section; a load gives it in the text of its error."""
    path = Path(shutil.copytree(small_checkpoint, tmp_path / "ckpt"))
    number, position = WHERE[where]
    file = path / names_in(path)[number]
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(content)
    position %= len(content)
    (problem,) = verify(path, config=CONFIG).problems
    assert problem.offset is not None
    assert problem.num_bytes is not None
    assert problem.offset <= position < problem.offset + problem.num_bytes
    assert f"offset={problem.offset}" in str(load_small(path))


def test_verify_names_block_and_keys(tmp_path: Path) -> None:
    """In a file of many blocks verify names only the damaged block, and only the keys with bytes in it."""
    path = tmp_path / "ckpt"
    tensors = {f"t{i}": torch.full((50_000,), float(i)) for i in range(8)}
    dcp.save(tensors, storage_writer=BcpWriter(path), no_dist=True)
    (name,) = data_files(path)
    file = path / name
    content = file.read_bytes()
    (end_of_records,) = struct.unpack_from("<q", content, len(content) - DATA_TRAILER + 24)
    records = {
        index.fqn: range(info.offset, info.offset + info.length)
        for index, info in dcp.FileSystemReader(path).read_metadata().storage_data.items()
    }
    edges = [edge for record in records.values() for edge in (record.start - 1, record.start, record.stop - 1)]
    blocks = range(0, end_of_records, BLOCK)
    assert len(blocks) > 5
    positions = [0, *edges, *(block + at for block in blocks for at in (-1, 0) if block), end_of_records - 1]
    rng = random.Random(SEED)
    for position in [*positions, *rng.sample(range(end_of_records), 40)]:
        damaged = bytearray(content)
        damaged[position] ^= 1 << rng.randrange(8)
        file.write_bytes(damaged)
        begin = position // BLOCK * BLOCK
        end = min(begin + BLOCK, end_of_records)
        (problem,) = verify(path, config=CONFIG).problems
        assert (problem.file, problem.section) == (name, "records")
        assert (problem.offset, problem.num_bytes) == (begin, end - begin)
        assert sorted(problem.fqns) == sorted(k for k, r in records.items() if r.start < end and begin < r.stop)
    # With all blocks damaged, each block is a problem of its own.
    damaged = bytearray(content)
    for block in blocks:
        damaged[block + 100] ^= 1
    file.write_bytes(damaged)
    report = verify(path, config=CONFIG)
    assert [problem.offset for problem in report.problems] == list(blocks)
    assert {fqn for problem in report.problems for fqn in problem.fqns} == set(tensors)
