# SPDX-License-Identifier: Apache-2.0
"""States in the memory of three machines: what is lost with one of them, and what is not."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from support.machines import Machines, why_not

from machines.jobs import NUM_MACHINES, Run, all_say, asked_for

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"SEVERAL MACHINES ARE NOT TESTED: {why_not()}")


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    with Machines(NUM_MACHINES, tmp_path) as made:
        yield made


def test_a_lost_machine_costs_nothing_that_was_committed(machines: Machines) -> None:
    run = Run(machines, replicas=1, keep=1)
    assert all_say(run.job(range(3), saves=[1, 2]), "saved") == {"1": "memory", "2": "memory"}
    machines.power_off(1)
    # Two are left, and load what three had; then a third with nothing in its memory, which is now the first.
    assert all_say(run.job([0, 2], resumes=True), "resumed") == {"step": 2, "from": "held"}
    machines.boot(1)
    said = run.job([1, 2, 0], resumes=True, saves=[3])
    assert all_say(said, "resumed") == {"step": 2, "from": "held"}
    assert all_say(said, "saved") == {"3": "memory"}
    machines.power_off(2)
    assert all_say(run.job([0, 1], resumes=True), "resumed") == {"step": 3, "from": "held"}


def test_a_machine_that_is_new_knows_which_state_is_the_newest(machines: Machines) -> None:
    run = Run(machines, replicas=1, keep=4)
    run.job(range(3), saves=[1, 2, 5, 3, 4])  # the last one is the newest, whatever its number
    machines.power_off(0)
    machines.boot(0)
    assert all_say(run.job(range(3), resumes=True), "resumed") == {"step": 4, "from": "held"}


def test_a_machine_that_is_lost_while_copies_travel(machines: Machines) -> None:
    run = Run(machines, replicas=1, keep=2)
    run.start(range(3), saves=[1, 2], waits_before=2)
    for rank in range(3):
        run.wait_for(f"at.{rank}")
    machines.limit(0, 400_000)  # bytes a second: the copy of machine 0 is on its way for some seconds
    run.go()
    time.sleep(1.5)
    machines.power_off(1)  # which takes the copy of machine 0
    begin = time.monotonic()
    for rank in (0, 2):
        run.wait_for(f"said.{rank}")
    assert time.monotonic() - begin < 20
    said = run.end([0, 2])
    for of_rank in said.values():
        assert of_rank["saved"]["1"] == "memory"
        assert "rank 1" in of_rank["saved"]["2"]
        # What machine 1 has sent goes when its silence has been noticed; all else of the save has gone.
        assert all(name.startswith(("step-1/", "step-2/__1_0.")) for name in of_rank["files_here"])
    said = run.job([0, 2], resumes=True, saves=[3])
    assert all_say(said, "resumed") == {"step": 1, "from": "held"}
    assert all_say(said, "saved") == {"3": "memory"}


def test_without_copies_a_lost_machine_costs_what_is_in_memory(machines: Machines) -> None:
    run = Run(machines)
    run.job(range(3), saves=[1, 2], disk=True)
    said = run.job(range(3), alone=2, resumes=True, disk=True)
    assert all_say(said, "alone") == "disk"  # no machine has all of it, and a process alone knows no other
    assert all_say(said, "resumed") == {"step": 2, "from": "held"}
    machines.power_off(1)
    machines.boot(1)
    assert all_say(run.job(range(3), resumes=True, disk=True), "resumed") == {"step": 2, "from": "disk"}
    assert all_say(run.job(range(3), saves=[3], disk=True), "saved") == {"3": "near"}


def test_copies_need_so_many_other_machines(machines: Machines) -> None:
    run = Run(machines, replicas=3)
    said = all_say(run.job(range(3), saves=[1], disk=True), "saved")
    assert said["1"].startswith("ConfigError: ")
    assert "MemoryTier(replicas=3): the ranks are on 3 machines" in said["1"]
    run = Run(machines, replicas=2, failure_domain="rack")
    said = all_say(run.job(range(3), saves=[1], disk=True), "saved")
    assert "has 0 machines of other failure domains for 2 replicas" in said["1"]
    run = Run(machines, interface="none0")
    assert "interface='none0'" in all_say(run.job(range(3), saves=[1], disk=True), "saved")["1"]


@pytest.mark.parametrize("seed", range(int(os.environ.get("BCP_MACHINES_LOST", "2"))))
def test_a_machine_lost_at_any_time(machines: Machines, seed: int) -> None:
    random = Random(seed)
    run = Run(machines, replicas=1, keep=1)
    run.start(range(3), saves=[*range(1, 200)], waits_before=2)
    for rank in range(3):
        run.wait_for(f"at.{rank}")
    run.go()
    time.sleep(random.uniform(0, 1.5))
    lost = random.randrange(3)
    machines.power_off(lost)
    left = [machine for machine in range(3) if machine != lost]
    run.end(left)
    reported = max((int(file.name.split(".")[2]) for file in run.control.glob("saved.*")), default=1)
    resumed = all_say(run.job(left, resumes=True), "resumed")
    assert resumed["from"] == "held"
    assert resumed["step"] >= reported


@asked_for
@pytest.mark.parametrize("harm", ["stop", "unplug", "in", "out"])
def test_a_machine_that_does_not_answer_while_copies_travel(machines: Machines, harm: str) -> None:
    run = Run(machines, replicas=1, keep=2)
    run.start(range(3), saves=[1, 2], waits_before=2)
    for rank in range(3):
        run.wait_for(f"at.{rank}")
    machines.limit(0, 400_000)
    run.go()
    time.sleep(1.5)
    if harm in ("in", "out"):
        machines.cut(1, harm)
    else:
        getattr(machines, harm)(1)
    begin = time.monotonic()
    for rank in (0, 2):
        run.wait_for(f"said.{rank}")
    assert time.monotonic() - begin < 20
    machines.power_off(1)
    for of_rank in run.end([0, 2]).values():
        assert of_rank["saved"]["1"] == "memory"
        assert of_rank["saved"]["2"] != "memory"
    assert all_say(run.job([0, 2], resumes=True), "resumed") == {"step": 1, "from": "held"}


@asked_for
def test_a_holder_that_is_killed(machines: Machines) -> None:
    run = Run(machines, replicas=1, keep=2)
    run.start(range(3), saves=[1, 2], waits_before=2)
    for rank in range(3):
        run.wait_for(f"at.{rank}")
    machines.start(1, ["pkill", "-KILL", "-f", "memory.holder"], os.environ)
    time.sleep(1)
    run.go()
    assert all_say(run.end(range(3)), "saved") == {"1": "memory", "2": "memory"}
    machines.power_off(0)
    assert all_say(run.job([1, 2], resumes=True), "resumed") == {"step": 2, "from": "held"}
