# SPDX-License-Identifier: Apache-2.0
"""Tests that values of standard types load without opting in: C++ unpickles them as Python's own unpickler does."""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import io
import pathlib
import pickle
import random
import types
import uuid
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadPlanner

from bytecheckpoint import BcpLoadPlanner, BcpReader, BcpWriter, Config
from bytecheckpoint._core import is_standard, load_standard
from bytecheckpoint.contents.safe_objects import plain_record

PROTOCOLS = (2, 3, 4, 5)

TIMEZONES = st.builds(
    datetime.timezone,
    st.timedeltas(datetime.timedelta(hours=-23), datetime.timedelta(hours=23)).filter(lambda delta: delta.days < 1),
)
NAMED_TIMEZONES = st.builds(datetime.timezone, st.just(datetime.timedelta(hours=2)), st.text(min_size=1))
ZONES = st.one_of(st.none(), TIMEZONES, NAMED_TIMEZONES, st.just(datetime.UTC))
BIG_INTS = st.one_of(st.integers(), st.integers(-(2**2000), 2**2000))
PATH_PARTS = st.lists(st.text("ab./ :\\", max_size=5), max_size=4)
NUMPY_DTYPES = st.sampled_from(
    ["?", "i1", "<i2", ">i4", "<i8", "u1", ">u8", "<f2", ">f4", "<f8", "<c8", "<c16", "g", "S3", "<U2", ">U2"]
)


@st.composite
def numpy_arrays(draw: Any) -> np.ndarray[Any, Any]:
    dtype = np.dtype(draw(NUMPY_DTYPES))
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    array = rng.integers(0, 2 if dtype.kind == "b" else 100, size=shape).astype(dtype)
    return array.T if draw(st.booleans()) else array[:: draw(st.sampled_from([1, 2]))] if shape else array


HASHABLE = st.one_of(
    st.none(),
    st.booleans(),
    BIG_INTS,
    st.floats(allow_nan=False),
    st.text(),
    st.binary(),
    st.complex_numbers(allow_nan=False),
    st.builds(range, st.integers(-9, 9), st.integers(-(2**70), 2**70), st.integers(1, 9)),
    st.dates(),
    st.datetimes(timezones=ZONES),
    st.times(timezones=ZONES),
    st.timedeltas(),
    TIMEZONES,
    st.decimals(allow_nan=False),
    st.fractions(),
    st.uuids(),
    PATH_PARTS.map(lambda parts: pathlib.PurePosixPath(*parts)),
    PATH_PARTS.map(lambda parts: pathlib.PureWindowsPath(*parts)),
    PATH_PARTS.map(lambda parts: Path(*parts)),
    st.lists(st.integers(0, 9)).map(torch.Size),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool]),
    st.sampled_from([torch.device("cpu"), torch.device("cuda:1"), torch.device("meta")]),
    st.sampled_from(
        [np.float32(1.5), np.int64(-1), np.bool_(True), np.str_("a\u20ac"), np.bytes_(b"a\0b"), np.uint8(7)]
    ),
)
KEYS = st.recursive(
    HASHABLE,
    lambda inner: st.one_of(st.lists(inner, max_size=3).map(tuple), st.frozensets(inner, max_size=3)),
    max_leaves=4,
)
LEAVES = st.one_of(
    HASHABLE,
    st.floats(),
    st.binary().map(bytearray),
    st.tuples(st.binary(), st.integers(0, 30)).map(lambda given: buffer_at(*given)),
    st.decimals(),
    numpy_arrays(),
    NUMPY_DTYPES.map(np.dtype),
    st.sets(KEYS, max_size=4),
    st.dictionaries(KEYS, st.integers(), max_size=4).map(collections.Counter),
)
FACTORIES = st.sampled_from([None, int, float, str, list, dict, set, tuple, bytes, bytearray, collections.OrderedDict])
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
        st.dictionaries(KEYS, inner, max_size=4).map(collections.OrderedDict),
        st.builds(collections.defaultdict, FACTORIES, st.dictionaries(KEYS, inner, max_size=4)),
        st.builds(collections.deque, st.lists(inner, max_size=4), st.one_of(st.none(), st.integers(0, 5))),
        st.dictionaries(st.text(), inner, max_size=4).map(lambda given: types.SimpleNamespace(**given)),
        st.builds(slice, inner, inner, inner),
        st.lists(inner, min_size=1, max_size=2).map(lambda values: [values, *values, values]),
    ),
    max_leaves=12,
)


def buffer_at(content: bytes, position: int) -> io.BytesIO:
    buffer = io.BytesIO(content)
    buffer.seek(position)
    return buffer


def saved(value: Any, protocol: int = 2) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_protocol=protocol)
    return buffer.getvalue()


def archive_of(payload: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in (("data.pkl", payload), ("byteorder", b"little"), ("version", b"3\n")):
            archive.writestr(f"archive/{name}", content)
    return out.getvalue()


class Shown:
    """Turns a value into one to compare: types, order and bits count, and which parts of it are one object."""

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {}
        self.kept: list[Any] = []

    def __call__(self, value: Any) -> Any:
        kind = type(value)
        if isinstance(value, list | dict | set | collections.deque | types.SimpleNamespace | io.BytesIO | bytearray):
            self.kept.append(value)
            number = self.numbers.setdefault(id(value), len(self.numbers))
            if number != len(self.numbers) - 1:
                return kind, number
        return kind, self.content(value)

    def content(self, value: Any) -> Any:
        if isinstance(value, dict):
            entries = [(self(key), self(content)) for key, content in value.items()]
            return getattr(value, "default_factory", None), entries
        if isinstance(value, collections.deque):
            return value.maxlen, [self(item) for item in value]
        if isinstance(value, list | tuple):
            return [self(item) for item in value]
        if isinstance(value, set | frozenset):
            return sorted(repr(Shown()(item)) for item in value)
        if isinstance(value, types.SimpleNamespace):
            return self(vars(value))
        if isinstance(value, slice):
            return [self(value.start), self(value.stop), self(value.step)]
        if isinstance(value, io.BytesIO):
            return value.getvalue(), value.tell()
        if isinstance(value, np.ndarray):
            return value.dtype.str, value.shape, value.strides, value.flags.writeable, value.tobytes()
        if isinstance(value, datetime.datetime | datetime.time):
            return repr(value), value.fold
        if isinstance(value, uuid.UUID):
            return repr(value), value.is_safe
        return repr(value)


def loaded(value: Any, protocol: int) -> Any:
    archive = saved(value, protocol)
    assert is_standard(archive)
    back = load_standard(archive)
    assert back is not None
    return back[0]


@settings(max_examples=300, deadline=None)
@given(VALUES, st.sampled_from(PROTOCOLS))
def test_as_pythons_own_unpickler(value: Any, protocol: int) -> None:
    theirs = pickle.loads(pickle.dumps(value, protocol))
    assert Shown()(loaded(value, protocol)) == Shown()(theirs)


@settings(max_examples=200, deadline=None)
@given(VALUES, st.sampled_from(PROTOCOLS))
def test_what_is_written_anew_is_the_same(value: Any, protocol: int) -> None:
    """Records are written anew for planners that unpickle themselves."""
    value = [{1}, value]  # no builtin value
    record = plain_record("value", bytearray(saved(value, protocol)), Config())
    again = torch.load(io.BytesIO(record), weights_only=False)
    # Pickled a second time, with the protocol that keeps all: PureWindowsPath("//a://") becomes another path then.
    assert Shown()(again) == Shown()(pickle.loads(pickle.dumps(loaded(value, protocol), 5)))


def test_cycles_and_shared_values_stay_one_object() -> None:
    cyclic: dict[str, Any] = {"queue": collections.deque(maxlen=3), "space": types.SimpleNamespace()}
    cyclic["queue"].append(cyclic)
    cyclic["space"].queue = cyclic["queue"]
    for protocol in PROTOCOLS:
        back = loaded(cyclic, protocol)
        assert back["queue"][0] is back
        assert back["space"].queue is back["queue"]


def test_states_of_random_generators() -> None:
    generator = np.random.Generator(np.random.Philox(3))
    numpys = np.random.RandomState(4)
    pythons = random.Random(5)
    state = [pythons.getstate(), numpys.get_state(), generator.bit_generator.state, np.random.PCG64(6).state]
    back = loaded(state, 2)
    pythons_again, numpys_again, generator_again = random.Random(), np.random.RandomState(), np.random.Philox()
    pythons_again.setstate(back[0])
    numpys_again.set_state(back[1])
    generator_again.state = back[2]
    assert pythons_again.random() == pythons.random()
    assert numpys_again.random() == numpys.random()
    assert np.random.Generator(generator_again).random() == generator.random()
    assert back[3] == state[3]


class Deque(collections.deque):  # type: ignore[type-arg]
    pass


class Space(types.SimpleNamespace):
    pass


def missing() -> int:
    return 1


REFUSED = [
    Deque([1]),
    Space(a=1),
    collections.defaultdict(missing),
    np.array([object()]),
    np.zeros(2, dtype=[("a", "f4")]),
    np.array(["2020-01-01"], dtype="M8[D]"),
    np.random.RandomState(1),
    len,
    int,
    missing,
    Exception("x"),
    datetime.datetime(
        2020, 1, 1, tzinfo=type("Zone", (datetime.tzinfo,), {"__reduce__": lambda self: (missing, ())})()
    ),
]


@pytest.mark.parametrize("value", REFUSED, ids=lambda value: type(value).__name__)
def test_other_types_stay_refused(value: Any) -> None:
    for around in (value, [value], {"a": (1, value)}, types.SimpleNamespace(a=value)):
        assert load_standard(saved(around)) is None
        assert not is_standard(saved(around))


@pytest.mark.parametrize(
    "payload",
    [
        b"cdatetime\ndate\nC\4\x07\xe4\x0d\x01\x85R",  # month 13
        b"cdatetime\ndatetime\nC\x0a\x07\xe4\x01\xff\0\0\0\0\0\0\x85R",  # day 255, which Python's unpickler takes
        b"cdatetime\ndate\nC\1\x07\x85R",
        b"cdecimal\nDecimal\nX\1\0\0\0x\x85R",
        b"cfractions\nFraction\nK\1K\0\x86R",
        b"ctorch\ndevice\nX\4\0\0\0none\x85R",
        b"cuuid\nUUID\n)\x81}X\3\0\0\0intJ\xff\xff\xff\xffsb",
        b"}\x8fNs",  # a set as a key
        b"ctypes\nSimpleNamespace\n)R}X\1\0\0\0aX\3\0\0\0\xed\xa0\x80sb",
        b"cpathlib\nWindowsPath\n)R",
        b"ccollections\ndeque\n)J\xff\xff\xff\xff\x86R",
    ],
    ids=range(11),
)
def test_arguments_that_a_constructor_refuses(payload: bytes) -> None:
    assert load_standard(archive_of(b"\x80\x04" + payload + b".")) is None


def test_attributes_of_a_namespace_are_no_more_than_that() -> None:
    payload = b"\x80\x04ctypes\nSimpleNamespace\n)R}X\x09\0\0\0__class__K\1sb."
    back = load_standard(archive_of(payload))
    assert back is not None
    assert vars(back[0]) == {"__class__": 1}


EXAMPLES: dict[str, Any] = {
    "losses": buffer_at(b"bytes", 2),
    "sets": ({1, 2}, frozenset("ab"), bytearray(b"x")),
    "times": (datetime.datetime(2024, 2, 29, tzinfo=datetime.UTC), datetime.timedelta(1)),
    "numbers": (decimal.Decimal("1.50"), fractions.Fraction(1, 3), 1j, uuid.UUID(int=7), 2**100),
    "queue": collections.deque([1, 2], maxlen=2),
    "dicts": types.SimpleNamespace(a=collections.Counter("aab"), b=collections.OrderedDict(b=1, a=2)),
    "factory": types.SimpleNamespace(a=collections.defaultdict(list, a=[1])),
    "array": np.arange(6, dtype="i4").reshape(2, 3).T,
    "large": np.arange(1 << 19),
    "space": types.SimpleNamespace(path=Path("/a/b"), device=torch.device("cpu"), dtype=torch.float32),
}


@pytest.mark.parametrize("planner", [DefaultLoadPlanner, BcpLoadPlanner])
@pytest.mark.parametrize("writer", [dcp.FileSystemWriter, BcpWriter])
def test_through_dcp(tmp_path: Path, writer: Any, planner: type[LoadPlanner]) -> None:
    """Planners that unpickle, and our planner, load what stock DCP wrote and what we wrote."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "bytecheckpoint")
        dcp.save(EXAMPLES, storage_writer=writer(tmp_path))
    got: dict[str, Any] = dict.fromkeys(EXAMPLES)
    dcp.load(got, storage_reader=BcpReader(tmp_path), planner=planner())
    assert Shown()(got) == Shown()(EXAMPLES)


def test_a_whole_dict_as_one_object(tmp_path: Path) -> None:
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.save({"all": EXAMPLES}, storage_writer=BcpWriter(tmp_path), planner=planner)
    got: dict[str, Any] = {"all": None}
    dcp.load(
        got,
        storage_reader=BcpReader(tmp_path),
        planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
    )
    assert Shown()(got["all"]) == Shown()(EXAMPLES)
