# SPDX-License-Identifier: Apache-2.0
"""Tests SIGKILL at every named point of a save: the old or the new checkpoint is on disk, and the path is free.

Every case says at which hit of its point the process dies, and which generation must then load. If a save does not
reach the point, it ends normally, and the case fails.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.campaign import IS_LONG
from support.fork_server import ForkServer
from support.jobs import Job, run_job
from support.saves import (
    Attempt,
    SaveRequest,
    assert_only_own_files,
    generation_on_disk,
    load_then_save,
    save,
    save_then_look,
)

from bytecheckpoint.observability import read_failures
from faults.points import CASES, Case, Start, Starts
from faults.rehearsal import NEW, NEXT

NUM_RANKS = 4
OTHER = 2  # the rank that dies if neither the coordinator nor all ranks die


@pytest.fixture(scope="module")
def starts(server: ForkServer, failpoint_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Starts:
    return Starts(server, failpoint_server, tmp_path_factory.mktemp("starts"))


def test_every_point_has_a_case(failpoint_server: ForkServer) -> None:
    assert {case.point for case in CASES} == set(failpoint_server.info["failpoints"])
    assert len(failpoint_server.info["failpoints"]) >= 25


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kill(case: Case, failpoint_server: ForkServer, server: ForkServer, starts: Starts, tmp_path: Path) -> None:
    path = starts.copy(case.start, tmp_path)
    outcome = failpoint_server.run(save, case.request(path), env=case.env())
    assert outcome.was_killed, f"{case} was not reached: {outcome}"
    assert generation_on_disk(path) == case.found_after
    assert [record["phase"] for record in read_failures(path)] == case.told
    run_job(server, SaveRequest(path, NEXT))
    assert generation_on_disk(path) == NEXT
    assert_only_own_files(path)
    assert [record["phase"] for record in read_failures(path)] == case.told, "the next save keeps what is known"


@dataclass(frozen=True)
class Death:
    """Which of four ranks die when a save has reached a point, and how many ranks then load and save."""

    case: Case
    who: str
    next_ranks: int

    def __str__(self) -> str:
        return f"{self.case}-{self.who}-then_{self.next_ranks}"

    @property
    def dying(self) -> tuple[int, ...]:
        return {"one": (OTHER,), "coordinator": (0,), "all": tuple(range(NUM_RANKS))}[self.who]

    @property
    def stops(self) -> int:
        """Returns the rank that reaches the point, and waits there for the deaths."""
        return OTHER if self.case.is_of_every_rank and self.who != "coordinator" else 0

    @property
    def found_after(self) -> int | None:
        """Returns the generation that is there afterwards. A live coordinator that has what it needs commits."""
        case = self.case
        commits = self.who == "one" and case.all_have_written and not case.fails
        return NEW if commits else case.found_after


WHO, NEXT_RANKS = ("one", "coordinator", "all"), (1, 2, 3)


def deaths() -> Iterator[Death]:
    """Yields deaths. The long form has every case with every choice of dead ranks.

    The short form has every phase of a save with every choice: one choice at its beginning, one in its middle, one at
    its end.
    """
    everywhere = [case for case in CASES if not case.file_a_record]  # most ranks have only one tensor
    cases = [case for case in everywhere if case.start != Start.NOTHING]
    phases = [list(of) for _, of in itertools.groupby(sorted(cases, key=Case.phase), key=Case.phase)]
    for turn, of_one in enumerate([[case] for case in everywhere] if IS_LONG else phases):
        for number, who in enumerate(WHO):
            case = of_one[number * (len(of_one) - 1) // (len(WHO) - 1)]
            yield Death(case, who, NEXT_RANKS[(turn + number) % len(NEXT_RANKS)])


@pytest.mark.parametrize("death", list(deaths()), ids=str)
def test_kill_of_four(
    death: Death, failpoint_server: ForkServer, server: ForkServer, starts: Starts, tmp_path: Path
) -> None:
    case = death.case
    path = starts.copy(case.start, tmp_path, NUM_RANKS)
    # A coordinator that lives on after its peer died must not hold the path.
    looks = {0: save_then_look} if death.who == "one" and not case.all_have_written else {}
    job = Job(failpoint_server, case.request(path), NUM_RANKS, function_of=looks, env={death.stops: case.env("=stop")})
    assert job.stops(death.stops), f"{death} was not reached: {job.wait()}"
    job.kill(death.dying)
    job.go_on(death.stops)
    outcomes = job.wait()
    assert tuple(rank for rank, outcome in enumerate(outcomes) if outcome.was_killed) == death.dying
    if looks:
        assert outcomes[0].unwrap() == [], "a coordinator that lives on holds the path"
    assert generation_on_disk(path, job.ranks) == death.found_after
    next_ranks = tuple(range(death.next_ranks))
    if death.found_after is None:
        run_job(server, SaveRequest(path, NEXT), death.next_ranks)
    else:
        again = Job(server, SaveRequest(path, NEXT), death.next_ranks, function=load_then_save, arguments=(job.ranks,))
        for outcome in again.wait():
            assert outcome.unwrap() == (death.found_after, Attempt({}, ()))
    assert generation_on_disk(path, next_ranks) == NEXT
    assert_only_own_files(path)
