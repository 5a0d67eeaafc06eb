# SPDX-License-Identifier: Apache-2.0
"""Three machines that have a disk of their own each at the near place: who commits where, and what is loaded."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from support.machines import Machines, Network, why_not

import bytecheckpoint
from bytecheckpoint.checkpoint.keeping import drains_of, note_drain
from machines.jobs import NUM_MACHINES, Run, all_say, asked_for

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"SEVERAL MACHINES ARE NOT TESTED: {why_not()}")


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    with Machines(NUM_MACHINES, tmp_path, Network(apart=frozenset(range(NUM_MACHINES)))) as made:
        yield made


def run_on(machines: Machines) -> Run:
    run = Run(machines)
    run.tier = {}  # no memory
    return run


def disk(machines: Machines, machine: int) -> Path:
    return machines.base / f"own{machine}" / "run"


def test_each_machine_commits_its_part(machines: Machines) -> None:
    run = run_on(machines)
    assert all_say(run.job(range(3), disk=True, saves=[1, 2]), "saved") == {"1": "near", "2": "near"}
    marks = [(disk(machines, at) / "step-2" / ".metadata").read_bytes() for at in range(3)]
    assert marks[0] == marks[1] == marks[2]
    for at in range(3):
        names = {file.name.split("_")[2] for file in (disk(machines, at) / "step-2").glob("*.distcp")}
        assert names == {str(at)}
    # Other ranks than those that saved, and fewer.
    assert all_say(run.job([2, 0, 1], disk=True, resumes=True), "resumed") == {"step": 2, "from": "held"}


def test_a_step_counts_when_each_disk_has_its_mark(machines: Machines) -> None:
    run = run_on(machines)
    run.job(range(3), disk=True, saves=[1, 2])
    for at in range(3):  # as if machine 1 had died before its mark
        shutil.rmtree(disk(machines, at) / "step-2" / ".bcp")
    (disk(machines, 1) / "step-2" / ".metadata").unlink()
    retention = bytecheckpoint.Retention(disk(machines, 0), keep_latest=1)
    assert retention.prune().removed == []  # the step before is what counts
    assert all_say(run.job(range(3), disk=True, resumes=True), "resumed") == {"step": 1, "from": "held"}
    said = run.job(range(3), disk=True, saves=[2], overwrite=False)
    assert all_say(said, "saved") == {"2": "near"}
    said = run.job(range(3), disk=True, resumes=True, saves=[2], overwrite=False)
    assert all_say(said, "resumed") == {"step": 2, "from": "held"}
    assert all_say(said, "saved")["2"].startswith("CheckpointExistsError: ")


def test_a_lost_disk_costs_what_is_not_durable(machines: Machines, tmp_path: Path) -> None:
    durable = tmp_path / "durable"
    run = run_on(machines)
    said = run.job(range(3), disk=True, durable=str(durable), saves=[1, 2])
    assert all_say(said, "saved") == {"1": "near", "2": "near"}
    assert bytecheckpoint.verify(durable / "step-2").is_whole
    run.job(range(3), disk=True, saves=[3])
    shutil.rmtree(disk(machines, 0))
    said = run.job(range(3), disk=True, durable=str(durable), resumes=True, saves=[4])
    assert all_say(said, "resumed") == {"step": 2, "from": "disk"}
    assert all_say(said, "saved") == {"4": "near"}
    assert bytecheckpoint.verify(durable / "step-4").is_whole
    # A process alone takes the copy; and what an earlier job has left goes on with the next save.
    assert all_say(run.job(range(3), disk=True, durable=str(durable), alone=4), "alone") == "disk"
    shutil.rmtree(durable / "step-4")
    for machine in range(3):
        note_drain(str(disk(machines, machine) / "step-4"), "waits to be drained")
    run.job(range(3), disk=True, durable=str(durable), saves=[5])
    assert bytecheckpoint.verify(durable / "step-4").is_whole
    assert bytecheckpoint.verify(durable / "step-5").is_whole
    # Also with another machine as the first.
    shutil.rmtree(durable / "step-5")
    note_drain(str(disk(machines, 0) / "step-5"), "waits to be drained")
    said = run.job([1, 2, 0], disk=True, durable=str(durable), resumes=True)
    assert all_say(said, "resumed") == {"step": 5, "from": "held"}
    assert bytecheckpoint.verify(durable / "step-5").is_whole
    assert not drains_of(str(disk(machines, machine) / "step-5") for machine in range(3))


def test_what_is_removed_from_the_first_disk_is_removed_from_all(machines: Machines) -> None:
    run = run_on(machines)
    run.start(range(3), disk=True, saves=[1, 2, 3], waits_before=3)
    for rank in range(3):
        run.wait_for(f"at.{rank}")
    assert [step.state for step in bytecheckpoint.scan_steps(disk(machines, 0))] == ["part", "part"]
    retention = bytecheckpoint.Retention(disk(machines, 0), keep_latest=1)
    assert retention.prune().removed == [str(disk(machines, 0) / "step-1")]
    bytecheckpoint.pin(disk(machines, 2) / "step-1")
    run.go()
    assert all_say(run.end(range(3)), "saved") == {"1": "near", "2": "near", "3": "near"}
    left = [sorted(path.name for path in disk(machines, at).glob("step-*")) for at in range(3)]
    assert left == [["step-2", "step-3"], ["step-2", "step-3"], ["step-1", "step-2", "step-3"]]


def test_a_disk_that_is_not_mounted_for_a_moment_costs_no_older_step(machines: Machines) -> None:
    run = run_on(machines)
    run.start(range(3), disk=True, saves=[1, 2, 3], waits_before=3)
    for rank in range(3):
        run.wait_for(f"at.{rank}")
    away = disk(machines, 0).rename(disk(machines, 0).with_name("away"))
    run.go()
    run.end(range(3))
    for machine in (1, 2):
        assert {path.name for path in disk(machines, machine).glob("step-*")} == {"step-1", "step-2", "step-3"}
    shutil.rmtree(disk(machines, 0))
    away.rename(disk(machines, 0))
    assert all_say(run.job(range(3), disk=True, resumes=True), "resumed") == {"step": 2, "from": "held"}


def test_a_save_that_fails_on_one_disk_leaves_nothing_on_any(machines: Machines) -> None:
    run = run_on(machines)
    run.job(range(3), disk=True, saves=[1])
    (disk(machines, 2) / "step-2").write_text("in the way")
    said = run.job(range(3), disk=True, saves=[2])
    for of_rank in said.values():
        assert of_rank["saved"]["2"].startswith("StorageError: ")
        assert "step-2" in of_rank["saved"]["2"]
    for at in range(2):
        assert not (disk(machines, at) / "step-2").exists()
    assert all_say(run.job(range(3), disk=True, resumes=True), "resumed") == {"step": 1, "from": "held"}


def test_with_memory_a_lost_machine_costs_nothing(machines: Machines) -> None:
    run = Run(machines, replicas=1, keep=1)
    assert all_say(run.job(range(3), disk=True, saves=[1, 2]), "saved") == {"1": "near", "2": "near"}
    machines.power_off(1)
    shutil.rmtree(disk(machines, 1))
    machines.boot(1)
    said = run.job([1, 2, 0], disk=True, resumes=True, saves=[3])
    assert all_say(said, "resumed") == {"step": 2, "from": "held"}
    assert all_say(said, "saved") == {"3": "near"}
    for machine in range(3):  # now from the disks
        machines.power_off(machine)
        machines.boot(machine)
    assert all_say(run.job(range(3), disk=True, resumes=True), "resumed") == {"step": 3, "from": "held"}


def test_each_way_to_save(machines: Machines) -> None:
    assert all_say(run_on(machines).job(range(3), disk=True, others=True), "others") == [11, 12, 13]


@asked_for
def test_machines_that_are_killed_while_they_save(machines: Machines) -> None:
    run = run_on(machines)
    draw, reported = Random(1), 0
    for begin in range(1, 6 * 20, 20):
        run.start(range(3), disk=True, resumes=True, saves=[*range(begin, begin + 20)])
        run.wait_for(f"saved.1.{begin}")
        time.sleep(draw.uniform(0, 0.6))
        victim = draw.randrange(3)
        machines.power_off(victim)
        run.control.joinpath("end").touch()
        others = [rank for rank in range(3) if rank != victim]
        for rank in others:
            run.wait_for(f"here.{rank}")
        reported = max([reported, *(int(file.name.rpartition(".")[2]) for file in run.control.glob("saved.*"))])
        machines.boot(victim)
        found = all_say(run.job(range(3), disk=True, resumes=True), "resumed")["step"]
        assert (found or 0) >= reported
