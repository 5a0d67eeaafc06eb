# SPDX-License-Identifier: Apache-2.0
"""Tests malicious pickles wherever a checkpoint has pickles: nothing in them runs, whoever reads the checkpoint.

They stand for a whole ``.metadata``, for the pickle before our manifest, and for objects. A first test shows that
Python itself would run them.
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
# The modules that payloads import from. DCP also pickles errors, but those are from modules of their own.
SUSPECT = {"os", "posix", "builtins", "__builtin__", "shutil", "functools", "operator", "importlib", "evil_module"}
# `pickle: GLOBAL (0x63) at byte 2: ...`, or that the pickle has no end.
REFUSAL = re.compile(r"pickle: ([A-Z0-9_]+ \(0x..\)|byte 0x..) at byte (\d+)|pickle: ends at byte \d+")
# The reader walks these pickles to the end and finds no metadata. Its error says what it found, without an opcode.
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
    if event == "open":  # we open files of the checkpoint, and Python the sources that it quotes with an exception
        return not str(args[0]).startswith(str(below)) and not str(args[0]).endswith(".py")
    if event == "compile":  # `ast.parse` compiles the lines quoted there
        return args[1] != "<unknown>"
    if event == "pickle.find_class":
        return args[0] in SUSPECT and not str(args[1]).endswith("Error")
    return True


class Audit:
    """Records Python's audit events. A hook cannot be removed, so this one records only inside a context."""

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
    BcpReader("nowhere")  # the first one of a process looks up which torch is installed
    return Audit()


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "it ran"


@pytest.fixture
def payloads(mark: Path) -> Iterator[dict[str, bytes]]:
    """Yields all payloads. Meanwhile the extension codes are registered."""
    for code, (module, name) in EXTENSIONS.items():
        copyreg.add_extension(module, name, code)
    yield all_payloads(mark)
    for code, (module, name) in EXTENSIONS.items():
        copyreg.remove_extension(module, name, code)


def test_they_are_dangerous(payloads: dict[str, bytes], mark: Path) -> None:
    """Python's unpickler runs every one of them, so the tests below have something to show."""
    assert len(HARMFUL) >= 30
    assert len(NAMES) >= 90
    for name in HARMFUL:
        with suppress(Exception):  # only what ran matters, not whether the value is usable
            pickle.loads(payloads[name])
        assert mark.exists(), name
        mark.rmdir()


def test_bare_metadata(audit: Audit, payloads: dict[str, bytes], mark: Path, tmp_path: Path) -> None:
    """The payload is all of ``.metadata``, as stock DCP's pickle is. The error names the opcode and its position."""
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
    """A load uses the manifest and is right. verify reports that the pickle differs, although its checksum is right."""
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
    """Returns the archive that ``torch.save`` would have written for this pickle."""
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
    """Loads one object. Returns None, our refusal, or what a planner raises that unpickles what torch let in."""
    state: dict[str, Any] = {name: None}
    planner = planner or DefaultLoadPlanner()
    try:
        dcp.load(state, storage_reader=BcpReader(path, config=CONFIG), planner=planner, no_dist=True)
    except CheckpointException as caught:
        (error,) = (wrapped[0] for wrapped in caught.failures.values())
        return error
    return None


def test_objects(audit: Audit, payloads: dict[str, bytes], mark: Path, tmp_path: Path) -> None:
    """Objects are loaded under torch's rules. Payloads that pass these rules give values, and nothing runs."""
    path = tmp_path / "ckpt"
    # torch walks opcodes in Python, so pickles of a million opcodes are left out.
    state = {name: archive_of(payload) for name, payload in payloads.items() if len(payload) < 10_000}
    dcp.save(
        {**state, "good": archive_of(b"\x80\x02K\7.")}, storage_writer=BcpWriter(path), planner=Smuggler(), no_dist=True
    )
    assert load_object(path, "good") is None
    load_object(path, next(iter(HARMFUL)))  # torch now imports what it needs for its message
    assert {*HARMFUL, *MALFORMED} <= {*state}
    for name in state:
        with audit.nothing_happens(path, mark):
            error = load_object(path, name)
        if name in HARMFUL:
            assert type(error) is UnsafeObjectError, (name, error)
            assert f"'{name}'" in str(error)
    assert verify(path, config=CONFIG).is_whole


def test_archives_that_inflate(tmp_path: Path) -> None:
    """A load refuses a bomb before torch inflates it. An archive with honest compression loads."""
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
    """Returns what ``torch.save`` wrote before it had archives: five pickles, the fourth of which is the object."""
    out = io.BytesIO()
    torch.save(None, out, _use_new_zipfile_serialization=False)
    data = out.getvalue()
    assert data.count(b"\x80\x02N.") == 1
    return data.replace(b"\x80\x02N.", payload)


@pytest.mark.parametrize("file_of", [archive_of, old_file_of])
@pytest.mark.parametrize("planner", [DefaultLoadPlanner, BcpLoadPlanner])
def test_memo_entries_far_away(file_of: Callable[[bytes], bytes], planner: type[LoadPlanner], tmp_path: Path) -> None:
    """torch's ``weights_only`` loads these as None; Python's unpickler would make an array of that many entries."""
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
