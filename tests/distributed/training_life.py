# SPDX-License-Identifier: Apache-2.0
"""A small training job that saves in every way, while its groups and processes end at random times."""

from __future__ import annotations

import atexit
import os
import random
import signal
import threading
import time
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from bytecheckpoint import Retention, register, save_state_dict, scan_steps, shutdown
from distributed.worlds import LIMIT_S, save, sharded

__all__ = ["BEGUN", "COMMITTED", "live"]

# First words of lines of the log. A step and the number of ranks follow.
BEGUN, COMMITTED = "begun", "committed"

_INIT_TIMEOUT = timedelta(seconds=10)
_LONGEST_LIFE_S = 0.6


class _Job:
    """One rank of the job."""

    def __init__(self, rank: int, num_ranks: int, root: Path, stores: Path, seed: str) -> None:
        self.rank, self.num_ranks, self.root, self._stores = rank, num_ranks, root, stores
        self.together = random.Random(seed)  # draws the same on all ranks
        self.alone = random.Random(f"{seed} {rank}")
        self._num_worlds = 0
        self._log = os.open(root / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def begin_world(self) -> None:
        store = f"file://{self._stores}/{self._num_worlds}"
        self._num_worlds += 1
        dist.init_process_group(
            "gloo", init_method=store, rank=self.rank, world_size=self.num_ranks, timeout=_INIT_TIMEOUT
        )
        dist.barrier()  # a rank that destroyed it at once would break connections that others still make

    def say(self, what: str, step: int) -> None:
        os.write(self._log, f"{what} {step} {self.num_ranks}\n".encode())

    def first_step(self) -> int:
        """Returns the step after the newest one, the same on all ranks."""
        steps = [0]
        if self.rank == 0:
            steps = [max((folder.step for folder in scan_steps(self.root / "run")), default=0) + 1]
        dist.broadcast_object_list(steps)
        return steps[0]

    def save(self, step: int) -> None:
        how = self.together.choice(("own", "parts", "registered", "now", "registered now"))
        folder = self.root / "run"
        self.say(BEGUN, step)
        if how == "parts":
            self.note(step, save(how, folder, step))
        elif how in ("own", "registered"):
            self.note(step, save(how, folder / f"step-{step}", step))
        else:
            state = {"model": {"weight": sharded(step)}, "of_rank": {str(self.rank): step}}
            if how == "now":
                save_state_dict(folder / f"step-{step}", state)
            else:
                dcp.save(state, checkpoint_id=folder / f"step-{step}")
            self.say(COMMITTED, step)

    def note(self, step: int, future: Future[Any]) -> None:
        def tell(ended: Future[Any]) -> None:
            if ended.exception() is None:
                self.say(COMMITTED, step)

        future.add_done_callback(tell)

    def what_all_do(self) -> None:
        """Does between two steps what all ranks do together."""
        event = self.together.choice(("nothing", "nothing", "barrier", "new world", "prune", "shutdown"))
        if event == "barrier":
            dist.barrier()
        elif event == "new world":
            dist.destroy_process_group()
            self.begin_world()
        elif event == "prune" and self.rank == 0:
            Retention(self.root / "run", keep_latest=2).after_save()
        elif event == "shutdown":
            shutdown(LIMIT_S)

    def what_one_does(self) -> None:
        if self.alone.random() < 0.1:
            child = os.fork()
            if child == 0:
                os._exit(0)
            os.waitpid(child, 0)


def live(rank: int, num_ranks: int, root: Path, stores: Path, seed: str) -> None:
    """Runs one rank of a job, until it ends by itself or is killed."""
    job = _Job(rank, num_ranks, root, stores, seed)
    if job.alone.random() < 0.25:
        when = job.alone.uniform(0, _LONGEST_LIFE_S)
        threading.Thread(target=partial(_die, when), daemon=True).start()
    register()
    job.begin_world()
    first = job.first_step()
    for step in range(first, first + job.together.randint(1, 5)):
        job.save(step)
        job.what_one_does()
        job.what_all_do()
    end = job.together.choice(("returns", "destroys", "waits", "vanishes"))
    if end == "vanishes" and job.alone.random() < 0.5:
        os._exit(0)
    if end == "destroys":
        dist.destroy_process_group()
    elif end == "waits":
        shutdown(LIMIT_S)
    # This is what the interpreter does at its end, except for unloading torch, which takes seconds.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    os._exit(0)


def _die(when_s: float) -> None:
    time.sleep(when_s)
    os.kill(os.getpid(), signal.SIGKILL)
