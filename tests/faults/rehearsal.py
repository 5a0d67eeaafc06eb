# SPDX-License-Identifier: Apache-2.0
"""Records the system calls of a save once, so that a test can disturb other saves like it at any of these calls."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

from support.fork_server import ForkServer, Meeting, Outcome
from support.saves import (
    BOTH_RANKS,
    IN_ONE_THREAD,
    NUM_ROWS,
    Attempt,
    SaveRequest,
    generation_on_disk,
    save,
    save_twice,
    save_when_told,
)

from faults.strace import Call, calls_in, injected, reachable, recorded

__all__ = ["NEW", "NEXT", "OLD", "Rehearsal", "Scenario", "for_each", "is_of_journal", "one_of_each", "spread"]

# Generations: what is there before, what the disturbed save writes, and what the save after it writes.
OLD, NEW, NEXT = 1, 2, 3


@dataclass(frozen=True)
class Scenario:
    """The content of the path before a save, and how the save writes.

    Attributes:
        old: True if a checkpoint of generation OLD is there. Otherwise the save has ``overwrite=False``, and commits
            with another system call.
        remains: True if an earlier save died when its files were complete: they are there, and its tmp.
        file_a_record: True if the save writes several files.
        num_rows: Rows of the largest tensor; see ``saves.state``.
        io_threads: With more than one it is chance which of them makes which call, so a test cannot choose one.
        num_ranks: How many ranks save.
        rank: The rank whose calls are recorded.
        sync: ``sync_files`` of the writer.
    """

    name: str
    old: bool = True
    remains: bool = False
    file_a_record: bool = False
    num_rows: int = NUM_ROWS
    io_threads: int = 1
    num_ranks: int = 1
    rank: int = 0
    sync: bool = True

    @property
    def ranks(self) -> tuple[int, ...]:
        return BOTH_RANKS[: self.num_ranks]

    def __str__(self) -> str:
        return self.name


class Rehearsal:
    """A scenario, a directory as its saves find it, and the calls that a save of generation NEW makes there.

    Attributes:
        calls: The calls at which a test can stop another such save, in order.
        left_out: The other calls; see ``strace.reachable``.
    """

    def __init__(self, scenario: Scenario, server: ForkServer, directory: Path) -> None:
        self.scenario = scenario
        self._server = server
        self._directory = directory
        self._num_requests = 0
        directory.mkdir(exist_ok=True)
        self._template = directory / "template"
        # Done also for a scenario without an old checkpoint, because the first save of all may compile modules.
        self.save_all(self._template, OLD)
        if not scenario.old:
            shutil.rmtree(self._template)
            self._template.mkdir()
        self.calls, self.left_out = self._record()
        if scenario.remains:
            rename = next(call for call in self.calls if call.name.startswith("rename"))
            remains = self.copy(directory / "remains")
            self.kill(remains, rename)
            self._template = remains
            self.calls, self.left_out = self._record()

    def copy(self, root: Path) -> Path:
        """Makes ``root`` a directory as the saves find it, and returns it."""
        return Path(shutil.copytree(self._template, root))

    @staticmethod
    def path(root: Path) -> Path:
        """Returns the path of the checkpoint. A first save has to make two directories."""
        return root / "new" / "ckpt"

    def requests(self, root: Path, generation: int) -> list[SaveRequest]:
        """Returns the request of each rank."""
        self._num_requests += 1
        scenario = self.scenario
        request = SaveRequest(
            self.path(root),
            generation,
            num_ranks=scenario.num_ranks,
            store=str(self._directory / f"store{self._num_requests}"),
            # The thread of the save makes all calls but those of the writers, because strace counts by thread.
            config=replace(IN_ONE_THREAD, io_threads=scenario.io_threads),
            num_rows=scenario.num_rows,
            writer={
                "single_file_per_rank": not scenario.file_a_record,
                "overwrite": scenario.old or generation != NEW,
                "sync_files": scenario.sync,
            },
        )
        return [replace(request, rank=rank) for rank in scenario.ranks]

    def save_all(self, root: Path, generation: int) -> None:
        """Makes an undisturbed save in new processes."""
        pids = [self._server.start(save, request) for request in self.requests(root, generation)]
        for pid in pids:
            assert self._server.wait(pid).unwrap().errors == {}

    def generation_on_disk(self, root: Path) -> int | None:
        return generation_on_disk(self.path(root), self.scenario.ranks, self.scenario.num_rows)

    def comes_after_the_commit(self, call: Call) -> bool:
        return any(other.name.startswith("rename") for other in self.calls[: self.calls.index(call)])

    def kill(self, root: Path, call: Call, peer: Callable[[SaveRequest], object] = save) -> list[Outcome]:
        """Saves NEW, and kills the recorded rank just before it makes ``call``.

        Args:
            peer: The function that the other ranks run.

        Returns:
            How the other ranks ended.
        """
        pid, process, peers = self._start(root, peer)
        log = root.with_suffix(".log")
        with injected(pid, log, call.name, "signal=KILL", call.number, all_threads=call.thread != 0):
            process.send("go")
            outcome = self._server.wait(pid)
        assert outcome.was_killed, f"it ends otherwise: {outcome}"
        assert_was_hit(call, log, root, pid)
        return [self._server.wait(pid) for pid in peers]

    @contextmanager
    def failing(self, root: Path, call: Call, error: str) -> Iterator[list[Attempt]]:
        """Saves NEW while ``call`` of the recorded rank returns ``error``. Yields what came of it on each rank.

        When the context ends, the same processes save NEXT, which must succeed.
        """
        with closing(Meeting()) as meeting:
            both = zip(self.requests(root, NEW), self.requests(root, NEXT), strict=True)
            pids = [self._server.start(save_twice, meeting.address, first, then) for first, then in both]
            processes = [meeting.accept() for _ in pids]
        for process in processes:
            assert Meeting.receive(process) == "ready"
        pid, log = pids[self.scenario.rank], root.with_suffix(".log")
        with injected(pid, log, call.name, f"error={error}", call.number, all_threads=call.thread != 0):
            for process in processes:
                process.send("go")
            attempts = [Meeting.receive(process) for process in processes]
        assert_was_hit(call, log, root, pid)
        yield attempts
        for process in processes:
            process.send("go")
        for pid in pids:
            assert self._server.wait(pid).unwrap() == Attempt({}, ())

    def record(self, root: Path) -> list[Call]:
        """Saves NEW, and returns all calls of the rank of the scenario."""
        log = root.with_suffix(".log")
        pid, process, peers = self._start(root, save)
        with recorded(pid, log):
            process.send("go")
            outcomes = [self._server.wait(pid) for pid in (pid, *peers)]
        assert [outcome.unwrap().errors for outcome in outcomes] == [{}] * len(outcomes)
        return calls_in(log, root, pid)

    def _record(self) -> tuple[list[Call], list[Call]]:
        made = self.record(self.copy(self._directory / f"recorded{self._num_requests}"))
        several_files = self.scenario.file_a_record or self.scenario.num_ranks > 1
        calls = reachable(made, several_files=several_files)
        return calls, [call for call in made if call.files and call not in calls]

    def _start(self, root: Path, peer: Callable[[SaveRequest], object]) -> tuple[int, Connection, list[int]]:
        """Starts a save that begins when its process is told "go"; the peers wait for it."""
        requests = self.requests(root, NEW)
        with closing(Meeting()) as meeting:
            watched = requests[self.scenario.rank]
            pid = self._server.start(save_when_told, meeting.address, watched)
            peers = [self._server.start(peer, request) for request in requests if request is not watched]
            process = meeting.accept()
            assert meeting.receive(process) == "ready"
        return pid, process, peers


def assert_was_hit(call: Call, log: Path, root: Path, pid: int) -> None:
    made = calls_in(log, root, pid)
    assert any(call.is_like(other) for other in made), f"hit something else: {', '.join(map(str, made))}"


def is_of_journal(call: Call) -> bool:
    """Whether a call is for the journal in the folder of the checkpoint, which is no part of it."""
    return "/.bcp" in call.files


def one_of_each(calls: Iterable[Call]) -> list[Call]:
    """Returns the last call of each name."""
    return list({call.name: call for call in calls}.values())


def spread(calls: Sequence[Call], count: int, always: Sequence[Call] = ()) -> list[Call]:
    """Returns ``always``, and evenly spread others, so that there are ``count`` in all."""
    others = [call for call in calls if call not in always]
    more = max(count - len(always), 0)
    evenly = [others[(2 * number + 1) * len(others) // (2 * more)] for number in range(more)]
    return [call for call in calls if call in always or call in evenly]


def for_each(calls: Sequence[Call], trial: Callable[[Call], None]) -> None:
    """Runs ``trial`` for all calls, and then fails with everything that went wrong."""
    failures = []
    for call in calls:
        try:
            trial(call)
        except AssertionError as error:
            failures.append(f"{call}: {error}")
    assert not failures, f"{len(failures)} of {len(calls)}\n" + "\n".join(failures)
