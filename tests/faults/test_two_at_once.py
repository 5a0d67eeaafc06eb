# SPDX-License-Identifier: Apache-2.0
"""Tests two jobs that save at one path, and readers of a path that a job overwrites: all see one whole generation."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
from support.campaign import Campaign
from support.fork_server import ForkServer, Meeting
from support.jobs import Job, run_job
from support.saves import SaveRequest, assert_only_own_files, generation_on_disk

from bytecheckpoint.errors import CheckpointBusyError, CheckpointChangedError, CheckpointSupersededError
from faults.workers import LoadAsked, SaveAsked, Saved, load_when_asked, save_behind_readers, save_when_asked

HOW = ("dcp.load", "register", "load_state_dict")


class Crew:
    """Ranks that together do what the test asks."""

    def __init__(self, server: ForkServer, function: Any, path: Path, num_ranks: int, first: int = 0) -> None:
        with closing(Meeting()) as meeting:
            self.job = Job(server, SaveRequest(path, first), num_ranks, function=function, arguments=(meeting.address,))
            by_rank = {
                Meeting.receive(connection): connection for connection in (meeting.accept() for _ in self.job.ranks)
            }
        self.connections: list[Connection] = [by_rank[rank] for rank in self.job.ranks]

    def ask(self, what: object) -> None:
        for connection in self.connections:
            connection.send(what)

    def answers(self) -> list[Any]:
        """Returns the answers by rank."""
        return [Meeting.receive(connection) for connection in self.connections]

    def end(self) -> None:
        """Closes the connections, which ends the ranks, and waits for them."""
        for connection in self.connections:
            connection.close()
        for outcome in self.job.wait():
            outcome.unwrap()


@contextmanager
def crew(server: ForkServer, function: Any, path: Path, num_ranks: int) -> Iterator[Crew]:
    crew = Crew(server, function, path, num_ranks)
    yield crew
    crew.end()


def committed(answers: list[Saved]) -> bool:
    """Whether the save of one job committed. Its ranks must agree, and only the other job may have caused an error."""
    errors = [error for answer in answers for error in answer.errors.values()]
    assert len(errors) in (0, len(answers)), errors
    assert {type(error) for error in errors} <= {CheckpointBusyError, CheckpointSupersededError}, errors
    return not errors


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_two_jobs(num_ranks: int, server: ForkServer, tmp_path: Path, campaign: Campaign) -> None:
    path = tmp_path / "ckpt"
    ranks = tuple(range(num_ranks))
    run_job(server, SaveRequest(path, 1), num_ranks)
    before = 1  # the generation that is there

    with (
        crew(server, save_when_asked, path, num_ranks) as one,
        crew(server, save_when_asked, path, num_ranks) as other,
    ):

        def save_alone() -> float:
            """Saves alone, which must succeed and sweep what a refused save left. Returns how many seconds it took."""
            nonlocal before
            before += 3
            begin = time.monotonic()
            one.ask(SaveAsked(before))
            assert all(answer.errors == {} for answer in one.answers())
            end = time.monotonic()
            assert generation_on_disk(path, ranks) == before
            assert_only_own_files(path)
            return end - begin

        save_s = min(save_alone() for _ in range(3))

        def trial(number: int, draw: random.Random) -> None:
            asked = [
                SaveAsked(
                    before + 1 + which,
                    take_over=draw.random() < 0.2,
                    patience_s=draw.choice([0.0, 0.0, 0.0, 0.0, 1.0]),
                )
                for which in (0, 1)
            ]
            one.ask(asked[0])
            # The second job begins with the first or during it. Before it holds the path the first may have let it go.
            wait(one.connections, draw.uniform(0, save_s / 2))
            other.ask(asked[1])
            answers = [one.answers(), other.answers()]
            commits = [save.generation for save, told in zip(asked, answers, strict=True) if committed(told)]
            held = [told[0].held for told in answers if not told[0].errors]
            # Both may have committed, but then one after the other: neither held the path while the other did.
            held.sort()
            assert all(earlier[1] <= later[0] for earlier, later in itertools.pairwise(held)), held
            last = {told[0].held: save.generation for save, told in zip(asked, answers, strict=True)}
            assert generation_on_disk(path, ranks) == (last[held[-1]] if held else before)
            save_alone()
            campaign.covered[("neither saved", "one of both saved", "saved one after the other")[len(commits)]] += 1
            for told in answers:
                for error in told[0].errors.values():
                    campaign.covered[f"{type(error).__name__}"] += 1

        campaign.run(trial, short=10, long=500)


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_readers_of_what_is_overwritten(num_ranks: int, server: ForkServer, tmp_path: Path, campaign: Campaign) -> None:
    path = tmp_path / "ckpt"
    run_job(server, SaveRequest(path, 1))
    saved = loaded = 1

    with crew(server, load_when_asked, path, num_ranks) as readers:
        writer = Crew(server, save_behind_readers, path, 1, first=saved + 1)

        def trial(number: int, draw: random.Random) -> None:
            nonlocal saved, loaded
            (reports,) = writer.connections
            while reports.poll(0):
                saved = reports.recv()
            how = draw.choice(HOW)
            readers.ask(LoadAsked(how))
            answers = readers.answers()
            generations = {answer.generation for answer in answers}
            errors = [error for answer in answers for error in answer.errors.values()]
            assert len(generations) == 1, f"{how}: ranks loaded different generations: {generations}"
            (generation,) = generations
            if generation is None:
                assert how == "dcp.load", f"{how} did not begin again: {errors}"
                assert all(answer.errors for answer in answers)
                assert {type(error) for error in errors} == {CheckpointChangedError}, errors
                campaign.covered[f"{how} told of a newer commit"] += 1
            else:
                assert generation >= max(saved, loaded), f"{how}: older than what was saved or loaded before"
                loaded = generation
                campaign.covered[f"{how} loaded"] += 1

        writer.ask("go")
        campaign.run(trial, short=20, long=1000)
        writer.end()
        campaign.covered["saves meanwhile"] = saved
