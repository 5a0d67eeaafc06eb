# SPDX-License-Identifier: Apache-2.0
"""Pickles that mean harm, wherever a checkpoint has pickles: nothing of them runs, whoever reads it.

As ``.metadata`` alone, as what stands before our manifest, and as objects. That they are dangerous Python itself says.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import re
import shutil
import struct
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.peak_memory import REFUSAL_BYTES, with_peak
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlanner, WriteItem

from bytecheckpoint import BcpLoadPlanner, BcpReader, BcpWriter, verify
from bytecheckpoint.errors import CheckpointError, CorruptCheckpointError, UnsafeObjectError, UnsupportedError
from faults.crafting import MetadataFile
from faults.payloads import EXHAUSTING, EXTENSIONS, HARMFUL, MALFORMED, all_payloads
from faults.small import CONFIG, load_small

NAMES = [*HARMFUL, *EXHAUSTING, *MALFORMED]
AUDITED = re.compile(r"exec|compile|import|open|os\.|subprocess\.|shutil\.|pickle\.|ctypes\.|socket\.")
# Where payloads have their names from. Errors are pickled, too, by DCP, but from modules of theirs.
SUSPECT = {"os", "posix", "builtins", "__builtin__", "shutil", "functools", "operator", "importlib", "evil_module"}
# `pickle: GLOBAL (0x63) at byte 2: ...`, or that the pickle has no end.
REFUSAL = re.compile(r"pickle: ([A-Z0-9_]+ \(0x..\)|byte 0x..) at byte (\d+)|pickle: ends at byte \d+")
# The metadata are read, and are none: what they are instead is said without an opcode.
WITHOUT_OPCODE = {
    "a key of a dict",
    "tuples, a million deep",
    "lists, a million deep",
    "a million memo entries",
    "a call, a million deep",
    "laughs of tuples",
    "laughs of lists",
    "laughs of tuples, all kept",
    "a long text, a hundred thousand times",
    "a list that holds itself",
    "a dict that holds itself",
    "an object that is its own state",
    "_StorageInfo of an evil module, called",
    "BUILD of a list",
    "nothing",
    "attributes twice",
    "names of the state dict twice",
}


def could_be_of_payload(event: str, args: tuple[Any, ...], below: Path) -> bool:
    if event == "open":  # by us below the checkpoint; by Python the sources that it quotes in the log of an exception
        return not str(args[0]).startswith(str(below)) and not str(args[0]).endswith(".py")
    if event == "compile":  # by `ast.parse`, of the lines quoted there
        return args[1] != "<unknown>"
    if event == "pickle.find_class":
        return args[0] in SUSPECT and not str(args[1]).endswith("Error")
    return True


class Audit:
    """What Python's audit events say; a hook cannot be taken away, so it listens only when told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, tuple[Any, ...]]] | None = None
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if self.events is not None and AUDITED.match(event):
            self.events.append((event, args))

    @contextmanager
    def nothing_happens(self, below: Path, mark: Path) -> Iterator[None]:
        self.events = []
        try:
            yield
        finally:
            events, self.events = self.events, None
        assert [event for event in events if could_be_of_payload(*event, below)] == []
        assert not mark.exists()
        assert "evil_module" not in sys.modules


@pytest.fixture(scope="module")
def audit() -> Audit:
    return Audit()


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "it ran"


@pytest.fixture
def payloads(mark: Path) -> Iterator[dict[str, bytes]]:
    """The codes of extensions have their meaning meanwhile."""
    for code, (module, name) in EXTENSIONS.items():
        copyreg.add_extension(module, name, code)
    yield all_payloads(mark)
    for code, (module, name) in EXTENSIONS.items():
        copyreg.remove_extension(module, name, code)


def test_they_are_dangerous(payloads: dict[str, bytes], mark: Path) -> None:
    """Python runs every one of them; this is what the rest of this file is about."""
    assert len(HARMFUL) >= 30
    assert len(NAMES) >= 90
    for name in HARMFUL:
        with suppress(Exception):  # what comes of the value is of no interest
            pickle.loads(payloads[name])
        assert mark.exists(), name
        mark.rmdir()


def test_bare_metadata(audit: Audit, payloads: dict[str, bytes], mark: Path, tmp_path: Path) -> None:
    """As stock DCP's would be. The refusal names the opcode and where it is."""
    path = tmp_path / "ckpt"
    path.mkdir()
    without_opcode = set()
    for name, payload in payloads.items():
        (path / ".metadata").write_bytes(payload)
        error, taken = with_peak(partial(refusal_of, audit, path, mark))
        assert taken < REFUSAL_BYTES, name
        found = REFUSAL.search(str(error))
        if found is None:
            without_opcode.add(name)
        elif found[2] is not None:
            assert int(found[2]) < len(payload), (name, error)
    assert without_opcode <= WITHOUT_OPCODE
    assert type(load_small(path)) is type(error)  # all the way through DCP


def refusal_of(audit: Audit, path: Path, mark: Path) -> CheckpointError:
    with (
        audit.nothing_happens(path, mark),
        pytest.raises((CorruptCheckpointError, UnsupportedError)) as caught,
    ):
        BcpReader(path, config=CONFIG).read_metadata()
    return caught.value


def test_behind_our_trailer(
    audit: Audit, payloads: dict[str, bytes], mark: Path, small_checkpoint: Path, tmp_path: Path
) -> None:
    """A load goes by the manifest and is right; verify says that the pickle, signed as it is, is another."""
    path = Path(shutil.copytree(small_checkpoint, tmp_path / "ckpt"))
    crafted = MetadataFile.read(path / ".metadata")
    assert load_small(path) is None
    assert verify(path, config=CONFIG).is_whole
    for name, payload in payloads.items():
        crafted.pickle = payload
        (path / ".metadata").write_bytes(crafted.to_bytes())
        with audit.nothing_happens(path, mark):
            report = verify(path, config=CONFIG)
        assert [(problem.file, problem.section) for problem in report.problems] == [(".metadata", "metadata")], name
    with audit.nothing_happens(path, mark):
        assert load_small(path) is None


def archive_of(payload: bytes) -> bytes:
    """What ``torch.save`` would have written, had it pickled so."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in (("data.pkl", payload), ("byteorder", b"little"), ("version", b"3\n")):
            archive.writestr(f"archive/{name}", content)
    return out.getvalue()


class Smuggler(DefaultSavePlanner):
    """Writes archives as they are."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        return io.BytesIO(object)


def load_object(path: Path, name: str, planner: LoadPlanner | None = None) -> BaseException | None:
    """What a load raises: our own refusal, or what a planner says that unpickles what torch let in."""
    state: dict[str, Any] = {name: None}
    planner = planner or DefaultLoadPlanner()
    try:
        dcp.load(state, storage_reader=BcpReader(path, config=CONFIG), planner=planner, no_dist=True)
    except CheckpointException as caught:
        (error,) = (wrapped[0] for wrapped in caught.failures.values())
        return error
    return None


def test_objects(audit: Audit, payloads: dict[str, bytes], mark: Path, tmp_path: Path) -> None:
    """Under torch's rules, which some of them pass: those are values then, and nothing ran."""
    path = tmp_path / "ckpt"
    # A million opcodes are torch's to walk, in Python.
    state = {name: archive_of(payload) for name, payload in payloads.items() if len(payload) < 10_000}
    dcp.save(
        {**state, "good": archive_of(b"\x80\x02K\7.")}, storage_writer=BcpWriter(path), planner=Smuggler(), no_dist=True
    )
    assert load_object(path, "good") is None
    load_object(path, next(iter(HARMFUL)))  # what torch imports for its message
    assert {*HARMFUL, *MALFORMED} <= {*state}
    for name in state:
        with audit.nothing_happens(path, mark):
            error = load_object(path, name)
        if name in HARMFUL:
            assert type(error) is UnsafeObjectError, (name, error)
            assert f"'{name}'" in str(error)
    assert verify(path, config=CONFIG).is_whole


def test_archives_that_inflate(tmp_path: Path) -> None:
    """Before torch inflates them. Honest compression is read."""
    path = tmp_path / "ckpt"
    archives = {}
    for name, payload in (("small", b"\x80\x02K\7."), ("bomb", b"\x80\x02" + b"N0" * (1 << 20) + b"K\7.")):
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
            for file, content in (("data.pkl", payload), ("byteorder", b"little"), ("version", b"3\n")):
                archive.writestr(f"archive/{file}", content)
        archives[name] = out.getvalue()
    dcp.save(archives, storage_writer=BcpWriter(path), planner=Smuggler(), no_dist=True)
    assert load_object(path, "small") is None
    error = load_object(path, "bomb")
    assert type(error) is CorruptCheckpointError
    assert "'bomb': an archive of" in str(error)
    assert "claims to hold 2,097,1" in str(error)


def old_file_of(payload: bytes) -> bytes:
    """What ``torch.save`` wrote before there were archives: five pickles, of which the fourth is the object."""
    out = io.BytesIO()
    torch.save(None, out, _use_new_zipfile_serialization=False)
    data = out.getvalue()
    assert data.count(b"\x80\x02N.") == 1
    return data.replace(b"\x80\x02N.", payload)


@pytest.mark.parametrize("file_of", [archive_of, old_file_of])
@pytest.mark.parametrize("planner", [DefaultLoadPlanner, BcpLoadPlanner])
def test_memo_entries_far_away(file_of: Callable[[bytes], bytes], planner: type[LoadPlanner], tmp_path: Path) -> None:
    """To torch's ``weights_only`` these are None; Python's unpickler would make an array of that many entries."""
    path = tmp_path / "ckpt"
    payloads = {str(entry): b"\x80\x02]Nr" + struct.pack("<I", entry) + b"a." for entry in (255, 256, 2**26, 2**32 - 1)}
    state = {name: file_of(payload) for name, payload in payloads.items()}
    dcp.save(state, storage_writer=BcpWriter(path), planner=Smuggler(), no_dist=True)
    assert load_object(path, "255", planner()) is None
    for name in list(payloads)[1:]:
        error = load_object(path, name, planner())
        assert type(error) is CorruptCheckpointError, (name, error)
        where = file_of(payloads[name]).index(payloads[name]) if file_of is old_file_of else 0
        assert (
            f"'{name}': pickle: LONG_BINPUT (0x72) at byte {where + 4}: memo entry {name} in 4 bytes of pickle"
            in str(error)
        )
