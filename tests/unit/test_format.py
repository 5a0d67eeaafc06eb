# SPDX-License-Identifier: Apache-2.0
"""Tests that zlib, zipfile, torch.load and pickle read what C++ writes, and checks load plans against an oracle."""

from __future__ import annotations

import io
import itertools
import math
import pickle
import re
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.dtypes import NAMES

from bytecheckpoint import _testing
from bytecheckpoint.errors import InvalidPlanError
from bytecheckpoint.native import _core

ENTRIES = ["archive/data.pkl", "archive/byteorder", "archive/version", "archive/data/0"]
MIB = 1 << 20
INT64 = st.integers(-(2**63), 2**63 - 1)

shapes = st.lists(st.integers(0, 6), max_size=5)
record_offsets = st.integers(0, 2**20).map(lambda n: 64 * n)


# --- CRC-32


@given(data=st.binary(max_size=300), begin=st.integers(0, 40), crc=st.integers(0, 2**32 - 1))
def test_crc32_is_that_of_zlib(data: bytes, begin: int, crc: int) -> None:
    assert _testing.crc32(data[begin:], crc) == zlib.crc32(data[begin:], crc)
    assert _testing.crc32(data) == zlib.crc32(data)


@given(seed=st.integers(0, 2**32 - 1), size=st.integers(0, 3 * MIB))
@settings(max_examples=30)
def test_crc32_of_long_data(seed: int, size: int) -> None:
    data = (seed.to_bytes(4, "little") * (size // 4 + 1))[:size]
    assert _testing.crc32(data) == zlib.crc32(data)


@given(a=st.binary(max_size=2000), b=st.binary(max_size=2000))
def test_crc32_combine_joins(a: bytes, b: bytes) -> None:
    assert _testing.crc32_combine(zlib.crc32(a), zlib.crc32(b), len(b)) == zlib.crc32(a + b)


def crc32_of_zeros(size: int) -> int:
    """Returns the CRC of ``size`` zeros. It works by doubling, so it is fast for sizes that nobody wants to read."""
    crc, power, crc_of_power = 0, 1, zlib.crc32(b"\0")
    while size:
        if size & 1:
            crc = _testing.crc32_combine(crc, crc_of_power, power)
        crc_of_power = _testing.crc32_combine(crc_of_power, crc_of_power, power)
        power, size = 2 * power, size >> 1
    return crc


@pytest.mark.parametrize("size", [0, 1, 255, 256, 65537, 5 * MIB + 3])
def test_crc32_combine_of_many_zeros(size: int) -> None:
    assert crc32_of_zeros(size) == zlib.crc32(bytes(size))


# --- tensor records


def tensor_bytes(dtype: str, shape: list[int], seed: int) -> bytes:
    size = math.prod(shape) * torch.empty(0, dtype=getattr(torch, dtype)).element_size()
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype == "bool" else 256
    return bytes(torch.randint(0, high, (size,), dtype=torch.uint8, generator=generator).numpy())


def record_of(dtype: str, shape: list[int], offset: int, data: bytes) -> tuple[bytes, int]:
    head, data_offset, data_bytes, tail = _testing.zip_record(dtype, shape, offset, zlib.crc32(data))
    assert data_bytes == len(data)
    assert data_offset == offset + len(head)
    return head + data + tail, data_offset


def check_loaded(tensor: torch.Tensor, dtype: str, shape: list[int], data: bytes) -> None:
    assert type(tensor) is torch.Tensor
    assert tensor.dtype == getattr(torch, dtype)
    assert list(tensor.shape) == shape
    assert tensor.stride() == torch.empty(shape).stride()
    assert tensor.storage_offset() == 0
    assert not tensor.requires_grad
    assert not tensor.is_conj()
    assert not tensor.is_neg()
    assert tensor.untyped_storage().nbytes() == len(data)
    assert bytes(tensor.reshape(-1).view(torch.uint8).numpy()) == data if data else tensor.numel() == 0


@pytest.mark.parametrize("dtype", NAMES)
@given(shape=shapes, offset=record_offsets, seed=st.integers(0, 1000))
@settings(max_examples=25, deadline=None)
def test_zip_record_is_read_by_zipfile_and_torch(dtype: str, shape: list[int], offset: int, seed: int) -> None:
    data = tensor_bytes(dtype, shape, seed)
    record, data_offset = record_of(dtype, shape, offset, data)
    assert data_offset % 64 == 0
    with zipfile.ZipFile(io.BytesIO(record)) as archive:
        assert archive.testzip() is None
        assert archive.namelist() == ENTRIES
        assert archive.read("archive/data/0") == data
        assert archive.read("archive/byteorder") == b"little"
        assert {entry.date_time for entry in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
        assert {entry.compress_type for entry in archive.infolist()} == {zipfile.ZIP_STORED}
    check_loaded(torch.load(io.BytesIO(record), weights_only=True), dtype, shape, data)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint16", "float8_e4m3fn", "complex128", "bool"])
@pytest.mark.parametrize("offset", [4096, 4096 + 64, 7 * 64, 10**6 * 64])
@pytest.mark.parametrize("extra", [-16, 0, 48])
def test_data_is_aligned_in_the_file(dtype: str, offset: int, extra: int) -> None:
    itemsize = torch.empty(0, dtype=getattr(torch, dtype)).element_size()
    shape = [(MIB + extra) // itemsize]
    data = tensor_bytes(dtype, shape, 1)
    record, data_offset = record_of(dtype, shape, offset, data)
    assert data_offset % (4096 if len(data) >= MIB else 64) == 0
    check_loaded(torch.load(io.BytesIO(record), weights_only=True), dtype, shape, data)


def test_the_example_of_the_format_document() -> None:
    """A changed byte needs a new format version. FORMAT.md shows the bytes of version 1."""
    document = (Path(__file__).parents[2] / "csrc/format/FORMAT.md").read_text()
    rows = dict(re.findall(r"^    ([0-9a-f]{6})  ((?:[0-9a-f]{2} )+)", document, re.MULTILINE))
    shown = b"".join(bytes.fromhex(rows[f"{at:06x}"]) for at in range(0x1000, 0x1160, 16))
    record, data_offset = record_of("float32", [2], 4096, struct.pack("<ff", 1, 2))
    assert data_offset == 0x1140
    assert record.startswith(shown)


def test_a_record_with_a_wrong_byte_fails_testzip() -> None:
    record, data_offset = record_of("uint8", [100], 0, bytes(range(100)))
    damaged = bytearray(record)
    damaged[data_offset + 50] ^= 1
    with zipfile.ZipFile(io.BytesIO(damaged)) as archive:
        assert archive.testzip() == "archive/data/0"


def test_every_dtype_of_the_table_is_torchs() -> None:
    names = _core.dtype_names()
    assert len(names) == len(set(names)) == 23
    assert {*names} - {*NAMES} <= {"bcomplex32"}, "torch 2.15 is the first that has it"
    assert all(isinstance(getattr(torch, name), torch.dtype) for name in NAMES)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [("float31", [1]), ("", [1]), ("float32", [-1]), ("float32", [2**62, 4]), ("complex128", [2**60])],
)
def test_what_cannot_be_stored_is_refused(dtype: str, shape: list[int]) -> None:
    with pytest.raises(InvalidPlanError, match="cannot be stored"):
        _testing.zip_record(dtype, shape, 0, 0)


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["uint8", "float8_e4m3fn", "float32"])
@pytest.mark.parametrize("size", [0xFFFF0000 - 4, 0xFFFF0000, 2**32 + 20])
def test_a_record_beyond_4_gib(tmp_path: Path, dtype: str, size: int) -> None:
    """The file is sparse on disk. Its data are zeros, except for a mark at the end."""
    mark = b"\x01\x02\x03\x04"
    crc = _testing.crc32_combine(crc32_of_zeros(size - 4), zlib.crc32(mark), 4)
    shape = [size // torch.empty(0, dtype=getattr(torch, dtype)).element_size()]
    head, _, data_bytes, tail = _testing.zip_record(dtype, shape, 0, crc)
    assert data_bytes == size
    path = tmp_path / "record"
    with path.open("wb") as out:
        out.write(head)
        out.seek(len(head) + size - 4)
        out.write(mark + tail)
    with zipfile.ZipFile(path) as archive:
        assert archive.namelist() == ENTRIES
        entry = archive.infolist()[3]
        assert (entry.file_size, entry.compress_size, entry.CRC) == (size, size, crc)
        assert archive.testzip() is None
    mapped = torch.load(path, weights_only=True, mmap=True)
    assert mapped.dtype == getattr(torch, dtype)
    assert list(mapped.shape) == shape
    assert bytes(mapped.view(torch.uint8)[-8:].numpy()) == bytes(4) + mark
    del mapped
    if dtype == "float8_e4m3fn":
        loaded = torch.load(path, weights_only=True)
        assert bytes(loaded.view(torch.uint8)[-8:].numpy()) == bytes(4) + mark
        assert int(torch.count_nonzero(loaded.view(torch.uint8))) == 4


# --- trees of builtin values

leaves = st.none() | st.booleans() | INT64 | st.floats() | st.text() | st.binary(max_size=20)
keys = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=4)
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=5) | st.lists(inner, max_size=5).map(tuple) | st.dictionaries(keys, inner, max_size=5)
    ),
    max_leaves=40,
)


def same(a: Any, b: Any) -> bool:
    """Whether both are equal in value, type and order; floats in each bit, but any NaN equals any other."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b) or (math.isnan(a) and math.isnan(b))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    return bool(a == b)


@given(tree=trees)
def test_pickle_tree_unpickles_equal(tree: Any) -> None:
    assert same(pickle.loads(_testing.pickle_tree(tree)), tree)


@given(tree=trees)
def test_tree_round_trip(tree: Any) -> None:
    assert same(_testing.tree_round_trip(tree), tree)


@pytest.mark.parametrize("number", [0, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32, 2**63 - 1])
def test_ints_at_the_borders_of_their_opcodes(number: int) -> None:
    for value in (number, -number, -number - 1):
        assert same(pickle.loads(_testing.pickle_tree(value)), value)
        assert same(_testing.tree_round_trip(value), value)


def test_a_tree_with_many_strings_uses_the_long_memo() -> None:
    tree = [[f"layers.{i}", ("layers", i), "x" * 300] for i in range(1000)]
    assert same(pickle.loads(_testing.pickle_tree(tree)), tree)


def nested(depth: int) -> list[Any]:
    tree: list[Any] = []
    for _ in range(depth):
        tree = [tree]
    return tree


@pytest.mark.parametrize("call", [_testing.pickle_tree, _testing.tree_round_trip])
def test_what_is_no_tree_is_refused_with_its_place(call: Any) -> None:
    with pytest.raises(TypeError, match=r"planner_data\['a'\]\[1\].*set"):
        call({"a": [0, {1}]})
    with pytest.raises(TypeError, match="Size"):
        call(torch.Size([1]))
    with pytest.raises(ValueError, match="64 bits"):
        call((2**63,))
    call(nested(100))
    with pytest.raises(ValueError, match="too deeply"):
        call(nested(101))


# --- plan_load


@st.composite
def wanted_boxes(draw: st.DrawFn) -> tuple[int, int, list[int], list[int], list[int], int]:
    sizes = draw(st.lists(st.integers(0, 7), max_size=4))
    offsets = [draw(st.integers(0, size)) for size in sizes]
    lengths = [draw(st.integers(0, size - offset)) for size, offset in zip(sizes, offsets, strict=True)]
    itemsize = draw(st.sampled_from([1, 2, 4, 8, 16]))
    return draw(st.integers(0, 2)), 16 * draw(st.integers(0, 100)), sizes, offsets, lengths, itemsize


def blocks_of(box: tuple[int, int, list[int], list[int], list[int], int], block_bytes: int) -> set[tuple[int, int]]:
    """Returns (file, block) of every wanted byte, found element by element."""
    file, data_offset, sizes, offsets, lengths, itemsize = box
    strides = torch.empty(sizes).stride()
    blocks = set()
    ranges = [range(o, o + n) for o, n in zip(offsets, lengths, strict=True)]
    for index in itertools.product(*ranges):
        at = data_offset + itemsize * sum(i * s for i, s in zip(index, strides, strict=True))
        blocks |= {(file, block) for block in range(at // block_bytes, (at + itemsize - 1) // block_bytes + 1)}
    return blocks


@given(boxes=st.lists(wanted_boxes(), max_size=6), log_block=st.integers(3, 9), blocks=st.integers(1, 5))
@settings(deadline=None)
def test_plan_load_reads_the_wanted_blocks_once_and_no_other(boxes: list[Any], log_block: int, blocks: int) -> None:
    block_bytes = 1 << log_block
    limit = blocks * block_bytes
    wanted = [blocks_of(box, block_bytes) for box in boxes]
    plan = _testing.plan_load(boxes, block_bytes, limit)
    assert [file for file, _ in plan] == sorted({file for box in wanted for file, _ in box})
    read: list[tuple[int, int]] = []
    for file, segments in plan:
        end_before, bytes_before = -1, 0
        for offset, size, indices in segments:
            assert offset % block_bytes == 0
            assert 0 < size <= limit
            assert offset > end_before or (offset == end_before and bytes_before == limit)
            here = {(file, block) for block in range(offset // block_bytes, (offset + size) // block_bytes)}
            read += sorted(here)
            assert indices == sorted(set(indices))
            assert set(indices) >= {w for w, box in enumerate(wanted) if box & here}
            end_before, bytes_before = offset + size, size
    assert sorted(read) == sorted(set().union(*wanted))


def test_plan_load_refuses_a_box_outside_its_chunk() -> None:
    with pytest.raises(InvalidPlanError, match="not inside a chunk"):
        _testing.plan_load([(0, 0, [4], [2], [3], 1)], 4096, 4096)
