# SPDX-License-Identifier: Apache-2.0
"""Tests storage that stops answering at any stage of a save or load: each rank gets an error in time, nothing is lost.

Once the storage is back, the old checkpoint loads, the same process can save again, and the failed save has left no
file and no descriptor.
"""

from __future__ import annotations

import errno
import logging
import multiprocessing.connection
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.fork_server import LIMIT_S, ForkServer, Meeting
from support.saves import (
    BOTH_RANKS,
    CONFIG,
    Attempt,
    SaveRequest,
    assert_only_own_files,
    generation_of,
    generation_on_disk,
    load,
    save,
    save_twice,
)
from torch.distributed.checkpoint.api import CheckpointException

from bytecheckpoint import BcpReader, BcpSavePlanner, BcpWriter, Config
from bytecheckpoint.dcp._save_session import take_right_away
from bytecheckpoint.errors import CheckpointChangedError, DurabilityUnknownError, SaveFailedError, StorageError
from faults.silent_storage import SilentStorage, silent_storage
from faults.unanswered import load_twice_pausing, save_then_exit, save_twice_and_look

OLD, NEW, NEXT = 1, 2, 3
IO_TIMEOUT_S = 2.0
# Each rank must get its error within this time. It is a promise to users, and so the one time that tests measure.
TOLD_S = IO_TIMEOUT_S + 5
IMPATIENT = replace(CONFIG, io_timeout_s=IO_TIMEOUT_S)
# The data take three slots, and one is written while the next is filled.
MANY_ROWS = 14_000


@dataclass(frozen=True)
class Case:
    """Storage stops answering when one rank of a save has reached a failpoint.

    Attributes:
        point: The failpoint; empty for the time before the save begins.
        rank: The rank that reaches it.
        num_rows: Rows of the largest tensor.
    """

    point: str
    num_ranks: int = 1
    rank: int = 0
    num_rows: int = 120

    def __str__(self) -> str:
        return f"{self.point or 'before'}, rank {self.rank} of {self.num_ranks}, {self.num_rows} rows"


SOME = (
    Case(""),
    Case("write_data_done"),
    Case("write_directory_synced"),
    Case("commit_metadata_written"),
    Case("commit_decided"),
    Case("commit_directory_synced"),
    Case("write_file_created", num_ranks=2, rank=1),
)
UNDONE = (
    "",
    "begin_directory",
    "begin_locked",
    "begin_done",
    "write_file_created",
    "write_data",
    "write_data_done",
    "write_files_synced",
    "write_directory_synced",
    "commit_checked",
    "commit_metadata_written",
)
LATE = ("commit_metadata_synced", "commit_decided", "commit_renamed", "commit_directory_synced")
ALL = (
    *(Case(point) for point in (*UNDONE, *LATE)),
    Case("write_data", num_rows=MANY_ROWS),
    *(Case(point, num_ranks=2) for point in (*UNDONE, *LATE)),
    *(Case(point, num_ranks=2, rank=1) for point in UNDONE if point.startswith("write_")),
)


class Server:
    """A fork server that several threads share.

    No thread holds the lock for long, because ``result`` waits only for processes that are about to end.
    """

    def __init__(self, server: ForkServer) -> None:
        self._server = server
        self._lock = threading.Lock()

    def start(self, function: Callable[..., Any], *args: Any, env: dict[str, str] | None = None) -> int:
        with self._lock:
            return self._server.start(function, *args, env=env)

    def wait_stopped(self, pid: int) -> bool:
        with self._lock:
            return self._server.wait_stopped(pid)

    def result(self, pid: int) -> Any:
        with self._lock:
            return self._server.wait(pid).unwrap()


def requests_of(case: Case, storage: SilentStorage, generation: int) -> list[SaveRequest]:
    request = SaveRequest(
        storage.path / "ckpt",
        generation,
        num_ranks=case.num_ranks,
        store=str(storage.real.with_name(f"store{generation}")),
        config=IMPATIENT if generation == NEW else CONFIG,
        num_rows=case.num_rows,
    )
    return [replace(request, rank=rank) for rank in BOTH_RANKS[: case.num_ranks]]


def save_all(server: Server, requests: Iterable[SaveRequest]) -> None:
    pids = [server.start(save, request) for request in requests]
    for pid in pids:
        assert server.result(pid) == Attempt({}, ())


def hear(processes: Sequence[Connection], since: float) -> list[Any]:
    """Returns what each process sends; fails if that takes too long."""
    told = [Meeting.receive(process) for process in processes]
    seconds = time.monotonic() - since
    assert seconds < TOLD_S, f"told after {seconds:.1f} s"
    return told


def assert_is_silence(error: BaseException) -> None:
    assert isinstance(error, StorageError), error
    assert error.errno == errno.ETIMEDOUT, error
    assert f"the storage has not answered for {IO_TIMEOUT_S:.0f} s (Config.io_timeout_s)" in str(error)


def generation_after(case: Case, attempts: list[Attempt]) -> int:
    """Checks what the ranks were told. Returns the generation that must then be there once the storage is back."""
    if case.point == "commit_directory_synced":
        assert [attempt.errors for attempt in attempts] == [{}] * case.num_ranks
        (warning,) = (text for attempt in attempts for text in attempt.warnings)  # of the coordinator
        assert "removing files of older saves failed: " in warning
        assert "the storage has not answered" in warning
        return NEW
    errors = [error for attempt in attempts for error in attempt.errors.values()]
    assert len(errors) == case.num_ranks, errors
    assert len({(type(error), str(error)) for error in errors}) == 1, errors
    error = errors[0]
    if case.point == "commit_renamed":
        assert type(error) is DurabilityUnknownError
        return NEW
    if case.point.startswith("write_") and case.point != "write_directory_synced":
        assert isinstance(error, SaveFailedError)
        assert case.rank in error.reasons
    # The other of two ranks may be writing when the storage stops answering.
    reasons = error.reasons.values() if isinstance(error, SaveFailedError) else [error]
    for reason in reasons:
        assert_is_silence(reason)
    is_open = "it is not known whether the save is committed" in str(error)
    if case.point == "commit_decided":
        assert is_open
    if case.point in ("commit_metadata_synced", "commit_decided") and is_open:
        return NEW  # the rename is one of the calls that the storage will still answer
    assert not is_open
    return OLD


def wait_for_generation(case: Case, path: Path, generation: int) -> None:
    """Waits until the calls that hung are done and ``generation`` is there."""
    end = time.monotonic() + LIMIT_S / 2
    mark = path / ".metadata"
    while True:
        seen = mark.stat().st_ino
        try:
            found = generation_on_disk(path, BOTH_RANKS[: case.num_ranks], case.num_rows)
        except CheckpointException as error:  # the checkpoint was replaced during this load
            reason = error.failures[0][0]
            assert isinstance(reason, CheckpointChangedError), reason
            continue
        except AssertionError:
            if mark.stat().st_ino == seen:
                raise
            continue  # it was replaced between the two loads
        if found == generation:
            return
        assert found == OLD
        assert time.monotonic() < end, f"generation {found} is there, not {generation}"


def try_case(server: Server, case: Case, root: Path) -> None:
    with silent_storage(root) as storage, closing(Meeting()) as meeting:
        save_all(server, requests_of(case, storage, OLD))
        pids = []
        for first, then in zip(*(requests_of(case, storage, generation) for generation in (NEW, NEXT)), strict=True):
            env = {"BCP_FAILPOINT": f"{case.point}=stop"} if case.point and first.rank == case.rank else None
            pids.append(server.start(save_twice_and_look, meeting.address, first, then, env=env))
        processes = [meeting.accept() for _ in pids]
        assert [Meeting.receive(process) for process in processes] == ["ready"] * case.num_ranks
        if not case.point:
            storage.stop()
        since = time.monotonic()
        for process in processes:
            process.send("go")
        if case.point:
            assert server.wait_stopped(pids[case.rank]), f"{case} was not reached"
            storage.stop()
            since = time.monotonic()
            os.kill(pids[case.rank], signal.SIGCONT)
        attempts = hear(processes, since)
        generation = generation_after(case, attempts)
        path = storage.real / "ckpt"
        if generation == OLD:
            wait_for_generation(case, path, OLD)
        storage.answer()
        wait_for_generation(case, path, generation)
        for process in processes:
            process.send("go")
        assert [server.result(pid) for pid in pids] == [(Attempt({}, ()), [])] * case.num_ranks
        wait_for_generation(case, path, NEXT)
        assert_only_own_files(path)


def try_load(server: Server, num_ranks: int, at: str, root: Path) -> None:
    case = Case("", num_ranks=num_ranks, num_rows=MANY_ROWS)
    with silent_storage(root) as storage, closing(Meeting()) as meeting:
        save_all(server, requests_of(case, storage, OLD))
        ranks = BOTH_RANKS[:num_ranks]
        pids = [
            server.start(load_twice_pausing, meeting.address, request, ranks, at)
            for request in requests_of(case, storage, NEW)
        ]
        processes = [meeting.accept() for _ in pids]
        pausing = next(iter(multiprocessing.connection.wait(processes, LIMIT_S)))
        assert pausing.recv() == "paused"
        storage.stop()
        since = time.monotonic()
        pausing.send("go")
        for errors in hear(processes, since):
            assert errors
            for error in errors.values():
                assert_is_silence(error)
        storage.answer()
        for process in processes:
            process.send("go")
        assert [server.result(pid) for pid in pids] == [OLD] * num_ranks


def try_exit(server: Server, root: Path) -> None:
    """A process whose save has failed can exit, although its threads still wait for the storage and files are open."""
    with silent_storage(root) as storage, closing(Meeting()) as meeting:
        save_all(server, requests_of(Case(""), storage, OLD))
        (request,) = requests_of(Case(""), storage, NEW)
        pid = server.start(save_then_exit, meeting.address, request)
        process = meeting.accept()
        assert Meeting.receive(process) == "paused"
        storage.stop()
        since = time.monotonic()
        process.send("go")
        (attempt,) = hear([process], since)
        for error in attempt.errors.values():
            assert isinstance(error, SaveFailedError)
            assert_is_silence(error.reasons[0])
        assert server.result(pid) == 7
        storage.answer()
        assert generation_on_disk(storage.real / "ckpt") == OLD
        save_all(server, requests_of(Case(""), storage, NEXT))
        assert_only_own_files(storage.real / "ckpt")


def try_death(server: Server, root: Path) -> None:
    """Storage that is gone for good returns an error at once, and a save fails with that error."""
    with silent_storage(root) as storage, closing(Meeting()) as meeting:
        save_all(server, requests_of(Case(""), storage, OLD))
        (request,) = requests_of(Case(""), storage, NEW)
        pid = server.start(save_twice, meeting.address, request, request, env={"BCP_FAILPOINT": "write_data_done=stop"})
        process = meeting.accept()
        assert Meeting.receive(process) == "ready"
        process.send("go")
        assert server.wait_stopped(pid)
        storage.die()
        os.kill(pid, signal.SIGCONT)
        (error,) = Meeting.receive(process).errors.values()
        assert isinstance(error, SaveFailedError)
        reason = error.reasons[0]
        assert isinstance(reason, StorageError)
        assert reason.errno in (errno.ENOTCONN, errno.ECONNABORTED)
        process.send("go")
        (error,) = server.result(pid).errors.values()
        assert isinstance(error, StorageError)
        assert error.errno == errno.ENOTCONN
        assert generation_on_disk(storage.real / "ckpt") == OLD


def try_all(trials: Sequence[Callable[[Path], None]], root: Path, at_once: int) -> None:
    """Runs ``at_once`` trials at a time, because they mostly wait; then fails with everything that went wrong."""

    def outcome(number: int) -> str:
        try:
            trials[number](root / str(number))
        except (AssertionError, EOFError, OSError) as error:  # EOFError if a process died
            return f"{trials[number]}: {error!r}"
        return ""

    with ThreadPoolExecutor(at_once) as pool:
        failures = [text for text in pool.map(outcome, range(len(trials))) if text]
    print(f"{len(trials)} trials")
    assert not failures, f"{len(failures)} of {len(trials)}\n" + "\n".join(failures)


@pytest.fixture
def shared(failpoint_server: ForkServer) -> Server:
    return Server(failpoint_server)


def test_no_answer(shared: Server, tmp_path: Path) -> None:
    saves = [partial(try_case, shared, case) for case in SOME]
    loads = [partial(try_load, shared, 1, "before all"), partial(try_load, shared, 2, "before tensors")]
    try_all([*saves, *loads, partial(try_exit, shared), partial(try_death, shared)], tmp_path, at_once=11)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_no_answer_at_any_stage(shared: Server, tmp_path: Path) -> None:
    try_all([partial(try_case, shared, case) for case in ALL], tmp_path, at_once=4)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_no_answer_to_loads(shared: Server, tmp_path: Path) -> None:
    stages = ("before all", "before tensors", "behind tensors")
    try_all([partial(try_load, shared, n, at) for n in (1, 2) for at in stages], tmp_path, at_once=3)


def test_a_lost_coordinator_is_given_up_though_its_storage_is_silent(tmp_path: Path) -> None:
    """Its tmp is removed once the storage answers; the rank that noticed the loss does not wait for that."""
    with silent_storage(tmp_path) as storage:
        save_id = "ab" * 16
        tmp = storage.real / f".metadata.{save_id}.tmp"
        tmp.touch()
        storage.stop()
        taking = threading.Thread(target=take_right_away, args=(str(storage.path), (0, save_id), time.time(), Config()))
        taking.start()
        taking.join(LIMIT_S)
        assert not taking.is_alive()
        assert tmp.exists()
        storage.answer()
        (unlinking,) = (thread for thread in threading.enumerate() if thread.name == "bytecheckpoint-take-away")
        unlinking.join(LIMIT_S)
        assert not tmp.exists()


class Answering(logging.Handler):
    """Lets the storage answer when a call has said that it makes no progress."""

    def __init__(self, storage: SilentStorage) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []
        self._storage = storage

    def emit(self, record: logging.LogRecord) -> None:
        if "no progress" in record.getMessage():
            self.said.append(record.getMessage())
            self._storage.answer()


def test_the_log_says_in_which_phase_a_save_waits(tmp_path: Path) -> None:
    with silent_storage(tmp_path) as storage:

        class Stopping(BcpSavePlanner):
            def resolve_data(self, write_item: Any) -> Any:
                storage.stop()
                return super().resolve_data(write_item)

        handler, logger = Answering(storage), logging.getLogger("bytecheckpoint")
        logger.addHandler(handler)
        try:
            writer = BcpWriter(storage.path / "step_1", config=Config(stall_timeout_s=1, io_timeout_s=LIMIT_S))
            dcp.save({"w": torch.arange(1000)}, storage_writer=writer, planner=Stopping(), no_dist=True)
        finally:
            logger.removeHandler(handler)
        assert handler.said
        wanted = r"save\(.*/mount/step_1\).*: no progress for \d+ s, in phase (write|flush|sync) for \d+ s"
        assert re.match(wanted, handler.said[0]), handler.said
        got = {"w": torch.zeros(1000, dtype=torch.int64)}
        dcp.load(got, storage_reader=BcpReader(storage.path / "step_1"), no_dist=True)
        assert got["w"].equal(torch.arange(1000))


def load_by_itself(request: SaveRequest) -> int:
    got = load(BcpReader(request.path, config=request.config), num_rows=request.num_rows)
    return generation_of(got, num_rows=request.num_rows)


@pytest.mark.parametrize(
    ("megabytes", "per_s", "io_timeout_s"),
    [(3, 3, 30.0), pytest.param(80, 8, 4.0, marks=pytest.mark.long)],
    ids=["patient", "longer than it may be silent"],
)
def test_slow_storage_works(
    megabytes: int, per_s: int, io_timeout_s: float, server: ForkServer, tmp_path: Path
) -> None:
    """Saves and loads may take longer than ``io_timeout_s``, if no single call does."""
    with silent_storage(tmp_path, f"--write-rate={per_s}M", f"--read-rate={per_s}M") as storage:
        config = replace(CONFIG, io_timeout_s=io_timeout_s)
        request = SaveRequest(storage.path / "ckpt", NEW, config=config, num_rows=megabytes * 625)
        for work, wanted in ((save, Attempt({}, ())), (load_by_itself, NEW)):
            since = time.monotonic()
            assert server.run(work, request).unwrap() == wanted
            assert time.monotonic() - since > megabytes / per_s / 2, "it was not slow"
        assert generation_on_disk(storage.real / "ckpt", num_rows=request.num_rows) == NEW
