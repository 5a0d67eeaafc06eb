# SPDX-License-Identifier: Apache-2.0
"""A save in one container of a machine is seen to live by those who look from another one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from support.pausing_planner import PausingPlanner

from bytecheckpoint import save_state_dict

LIMIT_S = 60.0
# Processes that it starts see neither the processes of this namespace nor their locks in /proc/locks.
ELSEWHERE = [
    "unshare",
    *(() if os.geteuid() == 0 else ("--user", "--map-root-user")),
    "--pid",
    "--fork",
    "--mount-proc",
]
STEPS = "import sys; from bytecheckpoint.cli.app import main; main(['steps', '--json', sys.argv[1]])"


def steps_from_elsewhere(run: Path) -> dict[int, str]:
    listed = subprocess.run(
        [*ELSEWHERE, sys.executable, "-m", "bytecheckpoint", "steps", "--json", str(run)],
        capture_output=True, text=True, timeout=LIMIT_S, check=False,
    )  # fmt: skip
    found = json.loads(listed.stdout)
    return {step["step"]: step["state"] for step in found["steps"]}


@pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run([*ELSEWHERE, "true"], capture_output=True).returncode != 0,
    reason="PID NAMESPACES ARE NOT TESTED: this user may not make them",
)
def test_a_save_of_another_container_is_seen_to_live(tmp_path: Path) -> None:
    planner = PausingPlanner()
    state = {"a": torch.ones(100)}
    saving = threading.Thread(target=save_state_dict, args=(tmp_path / "step_1", state), kwargs={"planner": planner})
    saving.start()
    try:
        assert planner.arrived.wait(LIMIT_S)
        assert steps_from_elsewhere(tmp_path) == {1: "saving"}
    finally:
        planner.go_on.set()
        saving.join()
    assert steps_from_elsewhere(tmp_path) == {1: "complete"}
