# SPDX-License-Identifier: Apache-2.0
"""Tests links and other things planted under names that a save makes, replaces or removes: it never follows them.

``tests/cpp/test_file.cpp`` tests the same for the call that makes files, ``test_sweep.cpp`` for the sweep.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support.fork_server import ForkServer, Meeting
from support.saves import (
    Attempt,
    SaveRequest,
    assert_only_own_files,
    generation_on_disk,
    names_in,
    save,
    save_when_told,
)

from bytecheckpoint.errors import CheckpointError, CheckpointExistsError, SaveFailedError, StorageError
from bytecheckpoint.native import _C
from faults.strace import traced

OLD, NEW, NEXT = 1, 2, 3
PRECIOUS = b"not ours"
ID = "00112233445566778899aabbccddeeff"
TMP, DATA, MARK_OF_RANK = f".metadata.{ID}.tmp", f"__0_0.{ID[:16]}.distcp", "__7.metadata"


@pytest.fixture
def path(server: ForkServer, tmp_path: Path) -> Path:
    """Returns a checkpoint of generation OLD."""
    path = tmp_path / "ckpt"
    assert save_at(server, path, OLD).errors == {}
    return path


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    """Returns a file outside the checkpoint."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_bytes(PRECIOUS)
    return outside / "precious"


def assert_untouched(precious: Path) -> None:
    assert precious.read_bytes() == PRECIOUS
    assert names_in(precious.parent) == [precious.name]


def save_at(server: ForkServer, path: Path, generation: int, **writer: object) -> Attempt:
    attempt: Attempt = server.run(save, SaveRequest(path, generation, writer=writer)).unwrap()
    return attempt


def link(file: Path, precious: Path) -> None:
    file.symlink_to(precious)


def dangling_link(file: Path, precious: Path) -> None:
    file.symlink_to(precious.with_name("nothing"))


def link_to_directory(file: Path, precious: Path) -> None:
    file.symlink_to(precious.parent)


def link_to_itself(file: Path, precious: Path) -> None:
    file.symlink_to(file.name)


def hard_link(file: Path, precious: Path) -> None:
    file.hardlink_to(precious)


def fifo(file: Path, precious: Path) -> None:
    os.mkfifo(file)


def directory(file: Path, precious: Path) -> None:
    file.mkdir()


LINKS = (link, dangling_link, link_to_directory, link_to_itself)
Plant = Callable[[Path, Path], None]


# The names of the next save. They are known because strace replaces the random bytes from the kernel, and the process
# the save id, which begins with the time.


def save_with_known_save_id(address: bytes, request: SaveRequest) -> Attempt:
    _C.draw_save_id = lambda: ID
    return save_when_told(address, request)


def save_with_known_ids(server: ForkServer, meeting: Meeting, path: Path, log: Path) -> CheckpointError:
    """Saves NEW, with ID for every id. Returns what the save raises."""
    pid = server.start(save_with_known_save_id, meeting.address, SaveRequest(path, NEW))
    process = meeting.accept()
    assert meeting.receive(process) == "ready"
    with traced(pid, log, "-e", "trace=getrandom", "-e", f"inject=getrandom:poke_exit=@arg1={ID}"):
        process.send("go")
        attempt: Attempt = server.wait(pid).unwrap()
    if "(INJECTED" not in log.read_text():
        pytest.skip("PLANTED NAMES NOT TESTED: ids are drawn without a system call here")
    (error,) = attempt.errors.values()
    assert isinstance(error, CheckpointError)
    return error


@pytest.mark.parametrize("plant", [*LINKS, fifo])
@pytest.mark.parametrize("name", [TMP, DATA])
def test_name_that_the_save_makes(
    name: str, plant: Plant, path: Path, precious: Path, server: ForkServer, meeting: Meeting, tmp_path: Path
) -> None:
    """The name is taken: the save fails and says so."""
    before = names_in(path)
    plant(path / name, precious)
    error = save_with_known_ids(server, meeting, path, tmp_path / "strace.log")
    reason: BaseException = error
    if name == DATA:
        assert isinstance(error, SaveFailedError)
        (reason,) = error.reasons.values()
    assert type(reason) is StorageError
    assert (reason.errno, reason.path) == (errno.EEXIST, str(path / name))
    assert_untouched(precious)
    assert generation_on_disk(path) == OLD
    assert set(names_in(path)) - {name} == set(before)
    assert save_at(server, path, NEXT) == Attempt({}, ())
    assert generation_on_disk(path) == NEXT
    assert_untouched(precious)


def test_name_that_cannot_be_cleaned_up(
    path: Path, precious: Path, server: ForkServer, meeting: Meeting, tmp_path: Path
) -> None:
    """The directory there cannot be unlinked, but the error still says why the save failed."""
    directory(path / DATA, precious)
    error = save_with_known_ids(server, meeting, path, tmp_path / "strace.log")
    assert isinstance(error, SaveFailedError), error
    assert [reason.errno for reason in error.reasons.values() if isinstance(reason, StorageError)] == [errno.EEXIST]
    assert generation_on_disk(path) == OLD


# The name that the commit replaces.


@pytest.mark.parametrize("plant", [*LINKS, hard_link, fifo])
def test_commit_mark(plant: Plant, path: Path, precious: Path, server: ForkServer) -> None:
    """The save replaces it and does not write through it. With overwrite=False it counts as a checkpoint."""
    mark = path / ".metadata"
    mark.unlink()
    plant(mark, precious)
    before = names_in(path)
    assert type(save_at(server, path, NEW, overwrite=False).errors[0]) is CheckpointExistsError
    assert names_in(path) == before
    assert save_at(server, path, NEW) == Attempt({}, ())
    assert not mark.is_symlink()
    assert mark.is_file()
    assert generation_on_disk(path) == NEW
    assert_only_own_files(path)
    assert_untouched(precious)


def test_commit_mark_that_leads_to_another_checkpoint(path: Path, server: ForkServer, tmp_path: Path) -> None:
    other = tmp_path / "other"
    assert save_at(server, other, OLD).errors == {}
    before = names_in(other)
    (path / ".metadata").unlink()
    (path / ".metadata").symlink_to(other / ".metadata")
    assert save_at(server, path, NEW) == Attempt({}, ())
    assert generation_on_disk(path) == NEW
    assert_only_own_files(path)
    assert generation_on_disk(other) == OLD
    assert names_in(other) == before


def test_directory_for_a_commit_mark(path: Path, precious: Path, server: ForkServer) -> None:
    (path / ".metadata").unlink()
    directory(path / ".metadata", precious)
    before = names_in(path)
    error = save_at(server, path, NEW).errors[0]
    assert type(error) is StorageError
    assert error.errno == errno.EISDIR
    assert names_in(path) == before


# The directory.


def test_link_to_the_directory(path: Path, server: ForkServer, tmp_path: Path) -> None:
    """The save follows the link, because the caller named it."""
    entry = tmp_path / "latest"
    entry.symlink_to("ckpt")
    assert save_at(server, entry, NEW) == Attempt({}, ())
    assert entry.is_symlink()
    assert generation_on_disk(entry) == generation_on_disk(path) == NEW
    assert_only_own_files(path)


@pytest.mark.parametrize("plant", [link, dangling_link, link_to_itself, fifo])
def test_no_directory(plant: Plant, precious: Path, server: ForkServer, tmp_path: Path) -> None:
    plant(tmp_path / "new", precious)
    error = save_at(server, tmp_path / "new", NEW).errors[0]
    assert type(error) is StorageError
    assert_untouched(precious)


# Names that a sweep removes.


@pytest.mark.parametrize("plant", [*LINKS, hard_link, fifo, directory])
@pytest.mark.parametrize("name", [TMP, DATA, MARK_OF_RANK])
def test_names_of_earlier_saves(name: str, plant: Plant, path: Path, precious: Path, server: ForkServer) -> None:
    """A planted entry stays or is removed, but nothing happens to what it leads to, and the save succeeds."""
    plant(path / name, precious)
    assert save_at(server, path, NEW).errors == {}
    assert generation_on_disk(path) == NEW
    assert_untouched(precious)
    stays = os.path.lexists(path / name)
    assert stays == (plant is directory or (name != MARK_OF_RANK and plant is not hard_link))


def test_link_to_a_locked_file_holds_up_nobody(path: Path, precious: Path, server: ForkServer) -> None:
    link(path / TMP, precious)
    with precious.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert save_at(server, path, NEW) == Attempt({}, ())
    assert generation_on_disk(path) == NEW
    assert_untouched(precious)
