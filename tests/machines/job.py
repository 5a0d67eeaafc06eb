# SPDX-License-Identifier: Apache-2.0
"""The ranks of one machine: they save, stop where the test makes something happen, and write what they got.

Usage: job.py FOLDER CONTROL MACHINE MACHINES RANKS_OF_A_MACHINE CALL
"""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from bytecheckpoint import (
    BcpLoadPlanner,
    BcpReader,
    BcpSavePlanner,
    BcpWriter,
    Config,
    async_save_state_dict,
    latest,
    load_state_dict,
    new_group,
    save_state_dict,
)

FOLDER, CONTROL = Path(sys.argv[1]), Path(sys.argv[2])
MACHINE, MACHINES, RANKS = map(int, sys.argv[3:6])
CALL = sys.argv[6]
STALL_S = 4.0
CONFIG = Config(stall_timeout_s=STALL_S)
LIMIT_S = 120.0
STACKS_S = 60.0  # ranks that hang have written where, when the test gives up
# Enough keys that their names do not fit a packet: plans are data that a network may drop.
NUM_KEYS = 200
SLOW_BYTES, SLOW_BYTES_PER_S = 12 << 20, 1 << 20


def state(number: int) -> dict[str, Any]:
    """Returns a state that says in each value which save it is of."""
    rank = dist.get_rank()
    shared = {f"shared_{key}": torch.full((100,), float(number)) for key in range(NUM_KEYS)}
    return shared | {f"of_rank_{rank}": torch.full((5000,), float(number)), "number": number}


class Point:
    """Where the ranks stop, until the test has made something happen. Only once."""

    def __init__(self, rank: int) -> None:
        self._rank, self._was_here = rank, False

    def come(self) -> None:
        if self._was_here:
            return
        self._was_here = True
        (CONTROL / f"at.{self._rank}").touch()
        wait_for("go")


def wait_for(name: str) -> None:
    end = time.monotonic() + LIMIT_S
    while not (CONTROL / name).exists() and time.monotonic() < end:
        time.sleep(0.02)


class StoppingSave(BcpSavePlanner):
    """Comes to the point while it plans, or while it writes."""

    def __init__(self, point: Point, phase: str) -> None:
        super().__init__()
        self._point, self._phase = point, phase

    def create_local_plan(self) -> Any:
        if self._phase == "plan":
            self._point.come()
        return super().create_local_plan()

    def resolve_data(self, write_item: Any) -> Any:
        if self._phase == "write":
            self._point.come()
        return super().resolve_data(write_item)


class StoppingLoad(BcpLoadPlanner):
    """Comes to the point while it loads."""

    def __init__(self, point: Point) -> None:
        super().__init__()
        self._point = point

    def create_local_plan(self) -> Any:
        self._point.come()
        return super().create_local_plan()


def stop_in_finish(point: Point) -> None:
    theirs = BcpWriter.finish

    def finish(self: BcpWriter, metadata: Any, results: Any) -> None:
        point.come()
        theirs(self, metadata, results)

    BcpWriter.finish = finish  # type: ignore[method-assign]


def outcome_of(call: Callable[[], object]) -> dict[str, Any]:
    name, text, begin = "", "", time.monotonic()
    try:
        call()
    except BaseException as error:
        name, text = type(error).__name__, "\n".join([str(error), *getattr(error, "__notes__", [])])
    return {"error": name, "text": text, "seconds": time.monotonic() - begin, "ended_at": time.time()}


def trial(phase: str) -> list[dict[str, Any]]:
    """Makes the call during which something happens, and then, twice, another one."""
    path, point = FOLDER / "step", Point(dist.get_rank())
    save_state_dict(path, state(1), config=CONFIG)
    if phase == "load":
        first = outcome_of(lambda: load_state_dict(path, state(0), planner=StoppingLoad(point), config=CONFIG))
    else:
        if phase == "commit" and dist.get_rank() == 0:
            stop_in_finish(point)
        planner = StoppingSave(point, phase)
        first = outcome_of(lambda: save_state_dict(path, state(2), planner=planner, config=CONFIG))
    return [first, *(outcome_of(lambda: save_state_dict(path, state(3), config=CONFIG)) for _ in range(2))]


def use() -> list[dict[str, Any]]:
    """Uses every entry point once, and checks what was loaded."""

    def check(name: str, load: Callable[[dict[str, Any]], object], number: int) -> None:
        got = state(0)
        load(got)
        assert got["number"] == number, name
        assert all(torch.all(value == number) for value in got.values() if isinstance(value, torch.Tensor)), name

    def all_of_it() -> None:
        save_state_dict(FOLDER / "step_1", state(1), config=CONFIG)
        check("load", lambda got: load_state_dict(FOLDER / "step_1", got, config=CONFIG), 1)
        async_save_state_dict(FOLDER / "step_2", state(2), config=CONFIG).committed.result()
        shared = Config(stall_timeout_s=STALL_S, shared_reading="cooperative")
        check("shared", lambda got: load_state_dict(FOLDER / "step_2", got, config=shared), 2)
        group = new_group(stall_timeout=STALL_S)
        assert latest(FOLDER, process_group=group) == str(FOLDER / "step_2")
        dcp.save(state(3), storage_writer=BcpWriter(FOLDER / "step_3", config=CONFIG), process_group=group)
        check("dcp", lambda got: dcp.load(got, storage_reader=BcpReader(FOLDER / "step_3"), process_group=group), 3)
        report = save_state_dict(FOLDER / "step_4", state(4), config=CONFIG)
        if dist.get_rank() == 0:
            assert len(report.ranks) == MACHINES * RANKS

    return [outcome_of(all_of_it)]


def save_slowly() -> list[dict[str, Any]]:
    """Saves where a rank of the second machine takes far longer than ``stall_timeout_s`` to write or to sync."""
    mine = state(1) | {f"large_{dist.get_rank()}": torch.ones(SLOW_BYTES // 4)}
    is_slow = dist.get_rank() == RANKS
    config = dataclasses.replace(CONFIG, write_bytes_per_s=SLOW_BYTES_PER_S) if is_slow else CONFIG
    return [outcome_of(lambda: save_state_dict(FOLDER / "step", mine, config=config))]


def main(rank: int) -> None:
    torch.set_num_threads(1)
    with (CONTROL / f"stacks.{rank}").open("w") as stacks:
        faulthandler.dump_traceback_later(STACKS_S, file=stacks)
        work(rank)


def work(rank: int) -> None:
    try:
        dist.init_process_group("gloo", rank=rank, world_size=MACHINES * RANKS)
        dist.barrier()
        said = use() if CALL == "use" else save_slowly() if CALL == "save_slowly" else trial(CALL)
    except BaseException:
        said = [{"error": "the test itself", "text": traceback.format_exc(), "seconds": 0.0, "ended_at": 0.0}]
    unfinished = CONTROL / f".said.{rank}"
    unfinished.write_text(json.dumps(said))
    unfinished.rename(CONTROL / f"said.{rank}")
    wait_for("end")  # a rank that ends would break connections that others still use
    os._exit(0)


for local in range(RANKS):
    if os.fork() == 0:
        main(MACHINE * RANKS + local)
wait_for("end")
