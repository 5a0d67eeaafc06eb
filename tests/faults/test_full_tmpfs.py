# SPDX-License-Identifier: Apache-2.0
"""Tests a tmpfs that runs out of bytes or of inodes at each point of ``bytecheckpoint.save``.

Every rank gets an error that says what has no room. The step before loads and is the newest. The failed step does not
count as a checkpoint. Once there is room, the same processes save it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.campaign import IS_LONG, Campaign
from support.fork_server import ForkServer, Meeting, meet
from support.mounts import fill, mounted
from support.saves import SaveRequest, gloo

import bytecheckpoint
from bytecheckpoint import find_latest_ckpt_path, scan_steps
from bytecheckpoint.errors import (
    CheckpointChangedError,
    CheckpointError,
    CheckpointNotFoundError,
    SaveFailedError,
    StorageError,
)
from bytecheckpoint.observability import flush
from bytecheckpoint.storage.parts import PARTS
from bytecheckpoint.training_state.tracker import TRACKER, write_tracker

NUM_INODES = 64
BEFORE, FAILING, NEXT = 1.0, 2.0, 3.0
# Each row takes a block of 4 KiB, twice in the model and once in the optimizer. A save that replaces a step gets room
# back with each part, so only a larger part than the one before can be the first without room.
NUM_ROWS = 64 if IS_LONG else 8


@dataclass(frozen=True)
class Run:
    """How the ranks of a run save it.

    Attributes:
        is_over: True if the failing save replaces a step, False if it makes a new one.
    """

    root: Path
    num_ranks: int
    framework: str
    fast_saving: bool
    is_over: bool

    def folder(self, step: int) -> Path:
        return self.root / f"global_step_{step}"


def state_of(framework: str, value: float) -> dict[str, Any]:
    model = torch.nn.Sequential(torch.nn.Linear(1024, NUM_ROWS), torch.nn.Linear(1024, NUM_ROWS))
    if framework == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, value)
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1, momentum=0.9)
    for parameter in model[1].parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, value).detach()
    extra_state = {"value": value, "dataloader": {"order": torch.full((1024,), value), "at": [value] * 10}}
    return {"model": model, "optimizer": optimizer, "extra_state": extra_state}


def value_in(state: dict[str, Any]) -> float:
    extra = state["extra_state"]
    tensors = [*state["model"].parameters(), *(of["momentum_buffer"] for of in state["optimizer"].state.values())]
    local = [getattr(tensor, "to_local", lambda tensor=tensor: tensor)() for tensor in tensors]
    local.append(extra["dataloader"]["order"])
    values = {extra["value"], *extra["dataloader"]["at"], *(x for of in local for x in of.flatten().tolist())}
    (value,) = values
    return float(value)


def rank_of_run(address: bytes, run: Run, request: SaveRequest) -> None:
    """Saves and loads as the test asks. Answers with an error, with the value that was loaded, or with None."""
    with contextlib.nullcontext() if run.num_ranks == 1 else gloo(request):
        test = meet(address)
        test.send(request.rank)
        with contextlib.suppress(EOFError, ConnectionResetError, BrokenPipeError):
            while True:
                what, step, value = test.recv()
                state = state_of(run.framework, value)
                answer: Any = None
                try:
                    if what == "save":
                        handle = bytecheckpoint.save(
                            run.root, state, run.framework, run.fast_saving, step, callback=(run.root / "called").touch
                        )
                        handle.committed.result()
                    else:
                        bytecheckpoint.load(run.folder(step), state, run.framework)
                        answer = value_in(state)
                except CheckpointError as error:
                    answer = error
                flush()  # the journal is written behind a call, and may take room just while the test fills the disk
                test.send(answer)


class Ranks:
    """The processes of a run."""

    def __init__(self, server: ForkServer, run: Run, store: Path) -> None:
        requests = [SaveRequest(run.root, 0, rank, run.num_ranks, str(store)) for rank in range(run.num_ranks)]
        with closing(Meeting()) as meeting:
            self._pids = [server.start(rank_of_run, meeting.address, run, request) for request in requests]
            accepted = [meeting.accept() for _ in requests]
        self._of_rank = {Meeting.receive(process): process for process in accepted}
        self._server = server

    def ask(self, what: str, step: int, value: float = -1.0) -> list[Any]:
        """Asks all ranks, and returns their answers by rank."""
        for process in self._of_rank.values():
            process.send((what, step, value))
        return [Meeting.receive(self._of_rank[rank]) for rank in sorted(self._of_rank)]

    def close(self) -> None:
        for process in self._of_rank.values():
            process.close()
        for pid in self._pids:
            self._server.wait(pid).unwrap()


def fill_inodes(directory: Path, leave: int) -> Callable[[], None]:
    """Uses up inodes until ``leave`` are free. Returns a function that undoes it."""
    folder = directory / "fillers"
    folder.mkdir()
    for number in range(os.statvfs(directory).f_favail - leave):
        (folder / str(number)).touch()
    assert os.statvfs(directory).f_favail == leave
    return lambda: shutil.rmtree(folder)


RUNS = {
    "one rank": (1, "ddp", False, False),
    "two ranks": (2, "ddp", False, False),
    "two ranks over a step in the background": (2, "fsdp2", True, True),
}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    options = f"size=8m,nr_inodes={NUM_INODES}"
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", options, "none", untested="FULL TMPFS") as disk:
        yield disk


@pytest.fixture(params=RUNS)
def run(request: pytest.FixtureRequest, disk: Path) -> Run:
    return Run(disk / "run", *RUNS[request.param])


@pytest.mark.parametrize("filling", [fill, fill_inodes], ids=["bytes", "inodes"])
@pytest.mark.timeout(1200)
def test_full_at_every_point(
    filling: Callable[[Path, int], Callable[[], None]], run: Run, server: ForkServer, tmp_path: Path, campaign: Campaign
) -> None:
    """Tries saves with no room at all, then with a little more each time, until one succeeds."""
    failed_in = set()
    stride = 3 if filling is fill and run.num_ranks > 1 and not IS_LONG else 1
    with closing(Ranks(server, run, tmp_path / "store")) as ranks:
        assert ranks.ask("save", 1, BEFORE) == [None] * run.num_ranks
        for room in range(0, 1000, stride):
            if run.is_over:
                assert ranks.ask("save", 2, BEFORE) == [None] * run.num_ranks
            (run.root / "called").unlink(missing_ok=True)
            make_room = filling(run.root.parent, room)
            answers = ranks.ask("save", 2, FAILING)
            try:
                if answers == [None] * run.num_ranks:
                    break
                reasons = {_storage_error(answer) for answer in answers}
                where = _where(run, reasons)
                failed_in.add(where)
                campaign.covered[f"in {where}"] += 1
                assert not (run.root / "called").exists()
                assert_step_before_is_whole(run, ranks)
                assert_failed_step_is_none(run, ranks, where)
            except AssertionError as error:
                error.add_note(f"{room} were free; told {answers}")
                raise
            finally:
                make_room()
            assert ranks.ask("save", 2, NEXT) == [None] * run.num_ranks
            assert ranks.ask("load", 2) == [NEXT] * run.num_ranks
            assert find_latest_ckpt_path(run.root) == str(run.folder(2))
            assert [folder.state for folder in scan_steps(run.root, deep=True)] == ["complete"] * 2
            shutil.rmtree(run.folder(2))
            write_tracker(run.root, 1)
    # There are always bytes for the tracker, because the commit before it gives back what it reserved and did not need.
    # When a save replaces a step, each part takes as many inodes as the part before it gave back.
    everywhere = {*PARTS} if filling is fill else {"extra_state"} if run.is_over else {"step", *PARTS, TRACKER}
    assert failed_in == everywhere


def test_no_bytes_for_the_tracker(disk: Path) -> None:
    """Another process has taken the last bytes since the commit."""
    write_tracker(disk, 1)
    make_room = fill(disk, 0)
    with pytest.raises(StorageError, match=os.strerror(errno.ENOSPC)) as caught:
        write_tracker(disk, 2)
    assert caught.value.errno == errno.ENOSPC
    assert Path(caught.value.path).name == TRACKER
    assert sorted(path.name for path in disk.iterdir()) == ["filler", TRACKER]
    assert (disk / TRACKER).read_text() == "1"
    make_room()
    write_tracker(disk, 2)
    assert (disk / TRACKER).read_text() == "2"


def _storage_error(answer: object) -> tuple[str, str]:
    """Returns the path that had no room and the text of the error; fails on any other error."""
    reason = next(iter(answer.reasons.values())) if isinstance(answer, SaveFailedError) else answer
    assert isinstance(reason, StorageError), repr(reason)
    assert reason.errno == errno.ENOSPC, repr(reason)
    text = str(reason)
    assert os.strerror(errno.ENOSPC) in text or "free" in text, text
    assert f"({reason.path}" in text, text
    return reason.path, text


def _where(run: Run, reasons: set[tuple[str, str]]) -> str:
    """Returns the part that had no room, or "step" for the folders; fails if the ranks got different errors."""
    ((path, text),) = reasons
    assert Path(path).is_relative_to(run.root), text
    names = Path(path).relative_to(run.root).parts
    return TRACKER if TRACKER in names[0] else names[1] if len(names) > 1 else "step"


def assert_step_before_is_whole(run: Run, ranks: Ranks) -> None:
    assert ranks.ask("load", 1) == [BEFORE] * run.num_ranks
    first = scan_steps(run.root, deep=True)[0]
    assert (first.step, first.state) == (1, "complete"), first


def assert_failed_step_is_none(run: Run, ranks: Ranks, where: str) -> None:
    """Fails if a step with only some committed parts counts as a checkpoint, or if an uncommitted part left files."""
    committed = PARTS[: PARTS.index(where)] if where in PARTS else () if where == "step" else PARTS
    is_whole = len(committed) == len(PARTS) or (run.is_over and not committed)
    for part in PARTS:
        names = [path.name for path in (run.folder(2) / part).glob("*")]
        assert not [name for name in names if name.endswith(".tmp")], names
        assert (".metadata" in names) == (run.is_over or part in committed), (part, names)
        assert names == [] or ".metadata" in names, (part, names)
    assert not [path.name for path in run.root.iterdir() if path.name.endswith(".tmp")]
    assert [folder.is_complete for folder in scan_steps(run.root) if folder.step == 2] in ([is_whole], [])
    answers = ranks.ask("load", 2)
    if is_whole:
        assert answers == [FAILING if committed else BEFORE] * run.num_ranks
    else:
        assert all(isinstance(answer, CheckpointNotFoundError | CheckpointChangedError) for answer in answers), answers
    tracked = 2 if run.is_over else 1
    assert (run.root / TRACKER).read_text() == str(tracked)
    with warnings.catch_warnings():
        # A step 2 that is half, or that the tracker does not name, is named in a warning.
        is_named = any((folder.step == 2 and tracked == 1) or not folder.is_complete for folder in scan_steps(run.root))
        warnings.simplefilter("ignore" if is_named else "error")
        newest = find_latest_ckpt_path(run.root)
    assert newest == str(run.folder(2 if run.is_over and is_whole else 1))
