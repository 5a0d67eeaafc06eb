# SPDX-License-Identifier: Apache-2.0
"""Tests the pickle reader against Python's own: both read the same values, and a refusal names the byte.

Python reads only what our reader has read. Its ``find_class`` imports nothing: it makes a class that records how it is
called, and remembers the name that it was asked for.
"""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import random
import re
import struct
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.goldens import GOLDEN as GOLDENS

from bytecheckpoint._testing import read_pickle
from bytecheckpoint.errors import CheckpointError, CorruptCheckpointError, UnsupportedError

TESTS = Path(__file__).parents[1]
sys.path.append(str(TESTS))

from fuzz.corpus import CORPUS, inputs_of  # noqa: E402

SEED = int(os.environ.get("BCP_SEED", "20240613"))
LONG_ROUNDS = int(os.environ.get("BCP_ROUNDS", "1000000"))
PROTOCOLS = (2, 3, 4, 5)
REFUSAL = re.compile(r"pickle: (?:ends at|(?:byte 0x)?(?P<name>\S+)(?: \(0x(?P<code>..)\))? at) byte (?P<at>\d+)")

SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(), st.text(), st.binary())
KEYS = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=3)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.lists(inner, max_size=5).map(tuple),
        st.dictionaries(KEYS, inner, max_size=5),
        st.lists(inner, max_size=2).map(lambda values: [values, values]),
    ),
    max_leaves=30,
)


class Made:
    """Stands for what a pickle makes with a class or function. It is never the real object."""

    def __init__(self, kind: str, *parts: Any) -> None:
        self.kind = kind
        self.parts = parts
        self.states: list[Any] = []

    def __setstate__(self, state: Any) -> None:
        self.states.append(state)


class Recorded(type):
    """A class that takes any arguments. Pickle tells a call from ``__new__``, so the two give different results."""

    def __call__(cls, *args: Any) -> Made:
        return Made("call", cls, args)


@cache
def named(module: str, name: str) -> type:
    return Recorded(name, (), {"__new__": lambda cls, *args: Made("object", cls, args), "module": module, "name": name})


class Recorder(pickle.Unpickler):
    """Python's unpickler, which imports nothing."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.globals: list[tuple[str, str]] = []

    def find_class(self, module: str, name: str) -> Any:
        self.globals.append((module, name))
        return named(module, name)

    def persistent_load(self, pid: Any) -> Any:
        return Made("persistent", pid)


def make(kind: str, *parts: Any) -> Any:
    """Makes the same objects as ``Recorder`` from what our reader reports."""
    if kind == "global":
        return named(*parts)
    if kind == "persistent":
        return Made(kind, *parts)
    callee, args, has_state, state = parts
    made = Made(kind, callee, args)
    if has_state:
        made.states.append(state)
    return made


def tree_of(value: Any) -> Any:
    """Returns a value to compare, in which types, bits of floats and the order of dicts count."""
    if isinstance(value, Recorded):
        return "global", value.module, value.name  # type: ignore[attr-defined]
    if isinstance(value, Made):
        return value.kind, tree_of(value.parts), tree_of(value.states)
    if isinstance(value, dict):
        return "dict", [(tree_of(key), tree_of(content)) for key, content in value.items()]
    if isinstance(value, list | tuple):
        return type(value).__name__, [tree_of(child) for child in value]
    return type(value).__name__, struct.pack("<d", value) if isinstance(value, float) else value


def check(data: bytes) -> str:
    """Reads one pickle with both readers, and returns what became of it. Fails if the two disagree."""
    try:
        value, _, names = read_pickle(data, make)
    except (CorruptCheckpointError, UnsupportedError) as error:
        return check_refusal(data, error)
    except TypeError:  # a key is a tuple with a list in it, which no dict can hold
        with pytest.raises(TypeError, match="unhashable"):
            Recorder(data).load()
        return "cannot be hashed"
    except RecursionError:  # a list that holds itself, or is too deep to be shown; the reader itself has no recursion
        return "too deep to compare"
    python = Recorder(data)
    theirs = python.load()
    assert python.globals == names
    assert tree_of(theirs) == tree_of(value)
    return "the same"


def check_refusal(data: bytes, error: CheckpointError) -> str:
    """Asserts that ``error`` names an opcode and a byte, and that this opcode is at that byte."""
    if "than a pickle of this size may hold" in str(error):
        return "too much to compare"
    found = REFUSAL.match(str(error))
    assert found is not None, error
    at = int(found["at"])
    if found["name"] is None:
        assert at == len(data)
        return "no end"
    opcode = pickletools.code2op.get(chr(data[at]))
    if opcode is None:
        assert int(found["name"], 16) == data[at]
    else:
        assert (found["name"], int(found["code"], 16)) == (opcode.name, data[at])
    return "refused"


@settings(max_examples=60, deadline=None)
@given(VALUES, st.sampled_from(PROTOCOLS))
def test_plain_values(value: Any, protocol: int) -> None:
    assert check(pickle.dumps(value, protocol)) == "the same"


def metadata_pickles() -> list[bytes]:
    """Returns metadata of DCP, of all versions with golden files, and ours, whose first part is the pickle."""
    files = [*TESTS.joinpath("cpp/data").glob("*.metadata"), *GOLDENS.rglob("*.metadata")]
    return [file.read_bytes() for file in sorted(files)]


def test_metadata_of_dcp() -> None:
    pickles = metadata_pickles()
    assert len(pickles) > 30
    assert Counter(map(check, pickles)) == {"the same": len(pickles)}


def corpus(target: str) -> list[bytes]:
    return [*inputs_of((CORPUS / f"{target}.corpus").read_bytes())]


def test_corpora_of_the_fuzzers() -> None:
    seen = Counter(
        check(data) for target in ("pickle_reader", "pickle_tree", "foreign_metadata") for data in corpus(target)
    )
    assert seen["the same"] > 50
    assert seen["refused"] > 50


def without_frame(data: bytes) -> bytes:
    """Removes the frame at the start of ``data``, into which a pickler puts nearly all."""
    return data[:2] + data[11:] if data[2:3] == pickle.FRAME else data


class Mutator:
    """Changes pickles as ``tests/cpp/mutate.h`` does, and leaves the protocol and the end alone."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        known = [*corpus("pickle_reader"), *corpus("pickle_tree")]
        plain = [pickle.dumps(self.plain(3), protocol) for protocol in PROTOCOLS for _ in range(20)]
        # Whole pickles, without frames: a changed one is then not refused only because its length is wrong.
        small = [without_frame(data) for data in (*known, *plain) if len(data) < 1000]
        self.seeds = [data for data in small if check(data) == "the same"]
        self.tokens = [opcode.code.encode("latin1") for opcode in pickletools.opcodes]

    def plain(self, depth: int) -> Any:
        leaves = [None, True, 7, -300, 2**40, 1.5, "text", b"bytes", (), []]
        if depth == 0:
            return self.rng.choice(leaves)
        children = [self.plain(depth - 1) for _ in range(self.rng.randrange(4))]
        kinds = (list, tuple, lambda values: dict(enumerate(values)), lambda values: [values, values])
        return self.rng.choice(kinds)(children)

    def __call__(self) -> bytes:
        data = bytearray(self.rng.choice(self.seeds))
        for _ in range(self.rng.randrange(1, 3)):
            at = self.rng.randrange(min(2, len(data) - 1), len(data))
            length = self.rng.randrange(5)
            kind = self.rng.randrange(6)
            if kind == 0:
                data[at] ^= 1 << self.rng.randrange(8)
            elif kind == 1:
                data[at:at] = self.rng.choice(self.tokens)
            elif kind == 2:
                data[at : at + 1] = self.rng.choice(self.tokens)
            elif kind == 3 and len(data) > length + 1:
                del data[at : at + length]
            elif kind == 4:
                other = self.rng.choice(self.seeds)
                begin = self.rng.randrange(len(other))
                data[at:at] = other[begin : begin + self.rng.randrange(32)]
            else:
                data[at : at + 1] = bytes([self.rng.randrange(256)])
            if not data:
                break
        return bytes(data) + (b"." if self.rng.random() < 0.3 else b"")


def test_changed_pickles() -> None:
    mutate = Mutator(SEED)
    seen = Counter(check(mutate()) for _ in range(2000))
    assert seen["the same"] > 100, seen
    assert seen["refused"] > 200, seen


@pytest.mark.long
def test_many_changed_pickles() -> None:
    """Checks BCP_ROUNDS pickles, which depend on BCP_SEED."""
    mutate = Mutator(SEED + 1)
    seen = Counter(check(mutate()) for _ in range(LONG_ROUNDS))
    print(f"seed {SEED}, {LONG_ROUNDS} pickles: {dict(seen)}")
    assert seen["the same"] > LONG_ROUNDS // 20
