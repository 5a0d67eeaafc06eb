# SPDX-License-Identifier: Apache-2.0
"""Tests loads of damaged files: a load names the damaged file, or does not need the damaged bytes and is exact."""

from __future__ import annotations

import io
import os
import random
import shutil
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.fork_server import ForkServer
from support.saves import BOTH_RANKS, SaveRequest, are_equal, data_files, load, names_in, save, state
from torch.distributed.checkpoint.api import CheckpointException

from bytecheckpoint import BcpReader, BcpWriter, Config
from bytecheckpoint.errors import CheckpointError, CorruptCheckpointError, FormatVersionError, StorageError
from faults.crafting import resigned_data

# Reads are buffered, because the damage has just been written through the cache. One test below reads directly.
CONFIG = Config(ring_bytes=16 << 20, direct_io=False)
GENERATION = 5
BLOCK, HEADER, DATA_TRAILER, META_TRAILER = 256 << 10, 4096, 80, 128
SEED = 20240611


@pytest.fixture(scope="module")
def saved(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a checkpoint of two ranks: three files. A full load needs every byte of them."""
    path = tmp_path_factory.mktemp("damage") / "ckpt"
    store = str(path.parent / "store")
    pids = [server.start(save, SaveRequest(path, GENERATION, rank, 2, store)) for rank in BOTH_RANKS]
    for pid in pids:
        assert server.wait(pid).unwrap().errors == {}
    assert len(names_in(path)) == 3
    assert all((path / name).stat().st_size < BLOCK for name in names_in(path)), "then the header is always checked"
    return path


@contextmanager
def replaced(file: Path, content: bytes | bytearray) -> Iterator[None]:
    """Overwrites ``file`` in place with ``content`` while the context lasts, so that its name keeps its inode."""
    original = file.read_bytes()
    file.write_bytes(content)
    try:
        yield
    finally:
        file.write_bytes(original)


def failure_of(path: Path, config: Config = CONFIG) -> CheckpointError | None:
    """Returns what a full load raised, or None if it gave what was saved. Fails on any value that was not saved."""
    wanted = state(GENERATION, BOTH_RANKS)
    target: dict[str, Any] = {
        name: torch.full_like(value, -1) if isinstance(value, torch.Tensor) else -1 for name, value in wanted.items()
    }
    try:
        dcp.load(target, storage_reader=BcpReader(path, config=config), no_dist=True)
    except CheckpointException as caught:
        # A failed load leaves in a tensor what was saved, or, if it has not reached it, what was there before.
        for name, value in target.items():
            if isinstance(value, torch.Tensor):
                assert torch.logical_or(value == wanted[name], value == -1).all(), f"unverified bytes reached {name}"
            else:
                assert value in (wanted[name], -1)
        (error,) = (wrapped[0] for wrapped in caught.failures.values())
        assert isinstance(error, CheckpointError), repr(error)
        return error
    assert are_equal(target, wanted), "the load gave wrong values"
    return None


def assert_seen(path: Path, name: str, what: str, kinds: tuple[type[CheckpointError], ...]) -> None:
    error = failure_of(path)
    assert error is not None, f"{name}: {what} was not seen"
    assert type(error) in kinds, f"{name}: {what}: {error!r}"
    assert error.path == str(path / name), f"{name}: {what}: {error!r}"
    assert name in str(error)


def structure_of(name: str, content: bytes) -> tuple[list[int], list[int]]:
    """Returns the positions of the bytes that describe other bytes, and those of the rest."""
    size = len(content)
    if name == ".metadata":
        pickle_bytes, manifest_bytes = struct.unpack_from("<qq", content, size - META_TRAILER + 16)
        directory = range(pickle_bytes, pickle_bytes + 32 + 8 * 16)
        structural = [0, 1, *directory, *range(pickle_bytes + manifest_bytes, size)]
    else:
        (end_of_records,) = struct.unpack_from("<q", content, size - DATA_TRAILER + 24)
        structural = [*range(68), HEADER - 1, *range(HEADER, HEADER + 30), *range(end_of_records, size)]
    return structural, sorted(set(range(size)) - set(structural))


def test_the_checkpoint_is_whole(saved: Path) -> None:
    assert failure_of(saved) is None


@pytest.mark.parametrize("which", [0, 1, 2], ids=[".metadata", "rank 0", "rank 1"])
def test_flipped_bits(saved: Path, which: int) -> None:
    """Flips one bit of every structural byte, and of a sample of the others."""
    name = names_in(saved)[which]
    assert (name == ".metadata") == (which == 0)
    content = (saved / name).read_bytes()
    rng = random.Random(SEED + which)
    structural, others = structure_of(name, content)
    for position in [*structural, *rng.sample(others, 100)]:
        damaged = bytearray(content)
        damaged[position] ^= 1 << rng.randrange(8)
        with replaced(saved / name, damaged):
            # A load refuses a version above ours before it reads anything that a later version may have moved.
            kinds = (CorruptCheckpointError, FormatVersionError)
            assert_seen(saved, name, f"a flip at {position} of {len(content)}", kinds)


@pytest.mark.parametrize("which", [0, 1, 2], ids=[".metadata", "rank 0", "rank 1"])
def test_wrong_lengths(saved: Path, which: int) -> None:
    """Cuts files, or appends bytes. A `.metadata` without its trailer is not taken for that of another tool."""
    name = names_in(saved)[which]
    content = (saved / name).read_bytes()
    size = len(content)
    rng = random.Random(SEED + which)
    trailer = META_TRAILER if which == 0 else DATA_TRAILER
    near_the_end = [size - 1, size - 8, size - trailer + 1, size - trailer, size - trailer - 1]
    lengths = [0, 1, 8, 68, HEADER - 1, HEADER, HEADER + 1, *near_the_end, *rng.sample(range(size), 20)]
    for length in {length for length in lengths if length < size}:
        with replaced(saved / name, content[:length]):
            assert_seen(saved, name, f"a cut to {length} of {size}", (CorruptCheckpointError,))
    for more in (b"\0", bytes(4096), content[-trailer:], content):
        with replaced(saved / name, content + more):
            assert_seen(saved, name, f"{len(more)} bytes behind its end", (CorruptCheckpointError,))


@pytest.mark.parametrize("which", [0, 1, 2], ids=[".metadata", "rank 0", "rank 1"])
def test_zeroed_ranges(saved: Path, which: int) -> None:
    """Zeroes what a disk loses with lost writes: sectors, the end of a file, or all of it."""
    name = names_in(saved)[which]
    content = (saved / name).read_bytes()
    size = len(content)
    rng = random.Random(SEED + which)
    ranges = [(0, size), (0, 512), (0, HEADER), (size // 2, size), (size - 8, size), (size - 512, size)]
    for _ in range(20):
        begin = rng.randrange(0, size, 512)
        ranges.append((begin, min(size, begin + 512 * rng.choice((1, 8)))))
    for begin, end in ranges:
        damaged = content[:begin] + bytes(end - begin) + content[end:]
        if damaged != content:
            with replaced(saved / name, damaged):
                assert_seen(saved, name, f"zeros from {begin} to {end}", (CorruptCheckpointError,))


def test_files_of_another_save(saved: Path, tmp_path: Path, server: ForkServer) -> None:
    """Puts whole, valid files in the wrong place: stale files of the same rank, and files of two ranks swapped."""
    other = tmp_path / "ckpt"
    pids = [server.start(save, SaveRequest(other, 6, rank, 2, str(tmp_path / "store"))) for rank in BOTH_RANKS]
    for pid in pids:
        assert server.wait(pid).unwrap().errors == {}
    names, stale = data_files(saved), data_files(other)
    for name, of_other in zip(names, stale, strict=True):
        with replaced(saved / name, (other / of_other).read_bytes()):
            assert_seen(saved, name, "a stale file", (CorruptCheckpointError,))
    first, second = ((saved / name).read_bytes() for name in names)
    with replaced(saved / names[0], second), replaced(saved / names[1], first):
        error = failure_of(saved)
        assert type(error) is CorruptCheckpointError
        assert Path(error.path).name in names
    # The commit mark of another save names files that are not there.
    with replaced(saved / ".metadata", (other / ".metadata").read_bytes()):
        error = failure_of(saved)
        assert type(error) is CorruptCheckpointError
        assert Path(error.path).name in stale


def test_stale_file_of_the_same_size_and_name(saved: Path) -> None:
    """The hardest damage to see: header, records, table and trailer agree with each other, but hold other data."""
    for name in data_files(saved):
        content = bytearray((saved / name).read_bytes())
        with replaced(saved / name, with_other_data(content)):
            assert_seen(saved, name, "a consistent file of other data", (CorruptCheckpointError,))
            assert "the metadata name file" in str(failure_of(saved)), "only the commit mark can tell"


def with_other_data(content: bytearray) -> bytes:
    """Returns a file that passes every check of its own, but has one byte of its records changed."""
    (end_of_records,) = struct.unpack_from("<q", content, len(content) - DATA_TRAILER + 24)
    content[end_of_records - 2000] ^= 1
    return resigned_data(bytes(content))


def test_missing_file(saved: Path, tmp_path: Path) -> None:
    for name in data_files(saved):
        copy = Path(shutil.copytree(saved, tmp_path / name))
        (copy / name).unlink()
        assert_seen(copy, name, "its absence", (CorruptCheckpointError,))


@pytest.mark.parametrize("which", [0, 1], ids=[".metadata", "data"])
@pytest.mark.parametrize("kind", ["fifo", "directory", "dangling link"])
def test_not_a_file(saved: Path, tmp_path: Path, which: int, kind: str) -> None:
    """A load ends with an error, whatever is there, and does not hang on a FIFO that nobody writes to."""
    copy = Path(shutil.copytree(saved, tmp_path / "ckpt"))
    file = copy / names_in(copy)[which]
    file.unlink()
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "directory":
        file.mkdir()
    else:
        file.symlink_to("nowhere")
    error = failure_of(copy)
    assert error is not None
    assert error.path == str(file)
    if kind != "dangling link":
        assert type(error) is StorageError


def test_damage_is_seen_by_direct_reads(saved: Path) -> None:
    config = Config(ring_bytes=16 << 20, io_threads=2)
    assert failure_of(saved, config) is None
    for name in data_files(saved):
        content = (saved / name).read_bytes()
        for position in (0, HEADER + 10, len(content) // 2, len(content) - 1):
            damaged = bytearray(content)
            damaged[position] ^= 0x80
            with replaced(saved / name, damaged):
                assert type(failure_of(saved, config)) is CorruptCheckpointError


def data_range(content: bytes, record: Any) -> range:
    """Returns which bytes of the file hold the elements of a tensor record."""
    zip_file = content[record.offset : record.offset + record.length]
    header = zipfile.ZipFile(io.BytesIO(zip_file)).getinfo("archive/data/0")
    name_bytes, extra_bytes = struct.unpack_from("<HH", zip_file, header.header_offset + 26)
    begin = record.offset + header.header_offset + 30 + name_bytes + extra_bytes
    return range(begin, begin + header.file_size)


def test_partial_load_needs_its_blocks_only(tmp_path: Path) -> None:
    """A load of one tensor from a file of many blocks needs its blocks, the table and the trailer, and no others."""
    path = tmp_path / "ckpt"
    tensors = {f"t{i}": torch.full((100_000,), float(i)) for i in range(8)}
    dcp.save(tensors, storage_writer=BcpWriter(path), no_dist=True)
    (name,) = data_files(path)
    content = (path / name).read_bytes()
    metadata = dcp.FileSystemReader(path).read_metadata()
    (record,) = (info for index, info in metadata.storage_data.items() if index.fqn == "t5")
    wanted = data_range(content, record)
    needed = range(wanted.start // BLOCK * BLOCK, -(-wanted.stop // BLOCK) * BLOCK)
    (end_of_records,) = struct.unpack_from("<q", content, len(content) - DATA_TRAILER + 24)
    assert HEADER < needed.start < needed.stop < end_of_records

    edges = [needed.start - 1, needed.start, wanted.start, wanted.stop - 1, needed.stop - 1, needed.stop]
    rng = random.Random(SEED)
    positions = [0, HEADER - 1, *edges, end_of_records - 1, end_of_records, len(content) - DATA_TRAILER]
    num_seen = 0
    for position in [*positions, *rng.sample(range(len(content)), 60)]:
        damaged = bytearray(content)
        damaged[position] ^= 1 << rng.randrange(8)
        target = {"t5": torch.full((100_000,), -1.0)}
        with replaced(path / name, damaged):
            if position in needed or position >= end_of_records:
                num_seen += 1
                with pytest.raises(CheckpointException, match=name):
                    dcp.load(target, storage_reader=BcpReader(path, config=CONFIG), no_dist=True)
            else:
                dcp.load(target, storage_reader=BcpReader(path, config=CONFIG), no_dist=True)
                assert torch.equal(target["t5"], tensors["t5"])
    assert 10 < num_seen < 60


def test_loads_again_once_it_is_whole(saved: Path) -> None:
    """The tests above put everything back, and no load has left anything that disturbs the next one."""
    assert are_equal(load(BcpReader(saved, config=CONFIG), BOTH_RANKS), state(GENERATION, BOTH_RANKS))
