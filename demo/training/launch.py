# SPDX-License-Identifier: Apache-2.0
"""Starts the ranks of a job, listens to them, and ends them."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from multiprocessing.queues import Queue

import torch.multiprocessing as mp
from torch.multiprocessing.spawn import ProcessException

from training.job import Event, Job, JobOptions, run_rank

# The parent waits this much longer than the ranks' own time limit, so that the ranks report where they hung.
GRACE_S = 10.0


class DemoError(Exception):
    """The demo has failed."""


def run_job(job: Job, num_ranks: int, options: JobOptions, tell: Callable[[Event], None]) -> None:
    """Runs the ranks of a job and passes on their events. Raises if a rank fails or the time limit passes."""
    events = mp.get_context("spawn").Queue()
    deadline = time.monotonic() + options.time_limit_s + GRACE_S
    context = mp.start_processes(
        run_rank,
        args=(num_ranks, job, options, events),
        nprocs=num_ranks,
        join=False,
        daemon=True,
        start_method="spawn",
    )
    try:
        while not context.join(timeout=0):
            pass_on_events(events, tell)
            if time.monotonic() > deadline:
                raise DemoError(f"{job.__name__} on {num_ranks} ranks has not ended in {options.time_limit_s} s")
        pass_on_events(events, tell)
    except ProcessException as error:
        raise DemoError(f"{job.__name__} on {num_ranks} ranks: {error}") from error
    finally:
        for process in context.processes:
            process.kill()
            process.join()


def pass_on_events(events: Queue[Event], tell: Callable[[Event], None]) -> None:
    """Passes on all events, until none arrives for 0.1 s."""
    try:
        while True:
            tell(events.get(timeout=0.1))
    except queue.Empty:
        return
