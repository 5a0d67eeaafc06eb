# SPDX-License-Identifier: Apache-2.0
"""Two jobs that save at one path at once, each on a machine of its own: what one of them reports as saved is there."""

from __future__ import annotations

from support.saves import SaveRequest, attempt, generation_on_disk

from bytecheckpoint.errors import CheckpointBusyError, CheckpointSupersededError
from ground.mounts import Ground, Machines

ROUNDS = 6


def save(request: SaveRequest) -> str:
    """Returns how the save failed; empty if it has returned."""
    (error,) = attempt(request).errors.values() or [None]
    assert error is None or isinstance(error, CheckpointBusyError | CheckpointSupersededError), error
    return str(error or "")


def test_what_two_jobs_save_at_one_path_is_there(ground: Ground, machines: Machines) -> None:
    paths = [view / "two_jobs" for view in ground.views]
    stored: int | None = None
    for number in range(0, 2 * ROUNDS, 2):
        pids = [machines[job].start(save, SaveRequest(path, number + job)) for job, path in enumerate(paths)]
        failures = [machines[job].wait(pid).unwrap() for job, pid in enumerate(pids)]
        saved = [number + job for job, failure in enumerate(failures) if not failure]
        found, other = (machines[job].run(generation_on_disk, path).unwrap() for job, path in enumerate(paths))
        assert found in (saved or [stored]), failures
        assert other == found
        stored = found
    assert stored is not None, failures
