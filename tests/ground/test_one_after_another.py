# SPDX-License-Identifier: Apache-2.0
"""One machine dies in a save, or saves again and again, and the other one goes on or reads."""

from __future__ import annotations

import time
from pathlib import Path

from support.saves import CONFIG, SaveRequest, assert_only_own_files, attempt, generation_of, generation_on_disk, load
from torch.distributed.checkpoint.api import CheckpointException

from bytecheckpoint import BcpReader
from bytecheckpoint.errors import CheckpointChangedError
from ground.mounts import Ground, Machines

OLD, NEW, NEXT = 1, 2, 3
# Which generation loads after a death there: all data is written; the rename is done.
POINTS = {"write_data_done": OLD, "commit_renamed": NEW}


def save(request: SaveRequest) -> None:
    assert attempt(request).errors == {}


def check(path: Path, generation: int) -> None:
    assert generation_on_disk(path) == generation


def save_once_more(path: Path) -> None:
    save(SaveRequest(path, NEXT))
    check(path, NEXT)
    assert_only_own_files(path)


def test_another_machine_saves_where_one_has_died(
    ground: Ground, machines: Machines, mortal_machines: Machines
) -> None:
    for point, left in POINTS.items():
        here, there = (view / f"killed_{point}" for view in ground.views)
        machines[0].run(save, SaveRequest(here, OLD)).unwrap()
        outcome = mortal_machines[0].run(attempt, SaveRequest(here, NEW), env={"BCP_FAILPOINT": point})
        assert outcome.was_killed, outcome
        for machine, path in zip(machines, (here, there), strict=True):
            machine.run(check, path, left).unwrap()
        machines[1].run(save_once_more, there).unwrap()
        machines[0].run(check, here, NEXT).unwrap()


NUM_SAVES = 12


def save_again_and_again(path: Path) -> None:
    for generation in range(1, NUM_SAVES + 1):
        save(SaveRequest(path, generation))


def load_again_and_again(path: Path, limit_s: float) -> list[int | str]:
    """Loads until it gets the last generation. Returns what each load gave: a generation, or that it has changed."""
    got: list[int | str] = []
    until = time.monotonic() + limit_s
    while NUM_SAVES not in got and time.monotonic() < until:
        try:
            got.append(generation_of(load(BcpReader(path, config=CONFIG))))
        except CheckpointException as failed:
            for error, _ in failed.failures.values():
                if not isinstance(error, CheckpointChangedError):
                    raise
            got.append("changed")
    return got


# Longer than any of them shows an old checkpoint, but for rclone.
_FRESH_S = 30.0


def test_a_reader_beside_a_writer_gets_whole_generations(ground: Ground, machines: Machines) -> None:
    here, there = (view / "read_beside" for view in ground.views)
    machines[0].run(save, SaveRequest(here, 0)).unwrap()
    machines[1].run(check, there, 0).unwrap()
    reading = machines[1].start(load_again_and_again, there, _FRESH_S)
    machines[0].run(save_again_and_again, here).unwrap()
    got = machines[1].wait(reading).unwrap()
    generations = [each for each in got if each != "changed"]
    assert generations == sorted(generations), got
    assert got[-1] == NUM_SAVES, got
