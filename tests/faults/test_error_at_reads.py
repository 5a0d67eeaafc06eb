# SPDX-License-Identifier: Apache-2.0
"""Tests EIO at every read of a load and of ``verify``, whichever thread makes it: the error names the file.

The load after it is right. ``test_error_at_calls.py`` tests the reads of a save.
"""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp
from support.campaign import IS_LONG
from support.fork_server import ForkServer, Meeting, meet, wait_for
from support.preloading import preloaded
from support.saves import CONFIG, SaveRequest, generation_of, load, names_in, save, state
from torch.distributed.checkpoint.api import CheckpointException

from bytecheckpoint import BcpReader, Config, verify
from bytecheckpoint.errors import StorageError
from faults.strace import calls_in, recorded

SOURCE = Path(__file__).with_name("failing_reads.c")
# The largest tensor takes two slots.
NUM_ROWS = 6000
STOCK = "of stock DCP"
CONFIGS = {
    "four threads, buffered": replace(CONFIG, io_threads=4, direct_io=False, io_timeout_s=0.0),
    **({"one thread": replace(CONFIG, io_threads=1)} if IS_LONG else {}),
}
# What the error of a failed read says: its type, its errno, its file.
Told = tuple[type[BaseException], int | None, str | None]


def failure_of_load(path: Path, config: Config) -> Told | None:
    try:
        generation_of(load(BcpReader(path, config=config), num_rows=NUM_ROWS), num_rows=NUM_ROWS)
    except CheckpointException as caught:
        (error,) = (wrapped[0] for wrapped in caught.failures.values())
        return type(error), getattr(error, "errno", None), getattr(error, "path", None)
    return None


def failures_of_loads(library: str, path: Path, config: Config) -> list[Told | None]:
    """Loads twice for each read: while it fails, and again, which must be right. Returns what the first load raised."""
    reads = ctypes.CDLL(library)
    reads.fail_read(0)
    assert failure_of_load(path, config) is None
    found = []
    for number in range(1, reads.num_reads() + 1):
        reads.fail_read(number)
        found.append(failure_of_load(path, config))
        reads.fail_read(0)
        assert failure_of_load(path, config) is None, f"the load after read {number} had failed"
    return found


def outcomes_of_checks(library: str, path: Path, config: Config) -> list[str]:
    """For each read, calls ``verify`` while it fails. Returns what that raised, found or noted, empty for nothing."""
    reads = ctypes.CDLL(library)
    reads.fail_read(0)
    assert verify(path, config=config).is_whole
    found = []
    for number in range(1, reads.num_reads() + 1):
        reads.fail_read(number)
        try:
            report = verify(path, config=config)
            found.append("; ".join([*(problem.message for problem in report.problems), *report.notes]))
        except StorageError as error:
            found.append(str(error))
    return found


def count_reads(library: str, address: bytes, path: Path) -> int:
    reads = ctypes.CDLL(library)
    test = meet(address)
    test.send("ready")
    wait_for(test)
    reads.fail_read(0)
    assert failure_of_load(path, CONFIG) is None
    return int(reads.num_reads())


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ForkServer]]:
    """Returns the library that makes reads fail, and a fork server whose processes use it."""
    library = str(preloaded(SOURCE, tmp_path_factory.mktemp("library"), untested="ERRORS OF READS"))
    server = ForkServer(environment={"LD_PRELOAD": library})
    yield library, server
    server.close()


@pytest.fixture(scope="module", params=["one file", "a file a record", STOCK])
def path(
    request: pytest.FixtureRequest, failing: tuple[str, ForkServer], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Returns a checkpoint of several records. Tests must not change it."""
    path = tmp_path_factory.mktemp("checkpoint") / "ckpt"
    if request.param == STOCK:
        dcp.save(state(1, num_rows=NUM_ROWS), storage_writer=dcp.FileSystemWriter(path), no_dist=True)
    else:
        writer = {"single_file_per_rank": request.param == "one file"}
        assert failing[1].run(save, SaveRequest(path, 1, writer=writer, num_rows=NUM_ROWS)).unwrap().errors == {}
    return path


def test_nothing_is_missed(path: Path, failing: tuple[str, ForkServer], meeting: Meeting, tmp_path: Path) -> None:
    """All reads of a load go through the library."""
    library, server = failing
    pid = server.start(count_reads, library, meeting.address, path)
    process = meeting.accept()
    assert Meeting.receive(process) == "ready"
    with recorded(pid, tmp_path / "strace.log"):
        process.send("go")
        num_reads = server.wait(pid).unwrap()
    reads = [call for call in calls_in(tmp_path / "strace.log", path, pid) if call.files and "read" in call.name]
    assert {call.name for call in reads} == {"pread64"}
    assert len(reads) == num_reads


@pytest.mark.parametrize("config", CONFIGS)
def test_load(config: str, path: Path, failing: tuple[str, ForkServer]) -> None:
    library, server = failing
    found = server.run(failures_of_loads, library, path, CONFIGS[config]).unwrap()
    files = {str(path / name) for name in names_in(path)}
    assert [told for told in found if told is None or told[:2] != (StorageError, errno.EIO)] == []
    assert {told[2] for told in found} == files


def test_verify(path: Path, failing: tuple[str, ForkServer]) -> None:
    library, server = failing
    found = server.run(outcomes_of_checks, library, path, replace(CONFIG, io_threads=1)).unwrap()
    assert [text for text in found if "Input/output error" not in text] == []
