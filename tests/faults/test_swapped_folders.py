# SPDX-License-Identifier: Apache-2.0
"""Tests folders and files that turn into symbolic links while our Python code writes there: tracker, merged tensors.

Whatever the links lead to stays as it is. The rule: our code follows links in the path that the caller names once, when
it opens that path, and never reaches what it makes or looks up inside through a link. ``test_retention.py`` tests the
same for removals, ``test_planted.py`` for saves.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from support.campaign import IS_LONG
from support.fork_server import ForkServer, Meeting, meet, wait_for

import bytecheckpoint
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.training_state.tracker import TRACKER, write_tracker
from faults.rehearsal import for_each, spread
from faults.strace import Call, calls_in, injected, recorded, wait_until_stopped

MOST_POINTS = 1000 if IS_LONG else 12


def track(step: Path, folder: Path) -> None:
    write_tracker(folder, 2)


def merge_for_torch(step: Path, folder: Path) -> None:
    bytecheckpoint.bytecheckpoint_ckpt_to_pytorch_ckpt(step, folder, config=bytecheckpoint.Config(io_timeout_s=0.0))


def merge_to_safetensors(step: Path, folder: Path) -> None:
    bytecheckpoint.bytecheckpoint_ckpt_to_pytorch_ckpt(
        step, folder, model_only=True, safetensors_format=True, max_shard_size=600
    )


Operation = Callable[[Path, Path], None]
OPERATIONS = (track, merge_for_torch, merge_to_safetensors)


def save_step(root: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(10, 10), torch.nn.Linear(10, 10))
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    bytecheckpoint.save(root, {"model": model, "optimizer": optimizer}, "ddp", global_steps=1)


def operate_when_told(address: bytes, operation: Operation, step: Path, folder: Path) -> str:
    """Returns what the operation raises. Runs it once elsewhere first, so that its imports are not watched."""
    warm = folder.with_name(f"{folder.name} warm")
    warm.mkdir()
    operation(step, warm)
    test = meet(address)
    test.send("ready")
    wait_for(test)
    try:
        operation(step, folder)
    except CheckpointError as error:
        return str(error)
    return ""


class Operations:
    """Processes that write to a folder, each of which is stopped at one system call."""

    def __init__(self, server: ForkServer, directory: Path) -> None:
        self._server = server
        server.run(save_step, directory / "run").unwrap()
        self._step = directory / "run" / "global_step_1"

    def record(self, operation: Operation, folder: Path) -> list[Call]:
        """Returns the calls of the operation that concern the folder or something in it."""
        log = folder.with_suffix(".log")
        with self._started(operation, folder) as (pid, process), recorded(pid, log):
            process.send("go")
            assert self._server.wait(pid).unwrap() == ""
        return [call for call in calls_in(log, folder, pid) if call.files and not call.thread]

    def stop_once(self, operation: Operation, folder: Path, call: Call, meanwhile: Callable[[int], None]) -> str:
        """Calls ``meanwhile`` with the process id right after ``call``; returns what the operation raised."""
        log = folder.with_suffix(".log")
        with self._started(operation, folder) as (pid, process):
            with injected(pid, log, call.name, "signal=STOP", call.number):
                process.send("go")
                wait_until_stopped(log)
                meanwhile(pid)
                os.kill(pid, signal.SIGCONT)
                raised: str = self._server.wait(pid).unwrap()
            return raised

    @contextmanager
    def _started(self, operation: Operation, folder: Path) -> Iterator[tuple[int, Connection]]:
        with closing(Meeting()) as meeting:
            pid = self._server.start(operate_when_told, meeting.address, operation, self._step, folder)
            process = meeting.accept()
            assert meeting.receive(process) == "ready"
            yield pid, process


@pytest.fixture(scope="module")
def operations(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Operations:
    return Operations(server, tmp_path_factory.mktemp("operations"))


def snapshot(folder: Path) -> dict[str, tuple[int, ...]]:
    """Returns, for the folder and everything in it, the attributes that would show any change."""
    paths = [folder, *folder.rglob("*")]
    stats = [(str(path.relative_to(folder)), path.lstat()) for path in paths]
    return {name: (of.st_ino, of.st_mode, of.st_size, of.st_mtime_ns, of.st_nlink) for name, of in stats}


def plant(outside: Path, names: list[str]) -> None:
    """Makes files that an operation could overwrite or remove."""
    outside.mkdir()
    for name in names:
        (outside / name).write_bytes(b"theirs")


def swap(path: Path, outside: Path) -> None:
    if os.path.lexists(path):
        path.rename(path.with_name(f"{path.name} moved"))
        path.symlink_to(outside)


NAMES = [
    "model.pt",
    "optimizer.pt",
    "model.safetensors",
    "model.safetensors.index.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    TRACKER,
    f".{TRACKER}.tmp",
]


@pytest.mark.parametrize(
    ("operation", "is_new"),
    # The tracker has no case with a new folder, because the save has made its folder.
    [*((operation, False) for operation in OPERATIONS), (merge_for_torch, True), (merge_to_safetensors, True)],
)
def test_the_folder(operations: Operations, tmp_path: Path, operation: Operation, is_new: bool) -> None:
    """The folder turns into a link at any call from the one that opens or makes it."""

    def folder_for(name: str) -> Path:
        folder = tmp_path / name / "out"
        folder.parent.mkdir()
        if not is_new:
            plant(folder, NAMES)
        return folder

    calls = operations.record(operation, folder_for("recorded"))
    opens = ("open", "mkdir")
    begin = next(at for at, call in enumerate(calls) if call.files == "." and call.name.startswith(opens))
    points = spread(calls[begin:], MOST_POINTS) if len(calls) - begin > MOST_POINTS else calls[begin:]

    def trial(call: Call) -> None:
        folder = folder_for(str(points.index(call)))
        outside = folder.with_name("outside")

        def meanwhile(pid: int) -> None:
            plant(outside, [*NAMES, f".model.pt.{pid}.tmp", f".optimizer.pt.{pid}.tmp"])
            before.update(snapshot(outside))
            swap(folder, outside)

        before: dict[str, tuple[int, ...]] = {}
        operations.stop_once(operation, folder, call, meanwhile)
        assert snapshot(outside) == before
        shutil.rmtree(folder.parent)

    for_each(points, trial)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_is_in_the_folder(operations: Operations, tmp_path: Path, operation: Operation) -> None:
    """Every file and folder that is there at that moment turns into a link to a file or a folder outside.

    What is in the temporary folder stays, because nobody else may enter it.
    """
    recorded_in = tmp_path / "recorded"
    plant(recorded_in, NAMES)
    calls = operations.record(operation, recorded_in)
    points = spread(calls, MOST_POINTS) if len(calls) > MOST_POINTS else calls

    def trial(call: Call) -> None:
        folder, outside = (tmp_path / f"{points.index(call)} {what}" for what in ("out", "outside"))
        plant(folder, NAMES)

        def meanwhile(pid: int) -> None:
            plant(outside, NAMES)
            (outside / "file").write_bytes(b"theirs")
            before.update(snapshot(outside))
            for path in [*folder.iterdir()]:
                swap(path, outside if path.is_dir() else outside / "file")

        before: dict[str, tuple[int, ...]] = {}
        operations.stop_once(operation, folder, call, meanwhile)
        assert snapshot(outside) == before

    for_each(points, trial)
