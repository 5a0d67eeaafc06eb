# SPDX-License-Identifier: Apache-2.0
"""Ranks save over one path again and again, and die at random times: every round finds one whole generation.

Nothing is cleaned between rounds: the next saves find what a death leaves.
"""

from __future__ import annotations

import random
import time
from contextlib import closing
from multiprocessing.connection import Connection, wait
from pathlib import Path

import pytest
from support.campaign import Campaign
from support.fork_server import LIMIT_S, ForkServer, Meeting
from support.jobs import Job, run_job
from support.saves import BOTH_RANKS, SaveRequest, assert_only_own_files, generation_on_disk

from faults.workers import save_until_killed

WARM_UP = 4


class Trainer:
    """Two ranks that save one generation after another, as soon as ``begin`` is called."""

    def __init__(self, server: ForkServer, path: Path, first: int) -> None:
        with closing(Meeting()) as meeting:
            self.job = Job(
                server,
                SaveRequest(path, first),
                len(BOTH_RANKS),
                function=save_until_killed,
                arguments=(meeting.address,),
            )
            self._open = [meeting.accept() for _ in self.job.ranks]
        for connection in self._open:
            Meeting.receive(connection)
        self.reported = first - 1  # the last generation that a rank reported as saved

    def begin(self) -> None:
        for connection in self._open:
            connection.send("go")

    def listen(self, seconds: float, until: int | None = None) -> None:
        """Receives reports for ``seconds``, until generation ``until`` is saved, or until all ranks have died."""
        end = time.monotonic() + seconds
        while self._open and (until is None or self.reported < until):
            left = end - time.monotonic()
            if left <= 0:
                return
            for connection in wait(self._open, left):
                assert isinstance(connection, Connection)
                try:
                    self.reported = max(self.reported, connection.recv())
                except (EOFError, ConnectionResetError):
                    connection.close()
                    self._open.remove(connection)

    def end(self) -> None:
        """Receives all remaining reports, and waits for ranks that live on without their peer."""
        self.listen(LIMIT_S)
        self.job.wait()


@pytest.mark.timeout(7200)
def test_kill_at_random(server: ForkServer, tmp_path: Path, campaign: Campaign) -> None:
    path = tmp_path / "ckpt"
    trainer = Trainer(server, path, 1)
    trainer.begin()
    trainer.listen(LIMIT_S, until=1)
    begin = time.monotonic()
    trainer.listen(LIMIT_S, until=WARM_UP)
    save_s = (time.monotonic() - begin) / (WARM_UP - 1)
    trainer.job.kill(trainer.job.ranks)
    trainer.end()
    found = generation_on_disk(path, BOTH_RANKS)

    def trial(number: int, draw: random.Random) -> None:
        nonlocal found
        assert found is not None
        trainer = Trainer(server, path, found + 1)
        dying = draw.choice([(0,), (1,), BOTH_RANKS])
        # The first save of a process takes longer.
        lives_s = draw.uniform(0, 4 * save_s)
        trainer.begin()
        trainer.listen(lives_s)
        trainer.job.kill(dying)
        trainer.end()
        found = generation_on_disk(path, BOTH_RANKS)
        # It is what was reported last, or the one save that was under way and had not reported yet.
        assert found in (trainer.reported, trainer.reported + 1)
        campaign.covered["found what was reported" if found == trainer.reported else "found what was not yet"] += 1
        campaign.covered[f"deaths of {'both ranks' if len(dying) == 2 else f'rank {dying[0]}'}"] += 1

    campaign.run(trial, short=50, long=2000)
    assert found is not None
    run_job(server, SaveRequest(path, found + 1), len(BOTH_RANKS))
    assert generation_on_disk(path, BOTH_RANKS) == found + 1
    assert_only_own_files(path)
