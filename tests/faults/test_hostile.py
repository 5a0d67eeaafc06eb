# SPDX-License-Identifier: Apache-2.0
"""Tests malicious checkpoints in our format: a load refuses them, opens no file outside the directory, runs no code.

The checksums are right wherever that makes the attack harder to see. ``tests/interop/test_foreign.py`` tests names and
code in checkpoints of stock DCP, ``tests/unit/test_objects.py`` code in objects, ``test_damage.py`` files of other
saves, FIFOs and directories in place of files, and ``test_every_byte.py`` files cut at every length.
"""

from __future__ import annotations

import os
import pickle
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.fork_server import ForkServer, Meeting
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from bytecheckpoint import BcpReader, BcpWriter, verify
from bytecheckpoint.errors import CheckpointError, CorruptCheckpointError, UnsafeObjectError, UnsupportedError
from faults.crafting import (
    CHECKPOINT_ID,
    DATA_TRAILER,
    ITEMS,
    META_TRAILER,
    STRINGS,
    MetadataFile,
    resigned_trailer,
)
from faults.lies import tell_lies
from faults.small import CONFIG, load_small, load_when_told
from faults.strace import calls_in, traced


class Harmful:
    """Makes a directory when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


@pytest.fixture
def path(small_checkpoint: Path, tmp_path: Path) -> Path:
    """Returns a copy of the small checkpoint."""
    return Path(shutil.copytree(small_checkpoint, tmp_path / "ckpt"))


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """Returns a directory beside the checkpoint, which nobody should open."""
    outside = tmp_path / "outside"
    outside.mkdir()
    return outside


def load_watched(server: ForkServer, meeting: Meeting, path: Path, outside: Path, log: Path) -> CheckpointError | None:
    """Loads in a watched process, which must make no call about ``outside``. Returns what the load raises, or None."""
    pid = server.start(load_when_told, meeting.address, path)
    process = meeting.accept()
    assert meeting.receive(process) == "ready"
    with traced(pid, log, "-e", "trace=%file", all_threads=True):
        process.send("go")
        error: CheckpointError | None = server.wait(pid).unwrap()
    assert any(call.files for call in calls_in(log, path, pid)), "it did not look at the checkpoint"
    assert [call for call in calls_in(log, outside, pid) if call.files] == []
    return error


# Names in our metadata.


@pytest.mark.parametrize(
    "name",
    [
        "../outside/{file}",
        "{outside}/{file}",
        "below/../../outside/{file}",
        "./{file}",
        "link",
        "{file}\0",
        "",
        ".",
        ".metadata",
        "{other}",
    ],
)
def test_file_names_in_the_manifest(
    name: str, path: Path, outside: Path, server: ForkServer, meeting: Meeting, tmp_path: Path
) -> None:
    """A whole file is there under that name, so it would load. But the name must follow from the id beside it."""
    crafted = MetadataFile.read(path / ".metadata")
    file, other = crafted.file_names()
    shutil.copy(path / file, outside / file)
    (path / "below").mkdir()
    (path / "link").symlink_to(outside / file)
    crafted.rename_file(0, name.format(file=file, other=other, outside=outside))
    (path / ".metadata").write_bytes(crafted.to_bytes())
    error = load_watched(server, meeting, path, outside, tmp_path / "strace.log")
    assert type(error) is CorruptCheckpointError
    assert error.path == str(path / ".metadata")
    assert "the name does not match its id" in str(error)
    (problem,) = verify(path, config=CONFIG).problems
    assert (problem.file, problem.section) == (".metadata", "metadata")
    assert "the name does not match its id" in problem.message


def test_checkpoint_id_is_only_told(
    path: Path, outside: Path, server: ForkServer, meeting: Meeting, tmp_path: Path
) -> None:
    """The id says where the checkpoint was written. A load reads from where the caller points."""
    crafted = MetadataFile.read(path / ".metadata")
    crafted.sections[CHECKPOINT_ID] = bytearray(str(outside).encode())
    (path / ".metadata").write_bytes(crafted.to_bytes())
    assert load_watched(server, meeting, path, outside, tmp_path / "strace.log") is None
    assert verify(path, config=CONFIG).is_whole


def test_names_in_our_pickle_are_not_followed(
    path: Path, outside: Path, server: ForkServer, meeting: Meeting, tmp_path: Path
) -> None:
    """Stock DCP would follow them. Our load uses the manifest, and verify sees that the two differ."""
    crafted = MetadataFile.read(path / ".metadata")
    metadata = pickle.loads(crafted.pickle)
    for index, place in metadata.storage_data.items():
        shutil.copy(path / place.relative_path, outside)
        metadata.storage_data[index] = replace(place, relative_path=f"../outside/{place.relative_path}")
    crafted.pickle = pickle.dumps(metadata)
    (path / ".metadata").write_bytes(crafted.to_bytes())
    assert load_watched(server, meeting, path, outside, tmp_path / "strace.log") is None
    (problem,) = verify(path, config=CONFIG).problems
    assert (problem.file, problem.section) == (".metadata", "metadata")


# Trailers cut away.


def test_bare_pickle_is_no_way_round_the_checks(path: Path) -> None:
    """The pickle alone looks like stock DCP's. With ``accept_rewritten_metadata`` a load still checks the blocks."""
    whole = MetadataFile.read(path / ".metadata")
    (path / ".metadata").write_bytes(whole.pickle)
    rewritten = replace(CONFIG, accept_rewritten_metadata=True)
    error = load_small(path)
    assert type(error) is CorruptCheckpointError
    assert "the trailer is missing" in str(error)
    assert load_small(path, rewritten) is None
    for name in whole.file_names():
        content = (path / name).read_bytes()
        damaged = bytearray(content)
        damaged[-DATA_TRAILER - 1000] ^= 1
        for bad in (bytes(damaged), content[:-DATA_TRAILER], content[:-1], content + b"\0"):
            (path / name).write_bytes(bad)
            error = load_small(path, rewritten)
            assert type(error) is CorruptCheckpointError
            assert error.path == str(path / name)
        (path / name).write_bytes(content)


def test_data_file_without_its_trailer(path: Path) -> None:
    """A load refuses it even if the manifest, with right checksums, expects that length."""
    crafted = MetadataFile.read(path / ".metadata")
    name = crafted.file_names()[0]
    file = path / name
    file.write_bytes(file.read_bytes()[:-DATA_TRAILER])
    crafted.vouch_for(0, file.read_bytes())
    (path / ".metadata").write_bytes(crafted.to_bytes())
    error = load_small(path)
    assert type(error) is CorruptCheckpointError
    assert error.path == str(file)
    assert "trailer: missing" in str(error)
    (problem,) = verify(path, config=CONFIG).problems
    assert (problem.file, problem.section) == (name, "block table or trailer")


@pytest.mark.parametrize("position", [0, 16, 20], ids=["id", "rank", "number"])
def test_trailer_of_another_file(position: int, path: Path) -> None:
    """Its checksum is right and the manifest expects it, but the two disagree about which file it is."""
    crafted = MetadataFile.read(path / ".metadata")
    file = path / crafted.file_names()[0]
    content = bytearray(file.read_bytes())
    content[len(content) - DATA_TRAILER + position] ^= 1
    file.write_bytes(resigned_trailer(bytes(content)))
    crafted.vouch_for(0, file.read_bytes())
    (path / ".metadata").write_bytes(crafted.to_bytes())
    error = load_small(path)
    assert type(error) is CorruptCheckpointError
    assert error.path == str(file)
    assert "the metadata name file" in str(error)


# Numbers and names that lie.


def test_numbers_that_lie(small_checkpoint: Path, server: ForkServer, tmp_path: Path) -> None:
    """Sets every number of the manifest and of the data files' trailers to extremes, under right checksums.

    No value may cause a crash, an allocation of gigabytes or an exception of another kind. verify must not report a
    checkpoint as whole if it gives wrong values or does not load.
    """
    pids = [server.start(tell_lies, small_checkpoint, tmp_path / str(part), part, 2) for part in range(2)]
    results = [server.wait(pid, 280).unwrap() for pid in pids]
    assert [fault for _, faults in results for fault in faults] == []
    assert all(outcomes["refused", "damaged"] > 1000 for outcomes, _ in results)


@pytest.mark.parametrize("section", [STRINGS, CHECKPOINT_ID], ids=["names", "checkpoint id"])
def test_text_that_is_not_utf8(section: int, path: Path) -> None:
    crafted = MetadataFile.read(path / ".metadata")
    crafted.sections[section][-1] = 0xFF
    (path / ".metadata").write_bytes(crafted.to_bytes())
    (problem,) = verify(path, config=CONFIG).problems
    assert (problem.file, problem.section) == (".metadata", "metadata")
    assert type(load_small(path)) is CorruptCheckpointError


def test_positions_that_are_taken_twice(path: Path) -> None:
    crafted = MetadataFile.read(path / ".metadata")
    struct.pack_into("<I", crafted.sections[ITEMS], 20, 1)
    (path / ".metadata").write_bytes(crafted.to_bytes())
    assert len(verify(path, config=CONFIG).problems) == 1
    error = load_small(path)
    assert type(error) is CorruptCheckpointError
    assert error.path == str(path / ".metadata")


# Code.


CODE: dict[str, Callable[[bytes, bytes], bytes]] = {
    "alone": lambda ours, evil: evil,
    "before ours": lambda ours, evil: evil + ours,
    "behind ours": lambda ours, evil: ours + evil,
    "for our trailer": lambda ours, evil: ours[:-META_TRAILER] + evil,
    "over our pickle": lambda ours, evil: evil + ours[len(evil) :],
}
# Changes of the pickle, after which all checksums are made right again.
SIGNED_CODE: dict[str, Callable[[bytes, bytes], bytes]] = {
    "alone": lambda ours, evil: evil,
    "before ours": lambda ours, evil: evil + ours,
    "behind ours": lambda ours, evil: ours + evil,
}


def evil_pickles(mark: Path) -> list[bytes]:
    """Returns pickles that make ``mark`` when they are unpickled. Half of them are metadata for stock DCP."""
    metadata = Metadata(state_dict_metadata={}, planner_data={"a": Harmful(mark)}, storage_data={})
    return [pickle.dumps(value, protocol) for value in (Harmful(mark), metadata) for protocol in (2, 4)]


def assert_harmless(path: Path, mark: Path) -> None:
    """Fails if a load or ``verify`` of the checkpoint, or a save over it, runs the code."""
    for config in (CONFIG, replace(CONFIG, accept_rewritten_metadata=True)):
        load_small(path, config)
    with pytest.raises(CheckpointError):
        verify(path, config=CONFIG).raise_if_damaged()
    dcp.save({"a": torch.ones(2)}, storage_writer=BcpWriter(path), no_dist=True)
    assert verify(path, config=CONFIG).is_whole
    assert not mark.exists()


def test_the_code_is_dangerous(tmp_path: Path) -> None:
    for number, evil in enumerate(evil_pickles(tmp_path / "it ran")):
        pickle.loads(evil)
        (tmp_path / "it ran").rename(tmp_path / f"it ran, {number}")


@pytest.mark.parametrize("where", CODE)
def test_code_in_the_metadata(where: str, small_checkpoint: Path, tmp_path: Path) -> None:
    mark = tmp_path / "it ran"
    for number, evil in enumerate(evil_pickles(mark)):
        path = Path(shutil.copytree(small_checkpoint, tmp_path / str(number)))
        file = path / ".metadata"
        file.write_bytes(CODE[where](file.read_bytes(), evil))
        error = load_small(path)
        assert type(error) is CorruptCheckpointError
        assert error.path == str(file)
        assert_harmless(path, mark)


@pytest.mark.parametrize("where", SIGNED_CODE)
def test_code_in_our_pickle(where: str, small_checkpoint: Path, tmp_path: Path) -> None:
    """The checksums are right. A load does not need the pickle and is right; verify reports the pickle."""
    mark = tmp_path / "it ran"
    for number, evil in enumerate(evil_pickles(mark)):
        path = Path(shutil.copytree(small_checkpoint, tmp_path / str(number)))
        crafted = MetadataFile.read(path / ".metadata")
        crafted.pickle = SIGNED_CODE[where](crafted.pickle, evil)
        (path / ".metadata").write_bytes(crafted.to_bytes())
        assert load_small(path) is None
        (problem,) = verify(path, config=CONFIG).problems
        assert (problem.file, problem.section) == (".metadata", "metadata")
        assert_harmless(path, mark)


def test_code_alone_in_a_directory(tmp_path: Path) -> None:
    """Nothing shows that the checkpoint was ours."""
    mark = tmp_path / "it ran"
    for evil in evil_pickles(mark):
        (tmp_path / ".metadata").write_bytes(evil)
        error = load_small(tmp_path)
        assert type(error) is UnsupportedError
        assert "mkdir" in str(error)
        assert not mark.exists()


class HarmfulTensor(torch.Tensor):
    """Makes a directory when it is unpickled."""

    mark = Path()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return os.mkdir, (str(self.mark),)


def test_code_in_an_opaque_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HarmfulTensor, "mark", tmp_path / "it ran")
    tensor = torch.ones(2).as_subclass(HarmfulTensor)
    path = tmp_path / "ckpt"
    dcp.save({"odd": tensor, "plain": torch.ones(3)}, storage_writer=BcpWriter(path), no_dist=True)
    target = {"odd": torch.zeros(2), "plain": torch.zeros(3)}
    with pytest.raises(CheckpointException) as caught:
        dcp.load(target, storage_reader=BcpReader(path), no_dist=True)
    (error,) = (wrapped[0] for wrapped in caught.value.failures.values())
    assert type(error) is UnsafeObjectError
    assert "'odd'" in str(error)
    assert verify(path).is_whole
    assert not tensor.mark.exists()
