# SPDX-License-Identifier: Apache-2.0
"""Tests paths that a user without privileges may not write, read or enter."""

from __future__ import annotations

import errno
import os
import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from support.cli_runs import run as run_command
from support.fork_server import LIMIT_S, ForkServer
from support.mounts import mounted
from support.saves import CONFIG, SaveRequest, attempt, generation_on_disk, load, names_in
from torch.distributed.checkpoint.api import CheckpointException

from bytecheckpoint import BcpReader, latest, verify
from bytecheckpoint.errors import CheckpointError, CheckpointNotFoundError, SaveFailedError, StorageError
from faults.unprivileged import NOBODY, as_nobody

OLD, NEW, NEXT = 1, 2, 3


def save_as_nobody(request: SaveRequest) -> BaseException | None:
    """Saves, and returns what the save raised, or None."""
    as_nobody()
    return attempt(request).errors.get(0)


def load_as_nobody(path: Path) -> BaseException | None:
    as_nobody()
    try:
        load(BcpReader(path, config=CONFIG))
    except CheckpointException as error:
        return error.failures[0][0]
    return None


def verify_as_nobody(path: Path) -> BaseException | list[str]:
    """Returns what ``verify`` raised, or the messages of the problems that it found."""
    as_nobody()
    try:
        return [problem.message for problem in verify(path, config=CONFIG).problems]
    except CheckpointError as error:
        return error


def reason_of(error: BaseException | None) -> StorageError:
    reason = error.reasons[0] if isinstance(error, SaveFailedError) else error
    assert isinstance(reason, StorageError), repr(reason)
    return reason


@pytest.fixture
def path(home: Path, server: ForkServer) -> Path:
    """Returns a checkpoint of generation OLD, saved without privileges."""
    path = home / "ckpt"
    assert server.run(save_as_nobody, SaveRequest(path, OLD)).unwrap() is None
    return path


def test_directory_that_may_not_be_written(path: Path, server: ForkServer) -> None:
    before = names_in(path)
    path.chmod(0o555)
    reason = reason_of(server.run(save_as_nobody, SaveRequest(path, NEW)).unwrap())
    assert reason.errno == errno.EACCES
    assert Path(reason.path).parent == path
    assert names_in(path) == before
    assert server.run(load_as_nobody, path).unwrap() is None
    path.chmod(0o755)
    assert server.run(save_as_nobody, SaveRequest(path, NEXT)).unwrap() is None
    assert generation_on_disk(path) == NEXT


@pytest.mark.parametrize("mode", [0o555, 0o000], ids=["may not be written", "may not be entered"])
def test_parent(mode: int, home: Path, server: ForkServer) -> None:
    parent = home / "parent"
    parent.mkdir()
    parent.chmod(mode)
    if os.geteuid() == 0:
        os.chown(parent, NOBODY, NOBODY)
    for target in (parent / "ckpt", parent / "deep" / "ckpt"):
        assert reason_of(server.run(save_as_nobody, SaveRequest(target, NEW)).unwrap()).errno == errno.EACCES
    error = server.run(load_as_nobody, parent / "ckpt").unwrap()
    assert type(error) is (CheckpointNotFoundError if mode else StorageError)
    parent.chmod(0o755)
    assert names_in(parent) == []
    assert server.run(save_as_nobody, SaveRequest(parent / "deep" / "ckpt", NEXT)).unwrap() is None


def test_a_folder_that_may_be_entered_and_not_listed_is_loaded(path: Path, server: ForkServer) -> None:
    path.chmod(0o111)
    assert server.run(load_as_nobody, path).unwrap() is None


@pytest.mark.parametrize("which", [".metadata", ".distcp"])
def test_file_that_may_not_be_read(which: str, path: Path, server: ForkServer) -> None:
    """A load says which file it is. A save over the checkpoint works, because it does not read that file."""
    file = path / next(name for name in names_in(path) if name.endswith(which))
    file.chmod(0o200)
    error = server.run(load_as_nobody, path).unwrap()
    assert type(error) is StorageError
    assert (error.errno, error.path) == (errno.EACCES, str(file))
    found = server.run(verify_as_nobody, path).unwrap()
    if which == ".metadata":
        assert isinstance(found, StorageError)
    else:
        assert "Permission denied" in "".join(found)
    assert server.run(save_as_nobody, SaveRequest(path, NEW)).unwrap() is None
    assert server.run(load_as_nobody, path).unwrap() is None
    assert generation_on_disk(path) == NEW


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch], ids=["empty directory", "file"])
def test_what_is_no_checkpoint(make: Callable[[Path], None], home: Path, server: ForkServer) -> None:
    target = home / "target"
    make(target)
    error = server.run(load_as_nobody, target).unwrap()
    assert type(error) is CheckpointNotFoundError
    assert str(target) in str(error)


def test_read_only_file_system(home: Path, server: ForkServer) -> None:
    """A save fails with EROFS and leaves nothing; loads and verify work."""
    options = ("-t", "tmpfs", "-o", "size=4m,mode=777", "none")
    with mounted(home / "disk", *options, untested="READ-ONLY FILE SYSTEMS") as disk:
        path = disk / "ckpt"
        assert server.run(save_as_nobody, SaveRequest(path, OLD)).unwrap() is None
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], timeout=LIMIT_S, check=True)
        for target in (path, disk / "other"):
            assert reason_of(server.run(save_as_nobody, SaveRequest(target, NEW)).unwrap()).errno == errno.EROFS
        assert server.run(load_as_nobody, path).unwrap() is None
        assert server.run(verify_as_nobody, path).unwrap() == []


def commands_as_nobody(*commands: list[str]) -> list[tuple[int, str, str]]:
    """Runs the commands. Returns for each its exit code, its stdout and its stderr."""
    as_nobody()
    results = [run_command(*command) for command in commands]
    return [(result.exit_code, result.stdout, result.stderr) for result in results]


def latest_as_nobody(root: Path) -> BaseException | tuple[str | None, list[str]]:
    """Returns what ``latest`` raised, or what it found and its warnings."""
    as_nobody()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            return latest(root), [str(warning.message) for warning in said]
        except CheckpointError as error:
            return error


def test_what_a_command_could_not_read_is_no_damage(path: Path, server: ForkServer) -> None:
    """verify then exits with 2, or with 1 if another file is damaged, or a file is missing."""
    (data,) = (path / name for name in names_in(path) if name.endswith(".distcp"))
    data.chmod(0)
    ((code, listed, said),) = server.run(commands_as_nobody, ["verify", str(path)]).unwrap()
    assert (code, said) == (2, f"bcp: {path}: 1 file could not be read; the checkpoint may still be whole\n")
    assert "Permission denied" in listed
    (path / "__9_9.0123456789abcdef.distcp").touch()
    ((code, _, said),) = server.run(commands_as_nobody, ["verify", str(path)]).unwrap()
    assert (code, said) == (1, "")
    data.unlink()
    assert server.run(commands_as_nobody, ["verify", str(path)]).unwrap()[0][0] == 1


def test_a_step_that_may_not_be_looked_at(home: Path, server: ForkServer) -> None:
    """bcp steps reports it. latest returns an older step or raises, so that a run does not begin at step 0."""
    run = home / "run"
    for step in (1, 2):
        assert server.run(save_as_nobody, SaveRequest(run / f"step-{step}", OLD)).unwrap() is None
    (run / "step-2").chmod(0)
    ((code, listed, _),) = server.run(commands_as_nobody, ["steps", str(run)]).unwrap()
    assert code == 1
    assert "Permission denied" in listed
    found = server.run(latest_as_nobody, run).unwrap()
    assert isinstance(found, tuple)
    assert found[0] == str(run / "step-1")
    assert "step-2, which is unknown" in found[1][0]
    for mode in (0o444, 0o111):  # the folder can only be listed; or only files of known name can be opened
        (run / "step-2").chmod(mode)
        assert server.run(latest_as_nobody, run).unwrap()[0] == str(run / "step-1")
    (run / "step-1").chmod(0)
    assert "none is whole" in str(server.run(latest_as_nobody, run).unwrap())
    ((code, _, _),) = server.run(commands_as_nobody, ["steps", str(run)]).unwrap()
    assert code == 1
    run.chmod(0o444)
    ((code, listed, _),) = server.run(commands_as_nobody, ["steps", str(run)]).unwrap()
    assert (code, listed.count("Permission denied")) == (1, 2)
    run.chmod(0)
    error = server.run(latest_as_nobody, run).unwrap()
    assert isinstance(error, StorageError)
    assert error.errno == errno.EACCES
    error = server.run(latest_as_nobody, run / "role").unwrap()
    assert isinstance(error, StorageError)
