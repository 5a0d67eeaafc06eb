# SPDX-License-Identifier: Apache-2.0
"""A rank that saves to the memory of several machines, or goes on from there, and writes what it got.

Usage: memory_job.py FOLDER CONTROL RANK RANKS JSON

JSON has ``tier``: the arguments of ``MemoryTier``, or null; ``disk``: whether there is a near disk, too; ``durable``: a
folder or URL, or nothing; ``options``: for the store of that; ``near_every``: as in ``Tiers``; ``io_timeout_s``: as in
``Config``; ``look_s``: for how long a durable place may be silent; ``alone``: a step that each rank loads by itself at
first; ``resumes``: whether the newest is loaded then; ``loads``: a step that is loaded then by its number;
``ranks_saved``: how many ranks have saved what is loaded; ``saves``: numbers of steps to save; ``in_background``: how;
``overwrite``: whether they may be there; ``waits_before``: the one before which it waits for the test; ``pauses``:
others before which it does; ``others``: whether the other ways to save are tried; ``just_ends``: whether copies are not
waited for.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import sys
import time
import traceback
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import bytecheckpoint
from bytecheckpoint import Config, MemoryTier, Tiers
from bytecheckpoint.storage import far_looks
from bytecheckpoint.storage.memory.client import HolderClient

FOLDER, CONTROL = Path(sys.argv[1]), Path(sys.argv[2])
RANK, RANKS = int(sys.argv[3]), int(sys.argv[4])
ASKED = json.loads(sys.argv[5])
NUMEL = 200_000
LIMIT_S = 120.0
CONFIG = Config(stall_timeout_s=4.0, io_timeout_s=ASKED.get("io_timeout_s", Config.io_timeout_s))


def state(step: int, ranks: range) -> dict[str, Any]:
    """Returns what some ranks save at a step: each value says which rank and which step it is of."""
    return {f"of_{rank}": torch.arange(NUMEL, dtype=torch.float64) + 1000 * step + rank for rank in ranks} | {
        "step": torch.tensor(step)
    }


def wait_for(name: str) -> None:
    end = time.monotonic() + LIMIT_S
    while not (CONTROL / name).exists():
        assert time.monotonic() < end, f"{name} does not come"
        time.sleep(0.02)


def resumed(tiers: Tiers) -> dict[str, Any]:
    """Loads the newest state into every rank, whoever had which part, and compares it."""
    into = {name: torch.zeros_like(value) for name, value in state(0, range(ASKED["ranks_saved"])).items()}
    begin = time.monotonic()
    found = bytecheckpoint.resume(tiers, into, config=CONFIG)
    say("resume_s", time.monotonic() - begin)
    if found is None:
        return {"step": None}
    for name, wanted in state(found.step, range(ASKED["ranks_saved"])).items():
        assert torch.equal(into[name], wanted), f"{name} is not that of step {found.step}"
    return {"step": found.step, "from": place_of(found.path)}


def loaded(tiers: Tiers, step: int) -> str:
    """Loads a step into every rank, and compares it; returns where it was loaded from."""
    into = {name: torch.zeros_like(value) for name, value in state(0, range(ASKED["ranks_saved"])).items()}
    begin = time.monotonic()
    path = bytecheckpoint.load_state_dict(tiers / f"step-{step}", into, config=CONFIG).path
    say("load_s", time.monotonic() - begin)
    assert all(torch.equal(into[name], value) for name, value in state(step, range(ASKED["ranks_saved"])).items())
    return place_of(path)


def loaded_alone(tiers: Tiers, step: int) -> str:
    """Loads a step in this process alone, which knows of no other machine; returns where it was loaded from."""
    into = {name: torch.zeros_like(value) for name, value in state(0, range(ASKED["ranks_saved"])).items()}
    path = bytecheckpoint.load_state_dict(tiers / f"step-{step}", into, no_dist=True).path
    assert torch.equal(into["of_2"], state(step, range(3))["of_2"])
    return place_of(path)


def place_of(path: str) -> str:
    return "held" if path.startswith("held://") else "disk"


def saved_and_loaded_by_other_calls(tiers: Tiers) -> list[int]:
    """Saves a step by each of the other ways to save, and loads the newest of each; returns their numbers."""
    torch.manual_seed(0)
    model = torch.nn.Linear(300, 300)
    with torch.no_grad():
        model.weight.copy_(torch.arange(90_000).view(300, 300))
    handle = bytecheckpoint.async_save_state_dict(tiers / "step-11", state(11, range(RANK, RANK + 1)), config=CONFIG)
    assert handle.near.result().tier == "near"
    assert resumed(tiers)["step"] == 11
    saving = bytecheckpoint.save(tiers, {"model": model}, "ddp", global_steps=12, fast_saving=True, config=CONFIG)
    saving.committed.result()
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        model.weight.zero_()
    bytecheckpoint.load(tiers / "global_step_12", {"model": model}, "ddp", config=CONFIG)
    assert all(torch.equal(value, wanted[name]) for name, value in model.state_dict().items())
    bytecheckpoint.register(tiers=tiers, config=CONFIG)
    dcp.save({"model": model.state_dict()}, checkpoint_id="run/step-13")
    # What was lent before it was saved again is not what is loaded.
    bytecheckpoint.save_state_dict(tiers / "step-11", state(15, range(RANK, RANK + 1)), config=CONFIG)
    into = {name: torch.zeros_like(value) for name, value in state(0, range(RANKS)).items()}
    dcp.load(into, checkpoint_id="run/step-11")
    assert all(torch.equal(value, into[name]) for name, value in state(15, range(RANKS)).items())
    bytecheckpoint.unregister()
    assert str(bytecheckpoint.latest(tiers)).endswith("/step-11")
    of_olmo = tiers / "step10/model_and_optim"  # as OLMo-core's trainer names it
    bytecheckpoint.save_state_dict(of_olmo, state(10, range(RANK, RANK + 1)), config=CONFIG)
    bytecheckpoint.load_state_dict(of_olmo, into, config=CONFIG)
    assert all(torch.equal(value, into[name]) for name, value in state(10, range(RANKS)).items())
    files = [file for file in Path("/proc").glob("[0-9]*/fd/*") if ".distcp (deleted)" in os.path.realpath(file)]
    assert not files, files  # of what was replaced
    return [step.step for step in bytecheckpoint.scan_steps(FOLDER / "run") if step.state == "part"]


def saved(tiers: Tiers) -> dict[str, str]:
    """Saves steps; returns where each was committed, or why not."""
    outcomes = {}
    for step in ASKED.get("saves", ()):
        if step == ASKED.get("waits_before"):
            (CONTROL / f"at.{RANK}").touch()
            wait_for("go")
        path, overwrite = tiers / f"step-{step}", ASKED.get("overwrite", True)
        if step in ASKED.get("pauses", ()):
            (CONTROL / f"at.{RANK}.{step}").touch()
            wait_for(f"go.{step}")
        begin = time.monotonic()
        try:
            of_rank = state(step, range(RANK, RANK + 1))
            if ASKED.get("in_background"):
                handle = bytecheckpoint.async_save_state_dict(path, of_rank, overwrite=overwrite, config=CONFIG)
                say(f"blocked.{step}", time.monotonic() - begin)
                report = handle.committed.result()
            else:
                report = bytecheckpoint.save_state_dict(path, of_rank, overwrite=overwrite, config=CONFIG)
            outcomes[str(step)] = report.tier
            say(f"seconds.{step}", time.monotonic() - begin)
            (CONTROL / f"saved.{RANK}.{step}").touch()
        except Exception as error:
            outcomes[str(step)] = f"{type(error).__name__}: {error}"
            break
    return outcomes


def say(name: str, what: object) -> None:
    (CONTROL / f"{name}.{RANK}.tmp").write_text(json.dumps(what))
    (CONTROL / f"{name}.{RANK}.tmp").rename(CONTROL / f"{name}.{RANK}")


def main() -> None:
    logging.basicConfig(filename=CONTROL / f"log.{RANK}")
    faulthandler.dump_traceback_later(60.0, file=(CONTROL / f"stacks.{RANK}").open("w"))
    dist.init_process_group("gloo", rank=RANK, world_size=RANKS, timeout=timedelta(seconds=60))
    tiers = Tiers(
        memory=MemoryTier(**ASKED["tier"]) if ASKED["tier"] else None,
        near=FOLDER / "run" if ASKED.get("disk") else "",
        durable=ASKED.get("durable", ""),
        near_every=ASKED.get("near_every", 1),
        config=replace(CONFIG, storage_options=ASKED["options"]) if ASKED.get("options") else None,
    )
    if "look_s" in ASKED:
        far_looks._MOST_LOOK_S = ASKED["look_s"]
    said: dict[str, Any] = {}
    try:
        if ASKED.get("alone"):
            said["alone"] = loaded_alone(tiers, ASKED["alone"])
        if ASKED.get("resumes"):
            said["resumed"] = resumed(tiers)
        if ASKED.get("loads"):
            said["loaded"] = loaded(tiers, ASKED["loads"])
        said["saved"] = saved(tiers)
        if ASKED.get("others"):
            said["others"] = saved_and_loaded_by_other_calls(tiers)
        if ASKED.get("durable") and not ASKED.get("just_ends"):
            bytecheckpoint.shutdown()
    except BaseException:
        said["error"] = traceback.format_exc()
    say("said", said)
    wait_for("end")
    # When all ranks have said what they got.
    here = HolderClient(tiers.in_memory).everything("") if tiers.memory else ()
    say("here", [each.name for each in here])
    os._exit(0)  # as a job that was killed: it says nothing to anybody


main()
