# SPDX-License-Identifier: Apache-2.0
"""torchtitan's trainer resumes through our manager: its own debug model, on a GPU, in deterministic mode."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from support.titan import run_processes

pytest.importorskip("torchtitan", reason="torchtitan is not installed: ITS TRAINER IS NOT TESTED ON A GPU")

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "tests" / "frameworks" / "titan_recipe.py"


def _train(folder: Path, *flags: str) -> dict[int, float]:
    folder.mkdir(exist_ok=True)
    losses = folder / "losses"
    command = [sys.executable, str(RECIPE), "--module", "frameworks.titan_recipe", "--config", "debug_whole"]
    command += ["--dump_folder", str(folder), "--debug.seed", "1", "--debug.deterministic", *flags]
    run_processes(1, command, 280, PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}", TITAN_LOSSES=str(losses))
    return dict(map(json.loads, losses.read_text().splitlines()))


@pytest.mark.parametrize("mode", ["disabled", "async", "async_with_pinned_mem"])
def test_the_losses_after_a_resume_are_those_of_an_uninterrupted_run(tmp_path: Path, mode: str) -> None:
    flags = ["--override.imports", "bytecheckpoint.torchtitan.use", "--checkpoint.async_mode", mode]
    losses = _train(tmp_path / "whole", *flags)
    shutil.copytree(tmp_path / "whole/checkpoint/step-2", tmp_path / "cut/checkpoint/step-2")
    assert _train(tmp_path / "cut", *flags) == {step: loss for step, loss in losses.items() if step > 2}
