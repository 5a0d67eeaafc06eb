# SPDX-License-Identifier: Apache-2.0
"""Tests that C++ and stock torch read each other's archives of builtin values. C++ leaves all else to torch."""

from __future__ import annotations

import collections
import enum
import io
import math
import struct
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import ReadItem, WriteItem

from bytecheckpoint import BcpReader, BcpWriter
from bytecheckpoint._core import dump_builtin, load_builtin
from bytecheckpoint.dcp import rank_load
from bytecheckpoint.errors import CorruptCheckpointError

INTS = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.sampled_from([sign * 2**bits + more for bits in (0, 8, 16, 31, 32, 62) for sign in (-1, 1) for more in (-1, 0)]),
)
SCALARS = st.one_of(st.none(), st.booleans(), INTS, st.floats(), st.text(), st.binary())
KEYS = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4).map(tuple), max_leaves=4)
TREES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=6),
        st.lists(inner, max_size=6).map(tuple),
        st.dictionaries(KEYS, inner, max_size=6),
    ),
    max_leaves=40,
)

PARAM_GROUP = {
    "lr": 1e-3,
    "betas": (0.9, 0.95),
    "eps": 1e-8,
    "weight_decay": 0.1,
    "amsgrad": False,
    "foreach": None,
    "fused": True,
    "params": [*range(21)],
}


def saved(value: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def loaded(archive: bytes, *, weights_only: bool = True) -> Any:
    return torch.load(io.BytesIO(archive), weights_only=weights_only)


def dumped(value: Any) -> bytes:
    archive = dump_builtin(value)
    assert archive is not None
    return archive


def is_same(a: Any, b: Any) -> bool:
    """Whether ``a`` and ``b`` are equal, also in types, order, signs of zero and bits of NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, dict):
        return is_same([*a.items()], [*b.items()])
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(is_same, a, b))
    return bool(a == b)


def holds_empty_bytes(value: Any) -> bool:
    if isinstance(value, dict):
        return holds_empty_bytes([*value.items()])
    return value == b"" or (isinstance(value, list | tuple) and any(map(holds_empty_bytes, value)))


@settings(max_examples=300, deadline=None)
@given(TREES)
def test_stock_reads_ours(value: Any) -> None:
    archive = dumped(value)
    assert is_same(loaded(archive), value)
    assert is_same(loaded(archive, weights_only=False), value)
    assert dumped(value) == archive


@settings(max_examples=300, deadline=None)
@given(TREES)
def test_ours_is_read_back(value: Any) -> None:
    back = load_builtin(dumped(value))
    assert back is not None
    assert is_same(back[0], value)


@settings(max_examples=300, deadline=None)
@given(TREES, st.sampled_from([2, 4, 5]))
def test_stock_is_read(value: Any, protocol: int) -> None:
    back = load_builtin(saved(value, pickle_protocol=protocol))
    if protocol == 2 and holds_empty_bytes(value):
        assert back is None  # pickled as a call of `bytes`; all other bytes as a call of `_codecs.encode`
    else:
        assert back is not None
        assert is_same(back[0], value)


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_param_group(protocol: int) -> None:
    back = load_builtin(saved(PARAM_GROUP, pickle_protocol=protocol))
    assert back is not None
    assert is_same(back[0], PARAM_GROUP)
    assert is_same(loaded(dumped(PARAM_GROUP)), PARAM_GROUP)


def test_a_file_of_stock_is_read(tmp_path: Path) -> None:
    """The entries of its archive lie in a folder that is named after the file."""
    torch.save(PARAM_GROUP, tmp_path / "group.pt")
    assert load_builtin((tmp_path / "group.pt").read_bytes()) == (PARAM_GROUP,)


def test_any_buffer_will_do() -> None:
    archive = dumped(7)
    for buffer in (archive, bytearray(archive), memoryview(archive), io.BytesIO(archive).getbuffer()):
        assert load_builtin(buffer) == (7,)
    with pytest.raises(TypeError):
        load_builtin("text")  # type: ignore[arg-type]


class Number(int):
    pass


class Real(float):
    pass


class Text(str):
    pass


class Raw(bytes):
    pass


class Items(list):  # type: ignore[type-arg]
    pass


class Entries(dict):  # type: ignore[type-arg]
    pass


class Pair(NamedTuple):
    a: int
    b: int


class Color(enum.IntEnum):
    RED = 1


class Word(enum.StrEnum):
    ONE = "one"


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


def doubled(times: int) -> Any:
    """Returns tuples within tuples. They share objects, so they are few; without sharing no memory could hold them."""
    value: Any = (1,)
    for _ in range(times):
        value = (value, value)
    return value


OTHERS = [
    Number(1),
    Real(1),
    Text("a"),
    Raw(b"a"),
    Items([1]),
    Entries(a=1),
    Pair(1, 2),
    Color.RED,
    Word.ONE,
    np.float64(1),  # is a float
    np.int64(1),
    np.bool_(True),
    np.str_("a"),  # is a str
    torch.Size([1]),  # is a tuple
    torch.tensor(1),
    torch.float32,
    collections.OrderedDict(a=1),
    collections.defaultdict(int, a=1),
    collections.Counter("a"),
    {1},
    frozenset([1]),
    1j,
    bytearray(b"a"),
    range(3),
    slice(3),
    int,
    len,
    object(),
    ...,
    2**63,
    -(2**63) - 1,
    10**1000,
    "\ud800",
    nested(101),
    "x" * (1 << 20),
    b"\xff" * (1 << 19),
]
# Values of which torch.save makes no archive, or a small one.
NEVER_WRITTEN = [memoryview(b"a"), [0] * (1 << 18)]


@pytest.mark.parametrize("other", OTHERS + NEVER_WRITTEN, ids=lambda other: type(other).__name__)
def test_others_are_left_to_torch(other: Any) -> None:
    assert dump_builtin(other) is None
    for around in ([other], (1, (other,)), {"a": {"b": [other]}}):
        assert dump_builtin(around) is None
    try:
        hash(other)
    except TypeError:
        return
    assert dump_builtin({other: 1}) is None


@pytest.mark.parametrize(
    "other",
    [*OTHERS, b""],
    ids=lambda other: type(other).__name__,
)
def test_archives_of_others_are_left_to_torch(other: Any) -> None:
    assert load_builtin(saved([other])) is None


def test_what_sharing_keeps_small_is_left_to_torch() -> None:
    assert dump_builtin(doubled(60)) is None
    assert load_builtin(saved(doubled(60))) is None


def test_bounds() -> None:
    assert load_builtin(dumped(nested(100))) == (nested(100),)
    assert load_builtin(dumped(doubled(10))) == (doubled(10),)
    assert load_builtin(dumped("x" * 1_000_000)) == ("x" * 1_000_000,)
    assert is_same(loaded(dumped([1.5] * 100_000)), [1.5] * 100_000)


def test_what_can_change_stays_one_object() -> None:
    """If C++ wrote or read a list that stands in two places, it would become two lists."""
    shared: list[int] = []
    entries: dict[str, Any] = {}
    cyclic: list[Any] = []
    cyclic.append(cyclic)
    many: list[Any] = []
    many += [many] * 1000
    within: dict[str, Any] = {}
    within["self"] = (within,)
    by_tuple = (shared,)
    for value in ([shared, shared], [entries, entries], (shared, {"a": shared}), cyclic, many, within):
        assert dump_builtin(value) is None
        assert load_builtin(saved(value)) is None
    assert dump_builtin([by_tuple, by_tuple]) is None
    assert load_builtin(saved([by_tuple, by_tuple])) is None


def test_what_cannot_change_may_stand_anywhere() -> None:
    betas, text = (0.9, math.nan), "text"
    value = [{"betas": betas, "text": text}, {"betas": betas, "text": text}, text, (), ()]
    for archive in (dumped(value), saved(value)):
        back = load_builtin(archive)
        assert back is not None
        assert is_same(back[0], value)
        assert is_same(loaded(archive), value)


def test_equal_keys() -> None:
    """If a pickle sets 1, then True, the first key stays and the last value counts, as in every unpickler."""
    archive = rewritten(dumped(None), data=b"\x80\x02}(K\x01X\x01\x00\x00\x00a\x88X\x01\x00\x00\x00bu.")
    assert is_same(loaded(archive), {1: "b"})
    back = load_builtin(archive)
    assert back is not None
    assert is_same(back[0], {1: "b"})


def rewritten(archive: bytes, data: bytes | None = None, **more: bytes) -> bytes:
    """Returns the archive with another pickle, or with more entries."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as source, zipfile.ZipFile(out, "w") as target:
        for name in source.namelist():
            is_pickle = name.endswith("/data.pkl") and data is not None
            target.writestr(name, data if is_pickle else source.read(name))  # type: ignore[arg-type]
        for name, content in more.items():
            target.writestr(f"archive/{name}", content)
    return out.getvalue()


def test_zipfile_reads_ours() -> None:
    with zipfile.ZipFile(io.BytesIO(dumped(PARAM_GROUP))) as archive:
        assert archive.testzip() is None
        assert archive.read("archive/byteorder") == b"little"
        assert archive.read("archive/version") == b"3\n"


@pytest.mark.parametrize(
    "archive",
    [b"", b"PK\3\4"[:3], b"no archive", saved(1, _use_new_zipfile_serialization=False), b"N." + saved(1)],
    ids=["empty", "cut", "text", "legacy", "legacy before a zip"],
)
def test_no_archive(archive: bytes) -> None:
    assert load_builtin(archive) is None


def test_damage() -> None:
    archive = bytearray(saved("what was written"))
    archive[archive.index(b"what")] ^= 1
    with pytest.raises(CorruptCheckpointError, match=r"CRC of data\.pkl"):
        load_builtin(archive)


# Objects that a BcpReader loads.


class RawSavePlanner(DefaultSavePlanner):
    """Stores bytes as they are."""

    def resolve_data(self, write_item: WriteItem) -> Any:
        value = self.state_dict[write_item.index.fqn]
        return io.BytesIO(value) if isinstance(value, bytes) else super().resolve_data(write_item)


class RawLoadPlanner(DefaultLoadPlanner):
    """Keeps bytes as they are."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = value.getvalue()


def record_of(path: Path) -> bytes:
    got: dict[str, Any] = {"value": None}
    dcp.load(got, storage_reader=BcpReader(path), planner=RawLoadPlanner())
    record = got["value"]
    assert isinstance(record, bytes)
    return record


def test_a_planner_gets_what_cpp_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner gets nothing else of the record, and nobody calls torch.load."""
    record = rewritten(saved({"lr": 0.5}), more=b"of whatever")
    dcp.save({"value": record}, storage_writer=BcpWriter(tmp_path), planner=RawSavePlanner())
    monkeypatch.setattr(rank_load, "load_plain_data", None)
    assert record_of(tmp_path) == dump_builtin({"lr": 0.5})


def test_a_planner_gets_other_records_as_they_are(tmp_path: Path) -> None:
    record = saved([torch.arange(3)])
    dcp.save({"value": record}, storage_writer=BcpWriter(tmp_path), planner=RawSavePlanner())
    assert record_of(tmp_path) == record


def test_a_damaged_record_of_stock_is_named(tmp_path: Path) -> None:
    dcp.save({"value": "what was written"}, storage_writer=dcp.FileSystemWriter(tmp_path))
    (file,) = tmp_path.glob("*.distcp")
    file.write_bytes(file.read_bytes().replace(b"what was", b"that was"))
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"value": ""}, storage_reader=BcpReader(tmp_path))
    ((error, *_),) = caught.value.failures.values()
    assert type(error) is CorruptCheckpointError
    assert str(error).startswith("'value': ")
