# SPDX-License-Identifier: Apache-2.0
"""torchtitan's manager in tiers, on two machines, each with a disk of its own at the near place."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.machines import Machines, Network, why_not

import bytecheckpoint
from bytecheckpoint.probes.of_torchtitan import TRAINER
from machines.jobs import Run, all_say

pytest.importorskip("torchtitan", reason="torchtitan is not installed: ITS ADAPTER IS NOT TESTED")
pytestmark = [
    pytest.mark.skipif(
        bool(TRAINER.fault()), reason=f"{TRAINER.path}: {TRAINER.fault()}. OUR CHECKPOINT MANAGER IS NOT TESTED"
    ),
    pytest.mark.skipif(bool(why_not()), reason=f"SEVERAL MACHINES ARE NOT TESTED: {why_not()}"),
]

ON, TURNED = (0, 0, 1, 1), (1, 1, 0, 0)  # two ranks on each machine, and the machines in the other order
PROGRAM = "titan_job.py"


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    with Machines(2, tmp_path, Network(apart=frozenset({0, 1}))) as made:
        yield made


def test_the_newest_step_of_the_near_disks_is_loaded(machines: Machines, tmp_path: Path) -> None:
    """Alone, and before an older one that is durable; a lost disk costs what is not durable."""
    durable = tmp_path / "durable"
    options = {"durable": str(durable), "durable_every": 2}
    run = Run(machines, PROGRAM)
    run.tier = {}
    saved = all_say(run.job(ON, options=options, trains_to=6, closes=True), "state")
    assert [step.state for step in bytecheckpoint.scan_steps(machines.base / "own0" / "run")] == ["part"] * 3
    assert [step.name for step in bytecheckpoint.scan_steps(durable)] == ["step-4"]
    newest, older, missing = all_say(run.job(TURNED, options=options, loads=[-1, 2, 9]), "loads")
    assert newest == {"step": 6, "from": "held", "state": saved}
    assert (older["step"], older["from"]) == (2, "held")
    assert missing["error"].startswith("CheckpointNotFoundError: checkpoint.load_step=9: it is not there; in held://")
    assert "there are steps 2, 4, 6" in missing["error"]
    shutil.rmtree(machines.base / "own1" / "run")
    [left] = all_say(run.job(ON, options=options, loads=[-1]), "loads")
    assert left["step"] == 4
    assert left["from"] == str(durable)


def test_without_a_durable_place(machines: Machines) -> None:
    run = Run(machines, PROGRAM)
    run.tier = {}
    said = run.job((0, 1), options={}, loads=[-1], trains_to=2)
    assert all_say(said, "loads") == [{"step": None}]
    again = run.job((1, 0), options={}, loads=[-1])
    assert all_say(again, "loads") == [{"step": 2, "from": "held", "state": all_say(said, "state")}]


def test_from_memory_on_a_new_machine(machines: Machines) -> None:
    run = Run(machines, PROGRAM, replicas=1, keep=1)
    saved = all_say(run.job((0, 1), options={}, trains_to=2), "state")
    machines.power_off(1)
    shutil.rmtree(machines.base / "own1" / "run")
    machines.boot(1)
    [newest] = all_say(run.job((1, 0), options={}, loads=[-1]), "loads")
    assert newest == {"step": 2, "from": "held", "state": saved}
