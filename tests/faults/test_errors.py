# SPDX-License-Identifier: Apache-2.0
"""Tests errors of the file system: a limit on file sizes, and errors that strace returns from system calls.

After every failed save the old checkpoint loads, nothing of the failed one is left unless its rename was attempted, and
the same process can save again.
"""

from __future__ import annotations

import errno
import re
import resource
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from support.fork_server import ForkServer, Meeting
from support.saves import (
    BOTH_RANKS,
    IN_ONE_THREAD,
    Attempt,
    SaveRequest,
    assert_only_own_files,
    data_files,
    generation_on_disk,
    load_twice,
    names_in,
    save,
    save_twice,
)

from bytecheckpoint.errors import (
    CheckpointError,
    CheckpointSupersededError,
    DurabilityUnknownError,
    SaveFailedError,
    StorageError,
)
from faults.strace import injected, whole_lines

OLD, NEW, NEXT = 1, 2, 3


@dataclass(frozen=True)
class Fault:
    """An error that strace returns from a system call of a save over an existing checkpoint.

    Attributes:
        calls: Names of system calls, as strace takes them.
        at: Pattern that must match the line of the call that was hit, which proves that it was the right one.
        when: Which call of each thread is hit.
        raised: Class of the error, None if the save must succeed.
        all_threads: True for all threads, False for the main thread only.
        survives: Generation that loads afterwards.
        keeps_files: True if the files of the failed save stay, because its rename was attempted.
        warned: Text of the warnings of the save.
    """

    name: str
    calls: str
    error: str
    at: str
    when: int = 1
    raised: type[CheckpointError] | None = SaveFailedError
    all_threads: bool = False
    survives: int = OLD
    keeps_files: bool = False
    warned: str = ""


RENAME, UNLINK = "?rename,?renameat,renameat2", "?unlink,unlinkat"
DATA, TMP, DIRECTORY, MARK = r"\.distcp", r"\.metadata\.\w+\.tmp", r"ckpt>", r"\.metadata"
PARENT = r"fsync\(\d+<[^>]*(?<!ckpt)>"

FAILING = (
    Fault("look for saves that died", "getdents64", "EIO", DIRECTORY, raised=None, survives=NEW),
    Fault("begin: listing", "getdents64", "EIO", DIRECTORY, when=3, raised=StorageError),
    Fault("begin: lock", "flock", "EIO", TMP, raised=StorageError),
    Fault("begin: space for the metadata", "fallocate", "ENOSPC", TMP, raised=StorageError),
    Fault("data: space", "fallocate", "ENOSPC", DATA, when=2),
    Fault("data: quota", "fallocate", "EDQUOT", DATA, when=2),
    Fault("data: write", "pwrite64", "ENOSPC", DATA, all_threads=True),
    Fault("data: write, broken disk", "pwrite64", "EIO", DATA, all_threads=True),
    Fault("data: cut to size", "ftruncate", "EIO", DATA),
    Fault("begin: sync of the name", "fsync", "EIO", PARENT, raised=StorageError),
    Fault("data: sync", "fsync", "EIO", DATA, when=2),
    Fault("data: sync of the directory", "fsync", "EIO", DIRECTORY, when=3),
    Fault("commit: write", "pwrite64", "ENOSPC", TMP, raised=StorageError),
    Fault("commit: cut to size", "ftruncate", "EIO", TMP, when=2, raised=StorageError),
    Fault("commit: sync", "fsync", "EIO", TMP, when=4, raised=StorageError),
    Fault("commit: rename", RENAME, "EIO", TMP, raised=StorageError, keeps_files=True),
    Fault("commit: tmp is gone", RENAME, "ENOENT", TMP, raised=CheckpointSupersededError, keeps_files=True),
)
COMMITTED = (
    Fault("sync of the rename", "fsync", "EIO", DIRECTORY, 5, DurabilityUnknownError, survives=NEW, keeps_files=True),
    Fault("no sync here", "fsync", "EINVAL", DIRECTORY, 5, None, survives=NEW, warned="cannot sync a directory"),
    Fault(
        "sweep: sync",
        "fsync",
        "EIO",
        DIRECTORY,
        6,
        None,
        survives=NEW,
        keeps_files=True,
        warned="older saves failed: fsync",
    ),
    Fault(
        "sweep: unlink",
        UNLINK,
        "EIO",
        DATA,
        1,
        None,
        survives=NEW,
        keeps_files=True,
        warned="older saves failed: unlink",
    ),
)
HARMLESS = (
    Fault("no locks here", "flock", "ENOLCK", TMP, raised=None, survives=NEW),
    Fault("no reservations here", "fallocate", "EOPNOTSUPP", TMP, raised=None, survives=NEW),
    Fault("signals", "pwrite64,fallocate,ftruncate", "EINTR", DATA, all_threads=True, raised=None, survives=NEW),
)


class Trial:
    """A process that saves over generation OLD of a checkpoint, first with a fault, then without."""

    def __init__(self, server: ForkServer, meeting: Meeting, path: Path) -> None:
        self.path = path
        assert server.run(save, SaveRequest(path, OLD)).unwrap().errors == {}
        self.names_before = names_in(path)
        request = SaveRequest(path, NEW, config=IN_ONE_THREAD)
        self._server = server
        self.pid = server.start(save_twice, meeting.address, request, replace(request, generation=NEXT))
        self._process = meeting.accept()
        assert meeting.receive(self._process) == "ready"

    def first_attempt(self) -> Attempt:
        self._process.send("go")
        attempt: Attempt = Meeting.receive(self._process)
        return attempt

    def assert_undone(self) -> None:
        assert names_in(self.path) == self.names_before
        assert generation_on_disk(self.path) == OLD

    def assert_saves_again(self) -> None:
        self._process.send("go")
        assert self._server.wait(self.pid).unwrap() == Attempt({}, ())
        assert generation_on_disk(self.path) == NEXT
        assert_only_own_files(self.path)


def reason_of(attempt: Attempt, rank: int = 0) -> StorageError:
    """Returns why a rank failed to write, from the coordinator's SaveFailedError."""
    error = attempt.errors[0]
    assert type(error) is SaveFailedError
    assert "undone" in str(error)
    assert list(error.reasons) == [rank]
    reason = error.reasons[rank]
    assert isinstance(reason, StorageError)
    return reason


def assert_is_told(fault: Fault, attempt: Attempt) -> None:
    if fault.raised is None:
        assert attempt.errors == {}
    elif fault.raised is SaveFailedError:
        assert reason_of(attempt).errno == getattr(errno, fault.error)
        assert re.search(DIRECTORY.rstrip(">") + "|" + fault.at, reason_of(attempt).path)
    else:
        assert type(attempt.errors[0]) is fault.raised
        assert attempt.errors[0].errno == getattr(errno, fault.error)
    assert bool(attempt.warnings) == bool(fault.warned)
    assert all(fault.warned in text for text in attempt.warnings)


@pytest.mark.parametrize("fault", [*FAILING, *COMMITTED, *HARMLESS], ids=lambda fault: fault.name)
def test_error_of_a_call(fault: Fault, server: ForkServer, meeting: Meeting, tmp_path: Path) -> None:
    trial = Trial(server, meeting, tmp_path / "ckpt")
    log = tmp_path / "strace.log"
    with injected(trial.pid, log, fault.calls, f"error={fault.error}", fault.when, all_threads=fault.all_threads):
        attempt = trial.first_attempt()
    hits = [line for line in whole_lines(log) if "(INJECTED)" in line]
    assert any(re.search(fault.at, line) for line in hits), f"hit something else: {hits}"
    assert_is_told(fault, attempt)
    if fault.keeps_files:
        assert set(trial.names_before) < set(names_in(trial.path))
        assert not any(name.endswith(".tmp") for name in names_in(trial.path))
    elif fault.survives == OLD:
        trial.assert_undone()
    assert generation_on_disk(trial.path) == fault.survives
    trial.assert_saves_again()


def test_clean_up_fails_too(server: ForkServer, meeting: Meeting, tmp_path: Path) -> None:
    """A lost disk fails the sync, and then the removal of the files. The error still gives the sync as the reason."""
    trial = Trial(server, meeting, tmp_path / "ckpt")
    with injected(trial.pid, tmp_path / "strace.log", f"fsync,{UNLINK}", "error=EIO", "2+"):
        attempt = trial.first_attempt()
    reason = reason_of(attempt)
    assert reason.errno == errno.EIO
    assert "fsync" in str(reason)
    said = str(attempt.errors[0])
    assert "could not be undone: a later save there, or a prune, removes its files (unlink" in said
    assert "unlink" in "".join(attempt.errors[0].__notes__)
    assert generation_on_disk(trial.path) == OLD
    trial.assert_saves_again()


def test_other_rank_cannot_write(server: ForkServer, meeting: Meeting, tmp_path: Path) -> None:
    """Every rank gets the reason of the rank that failed, and the files of both are removed."""
    path = tmp_path / "ckpt"
    assert server.run(save, SaveRequest(path, OLD)).unwrap().errors == {}
    before = names_in(path)
    pids = []
    for rank in BOTH_RANKS:
        first = SaveRequest(path, NEW, rank, 2, str(tmp_path / "store"), IN_ONE_THREAD)
        pids.append(server.start(save_twice, meeting.address, first, replace(first, generation=NEXT)))
    processes = [meeting.accept() for _ in BOTH_RANKS]
    for process in processes:
        assert Meeting.receive(process) == "ready"
    with injected(pids[1], tmp_path / "strace.log", "fsync", "error=EIO"):
        for process in processes:
            process.send("go")
        attempts = [Meeting.receive(process) for process in processes]
    for attempt in attempts:
        assert reason_of(attempt, rank=1).errno == errno.EIO
    assert names_in(path) == before
    assert generation_on_disk(path) == OLD
    for process in processes:
        process.send("go")
    for pid in pids:
        assert server.wait(pid).unwrap() == Attempt({}, ())
    assert generation_on_disk(path, BOTH_RANKS) == NEXT
    assert_only_own_files(path)


@pytest.mark.parametrize("of_data", [False, True])
def test_read_error(of_data: bool, server: ForkServer, meeting: Meeting, tmp_path: Path) -> None:
    """A load says which file cannot be read; the next one works."""
    path = tmp_path / "ckpt"
    assert server.run(save, SaveRequest(path, OLD)).unwrap().errors == {}
    file = path / (data_files(path)[0] if of_data else ".metadata")
    pid = server.start(load_twice, meeting.address, path)
    process = meeting.accept()
    assert Meeting.receive(process) == "ready"
    with injected(pid, tmp_path / "strace.log", "pread64", "error=EIO", all_threads=True, path=file):
        process.send("go")
        error = Meeting.receive(process)[0]
    assert type(error) is StorageError
    assert (error.errno, error.path) == (errno.EIO, str(file))
    process.send("go")
    assert server.wait(pid).unwrap() == {}


def test_file_size_limit(server: ForkServer, meeting: Meeting, tmp_path: Path) -> None:
    """Python ignores SIGXFSZ; the limit then cuts one write short and fails the next with EFBIG."""
    trial = Trial(server, meeting, tmp_path / "ckpt")
    _, hard = resource.prlimit(trial.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(trial.pid, resource.RLIMIT_FSIZE, (100_000, hard))
    reason = reason_of(trial.first_attempt())
    assert reason.errno == errno.EFBIG
    trial.assert_undone()
    resource.prlimit(trial.pid, resource.RLIMIT_FSIZE, (hard, hard))
    trial.assert_saves_again()
