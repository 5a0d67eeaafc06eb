# SPDX-License-Identifier: Apache-2.0
"""Input that means harm, in its basic form: refused, nothing outside the directory opened, nothing run.

Of ours, with right checksums wherever that makes it harder. ``tests/interop/test_foreign.py`` has names and code in
checkpoints of stock DCP, ``tests/unit/test_objects.py`` code in objects, ``test_damage.py`` files of other saves,
FIFOs and directories in place of files, ``test_every_byte.py`` files cut at every length.
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
from faults.fork_server import ForkServer, Meeting
from faults.lies import tell_lies
from faults.small import CONFIG, load_small, load_when_told
from faults.strace import calls_in, traced


class Harmful:
    """Unpickling it makes a directory."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


@pytest.fixture
def path(small_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the small checkpoint."""
    return Path(shutil.copytree(small_checkpoint, tmp_path / "ckpt"))


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A directory beside the checkpoint, which nobody has any business with."""
    outside = tmp_path / "outside"
    outside.mkdir()
    return outside


def load_watched(server: ForkServer, meeting: Meeting, path: Path, outside: Path, log: Path) -> CheckpointError | None:
    """What a load raises, in a process whose calls are watched: none is about ``outside``."""
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
    """The file is there, whole, under that name: it would load. But a name must follow from the id beside it."""
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
    """It says where the checkpoint was written; what is read is where the caller points to."""
    crafted = MetadataFile.read(path / ".metadata")
    crafted.sections[CHECKPOINT_ID] = bytearray(str(outside).encode())
    (path / ".metadata").write_bytes(crafted.to_bytes())
    assert load_watched(server, meeting, path, outside, tmp_path / "strace.log") is None
    assert verify(path, config=CONFIG).is_whole


def test_names_in_our_pickle_are_not_followed(
    path: Path, outside: Path, server: ForkServer, meeting: Meeting, tmp_path: Path
) -> None:
    """Stock DCP would follow them; a load of ours goes by the manifest, and verify sees that the two differ."""
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
    """Alone it looks like stock DCP's. Who says that a tool has rewritten it still gets the checks of the blocks."""
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
    """Also when the manifest, signed anew, wants it to be as long as that."""
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
    """It is signed, and the manifest vouches for it; but the two disagree about what file it is."""
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
    """Every number of the manifest and of the trailers of data files, at its extremes, under right checksums.

    Whatever they say: no crash, no gigabytes, no exception of another kind; and verify does not call whole what gives
    wrong values, or does not load.
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
# Of the pickle; everything is signed anew.
SIGNED_CODE: dict[str, Callable[[bytes, bytes], bytes]] = {
    "alone": lambda ours, evil: evil,
    "before ours": lambda ours, evil: evil + ours,
    "behind ours": lambda ours, evil: ours + evil,
}


def evil_pickles(mark: Path) -> list[bytes]:
    """What makes ``mark`` if it is unpickled; the second would be metadata for stock DCP."""
    metadata = Metadata(state_dict_metadata={}, planner_data={"a": Harmful(mark)}, storage_data={})
    return [pickle.dumps(value, protocol) for value in (Harmful(mark), metadata) for protocol in (2, 4)]


def assert_harmless(path: Path, mark: Path) -> None:
    """Whoever looks at the checkpoint, and whoever saves over it, runs nothing."""
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
    """With right checksums. We do not need the pickle: the load is right, and verify says that the pickle is not."""
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
    """Nothing says that it was ours."""
    mark = tmp_path / "it ran"
    for evil in evil_pickles(mark):
        (tmp_path / ".metadata").write_bytes(evil)
        error = load_small(tmp_path)
        assert type(error) is UnsupportedError
        assert "mkdir" in str(error)
        assert not mark.exists()


class HarmfulTensor(torch.Tensor):
    """Unpickling it makes a directory."""

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
