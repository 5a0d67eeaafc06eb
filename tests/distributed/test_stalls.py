# SPDX-License-Identifier: Apache-2.0
"""Where a save waits for one rank, the logs of the others name it. So does a save that was far slower than usual."""

from __future__ import annotations

import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.ranks import run_ranks

import bytecheckpoint
from bytecheckpoint import BcpReader, BcpSavePlanner, BcpWriter, Config, save_state_dict
from bytecheckpoint.calls.stalls import NamedCall
from bytecheckpoint.observability import flush
from bytecheckpoint.runtime.place import Place, own_place
from distributed.losing import store
from distributed.reported import logged

NUM_RANKS, VICTIM = 4, 2
LIMIT_S = 100.0
LINE_LIMIT_S = 30.0  # a line that does not come must fail the test, and not only make it slow
SOON = Config(stall_timeout_s=1)


def own_state() -> dict[str, Any]:
    return {f"of {dist.get_rank()}": torch.full((100,), dist.get_rank())}


def pids() -> list[int]:
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, os.getpid())
    return of_all


class Line:
    """Waits in a thread of its own for a line of the log, then calls ``then``."""

    def __init__(self, pattern: str, lines: list[str], then: Any) -> None:
        self.found = ""
        self._pattern, self._lines, self._then = re.compile(pattern), lines, then
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        tick = threading.Event()
        for _ in range(round(LINE_LIMIT_S / 0.05)):
            matching = [line for line in list(self._lines) if self._pattern.search(line)]
            if matching:
                self.found = matching[0]
                break
            tick.wait(0.05)
        self._then()

    def join(self) -> str:
        self._thread.join()
        assert self.found, f"no line is like {self._pattern.pattern}: {self._lines}"
        return self.found


class Stopping(BcpSavePlanner):
    """Stops its process in the middle of writing."""

    def resolve_data(self, write_item: Any) -> Any:
        os.kill(os.getpid(), signal.SIGSTOP)
        return super().resolve_data(write_item)


def stop_one(path: Path) -> str:
    lines, of_all, rank = logged(), pids(), dist.get_rank()

    def let_go() -> None:
        store().add("have seen it", 1)
        if rank == 0:
            store().wait(["go"])
            os.kill(of_all[VICTIM], signal.SIGCONT)
        elif store().add("have seen it", 0) == NUM_RANKS - 1:
            store().set("go", "")

    planner = Stopping() if rank == VICTIM else BcpSavePlanner()
    state = own_state()
    wanted = rf"rank {VICTIM} is in phase write .*pid {of_all[VICTIM]}, stopped by a signal"
    waiting = None if rank == VICTIM else Line(wanted, lines, let_go)
    if rank == 0:

        def pass_on() -> None:
            while store().add("have seen it", 0) < NUM_RANKS - 1:
                threading.Event().wait(0.02)
            store().set("go", "")

        passing = threading.Thread(target=pass_on)
        passing.start()
    dcp.save(state, storage_writer=BcpWriter(path, config=SOON), planner=planner)
    if rank == 0:
        passing.join()
    return "" if waiting is None else waiting.join()


def test_a_rank_that_is_stopped_is_named_by_all_others(tmp_path: Path) -> None:
    said = run_ranks(NUM_RANKS, stop_one, tmp_path, limit_s=2 * LIMIT_S)
    for rank, line in enumerate(said):
        if rank != VICTIM:
            assert re.match(
                rf"save\({re.escape(str(tmp_path))}\), rank {rank}: no progress for \d+ s, in phase wait .*; "
                rf"rank {VICTIM} is in phase write for \d+ s",
                line,
            ), line
    dcp.load({"of 3": torch.zeros(100, dtype=torch.int64)}, storage_reader=BcpReader(tmp_path), no_dist=True)


def come_late(path: Path) -> str:
    lines, rank, state = logged(), dist.get_rank(), own_state()
    watching = None
    if rank == VICTIM:
        store().wait(["go"])
    elif rank == 0:
        wanted = rf"save\(.*\), rank 0: .* in phase exchange .*nothing of this call is seen of rank {VICTIM} on"
        watching = Line(wanted, lines, lambda: store().set("go", ""))
    dcp.save(state, storage_writer=BcpWriter(path, config=SOON))
    return "" if watching is None else watching.join()


def test_a_rank_that_has_not_come_is_named(tmp_path: Path) -> None:
    said = run_ranks(NUM_RANKS, come_late, tmp_path, limit_s=2 * LIMIT_S)
    assert f"nothing of this call is seen of rank {VICTIM} on this machine" in said[0], said


def write_slowly(path: Path) -> list[str]:
    lines, rank = logged(), dist.get_rank()
    state = {f"of {rank}": torch.full((1_200_000,), rank)}
    for step in range(11):
        slow = step == 10 and rank == VICTIM
        config = Config(write_bytes_per_s=1 << 20) if slow else Config()
        save_state_dict(path / f"step_{step}", state, config=config)
    assert flush()
    return [line for line in lines if "step_10" in line]


def test_a_save_that_is_slower_than_the_ten_before_names_the_rank(tmp_path: Path) -> None:
    first, *others = run_ranks(NUM_RANKS, write_slowly, tmp_path, limit_s=LIMIT_S)
    assert others == [[]] * (NUM_RANKS - 1)
    slow = [line for line in first if " in the median: " in line]
    assert len(slow) == 1, first
    assert re.search(r"^save\(.*step_10\): took [\d.]+ s, the 10 before it [\d.]+ s in the median: ", slow[0])
    assert re.search(rf": rank {VICTIM} on \S+ .*\bphase \w+", slow[0]), slow


def elsewhere(path: Path) -> dict[int, Any]:
    """Returns what the monitor of this rank has heard of the others during a save in which rank 2 waits."""
    from bytecheckpoint.distributed.groups import monitor_of
    from bytecheckpoint.groups import new_group

    group, heard = new_group(stall_timeout=2), {}
    monitor = monitor_of(group)
    assert monitor is not None

    class Asking(BcpSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            if dist.get_rank() == VICTIM:
                store().wait(["heard"])
            return super().resolve_data(write_item)

    def ask() -> None:
        tick = threading.Event()
        while monitor.doing().get(VICTIM, ("", 0.0))[0] != "write":
            tick.wait(0.02)
        heard.update(monitor.doing())
        store().set("heard", "")

    asking = threading.Thread(target=ask, daemon=True) if dist.get_rank() == 0 else None
    if asking is not None:
        asking.start()
    dcp.save(own_state(), storage_writer=BcpWriter(path), planner=Asking(), process_group=group)
    if asking is not None:
        asking.join(LIMIT_S)
    return heard


@pytest.mark.parametrize("num_ranks", [NUM_RANKS])
def test_the_coordinator_hears_what_ranks_of_its_group_are_doing(tmp_path: Path, num_ranks: int) -> None:
    heard = run_ranks(num_ranks, elsewhere, tmp_path, limit_s=LIMIT_S)[0]
    phase, seconds = heard[VICTIM]
    assert phase == "write"
    assert 0 <= seconds < LIMIT_S


def test_a_wait_names_ranks_of_other_machines(tmp_path: Path) -> None:
    heard = {1: ("wait", 3.0), 2: ("sync", 65.0)}
    call = NamedCall("save", str(tmp_path), 0, 4, lambda: heard)
    assert call.awaited("wait") == "rank 2 is in phase sync for 65 s"
    assert call.awaited("write") == ""
    call.places = [own_place(), own_place(), Place("node1", "10.0.0.2", "x"), Place("node1", "10.0.0.2", "x")]
    assert call.awaited("wait") == "rank 2 on node1, 10.0.0.2 is in phase sync for 65 s"
    assert bytecheckpoint.Config().stall_timeout_s == 60.0


@pytest.mark.parametrize(
    ("rank", "heard", "hosts", "said"),
    [
        (0, [], "", "nothing of this call is seen of rank 1, 2, 3 on this machine: not come, or on another machine"),
        (0, [2, 3], "0011", "nothing of this call is seen of rank 1 on this machine"),
        (0, [1, 2], "0011", "nothing of this call is heard of rank 3 on node1"),
        (0, [], "0001", "nothing of this call is seen of rank 1, 2 on this machine, nothing of this call is heard of "
         "rank 3 on node1"),
        (2, [0], "0011", "nothing of this call is seen of rank 3 on this machine"),
        (2, [0], "0012", "no rank of this machine is behind; the log of rank 0 on node0 says what the others do"),
    ],
)  # fmt: skip
def test_a_wait_blames_no_rank_that_it_cannot_see(
    tmp_path: Path, rank: int, heard: list[int], hosts: str, said: str
) -> None:
    """Ranks of other machines are not seen here, wherever they are in the call; rank 0 hears of them."""
    places = [own_place() if host == hosts[rank] else Place(f"node{host}", processes=host) for host in hosts]
    waiting = dict.fromkeys(heard, ("wait", 3.0))
    assert NamedCall("save", str(tmp_path), rank, 4, lambda: waiting, places).awaited("wait") == said
