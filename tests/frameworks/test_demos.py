# SPDX-License-Identifier: Apache-2.0
"""The demos of frameworks print only what they have compared, and fail if a comparison fails."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

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
