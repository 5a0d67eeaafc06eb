# SPDX-License-Identifier: Apache-2.0
"""A save whose system calls are recorded once, so that others like it can be disturbed at any of these calls."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

from faults.fork_server import ForkServer, Meeting, Outcome
from faults.saves import (
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

__all__ = ["NEW", "NEXT", "OLD", "Rehearsal", "Scenario", "for_each", "one_of_each", "spread"]

# Generations: of what is there, of the save that is disturbed, of the one after it.
OLD, NEW, NEXT = 1, 2, 3


@dataclass(frozen=True)
class Scenario:
    """What a save finds at its path, and how it writes.

    Attributes:
        old: There is a checkpoint, of generation OLD. Else the save is told not to overwrite one, and commits by
            another system call.
        remains: An earlier save died when its files were complete: they are there, and its tmp.
        file_a_record: Several files.
        num_rows: Of the largest tensor; see ``saves.state``.
        io_threads: With more than one, which of them makes what call is chance, and cannot be aimed at.
        num_ranks: That save.
        rank: Whose calls are recorded.
        sync: As ``sync_files`` of the writer.
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
        calls: Those at which another such save can be stopped, in order.
        left_out: The others; see ``strace.reachable``.
    """

    def __init__(self, scenario: Scenario, server: ForkServer, directory: Path) -> None:
        self.scenario = scenario
        self._server = server
        self._directory = directory
        self._num_requests = 0
        directory.mkdir(exist_ok=True)
        self._template = directory / "template"
        # Also for a first save: the first of all may have to compile modules that it imports.
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
        """A directory as the saves find it."""
        return Path(shutil.copytree(self._template, root))

    @staticmethod
    def path(root: Path) -> Path:
        """Of the checkpoint. A first save has to make two directories."""
        return root / "new" / "ckpt"

    def requests(self, root: Path, generation: int) -> list[SaveRequest]:
        """What each rank is asked to save."""
        self._num_requests += 1
        scenario = self.scenario
        request = SaveRequest(
            self.path(root),
            generation,
            num_ranks=scenario.num_ranks,
            store=str(self._directory / f"store{self._num_requests}"),
            # All calls but those of the writers in the thread of the save, since strace counts by thread.
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
        """Saves, undisturbed, in new processes."""
        pids = [self._server.start(save, request) for request in self.requests(root, generation)]
        for pid in pids:
            assert self._server.wait(pid).unwrap().errors == {}

    def generation_on_disk(self, root: Path) -> int | None:
        return generation_on_disk(self.path(root), self.scenario.ranks, self.scenario.num_rows)

    def comes_after_the_commit(self, call: Call) -> bool:
        return any(other.name.startswith("rename") for other in self.calls[: self.calls.index(call)])

    def kill(self, root: Path, call: Call, peer: Callable[[SaveRequest], object] = save) -> list[Outcome]:
        """Saves NEW, and kills the rank that was recorded, just before it makes ``call``.

        Args:
            peer: What the other ranks do.

        Returns:
            How the others ended.
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
        """Saves NEW; ``call`` of the rank that was recorded returns ``error``. Gives what each rank was told.

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
        """Saves NEW, and returns all calls of the rank that is looked at."""
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
        """A save that waits to be told before it begins; the peers wait for it."""
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


def one_of_each(calls: Iterable[Call]) -> list[Call]:
    """The last of each name."""
    return list({call.name: call for call in calls}.values())


def spread(calls: Sequence[Call], count: int, always: Sequence[Call] = ()) -> list[Call]:
    """``always``, and evenly as many others as make ``count``."""
    others = [call for call in calls if call not in always]
    more = max(count - len(always), 0)
    evenly = [others[(2 * number + 1) * len(others) // (2 * more)] for number in range(more)]
    return [call for call in calls if call in always or call in evenly]


def for_each(calls: Sequence[Call], trial: Callable[[Call], None]) -> None:
    """Tries all of them, and then fails with everything that went wrong."""
    failures = []
    for call in calls:
        try:
            trial(call)
        except AssertionError as error:
            failures.append(f"{call}: {error}")
    assert not failures, f"{len(failures)} of {len(calls)}\n" + "\n".join(failures)
