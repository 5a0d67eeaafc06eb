# SPDX-License-Identifier: Apache-2.0
"""A rank of torchtitan's manager in tiers: it loads steps, trains on, saves, and writes what it got.

Usage: titan_job.py FOLDER CONTROL RANK RANKS JSON

JSON has ``tier``: the arguments of ``MemoryTier``, or nothing; ``options``: those of ``Tiers``; ``loads``: values of
``checkpoint.load_step`` to load one after the other; ``trains_to``: the last step, of which every second is saved.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.titan import Job, digests, on_cpu

FOLDER, CONTROL = Path(sys.argv[1]), Path(sys.argv[2])
RANK, RANKS = int(sys.argv[3]), int(sys.argv[4])
ASKED = json.loads(sys.argv[5])
LIMIT_S = 120.0


def loaded(job: Job, manager: Any, step: int) -> dict[str, Any]:
    """Loads a step; returns which it was, from where, and what is there now."""
    try:
        if not manager.load(step=step):
            return {"step": None}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    place = str(manager._loaded.path).rpartition("/")[0].removeprefix(f"{FOLDER}/")
    return {"step": job.train_state.step, "from": place.partition("://")[0], "state": digests(job.state())}


def worked() -> dict[str, Any]:
    on_cpu()
    from bytecheckpoint.torchtitan import BcpCheckpointManager

    tiers = {**ASKED["options"], **({"memory": ASKED["tier"]} if ASKED["tier"] else {})}
    config = BcpCheckpointManager.Config(
        enable=True, folder="run", interval=2, async_mode="async", engine={"tiers": tiers, "stall_timeout_s": 10.0}
    )
    job = Job(seed=len(ASKED.get("loads", ())))
    manager = job.manager(config, FOLDER)
    said: dict[str, Any] = {"loads": [loaded(job, manager, step) for step in ASKED.get("loads", ())]}
    job.resume()
    while job.train_state.step < ASKED.get("trains_to", 0):
        job.step(manager)
        manager.save(job.train_state.step)
    manager.maybe_wait_for_saving()
    if ASKED.get("closes"):
        manager.close()
    return {**said, "state": digests(job.state())}


def say(name: str, what: object) -> None:
    (CONTROL / f"{name}.{RANK}.tmp").write_text(json.dumps(what))
    (CONTROL / f"{name}.{RANK}.tmp").rename(CONTROL / f"{name}.{RANK}")


def main() -> None:
    faulthandler.dump_traceback_later(80.0, file=(CONTROL / f"stacks.{RANK}").open("w"))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=RANK, world_size=RANKS, timeout=timedelta(seconds=60))
    said: dict[str, Any] = {}
    try:
        said = worked()
    except BaseException:
        said["error"] = traceback.format_exc()
    say("said", said)
    end = time.monotonic() + LIMIT_S
    while not (CONTROL / "end").exists() and time.monotonic() < end:
        time.sleep(0.02)
    say("here", [])
    os._exit(0)  # as a job that was killed: it says nothing to anybody


main()
