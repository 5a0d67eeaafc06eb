# SPDX-License-Identifier: Apache-2.0
"""Runs the demos of the integrations with Hugging Face and Lightning as a user starts them."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import bytecheckpoint

DEMO = Path(__file__).parents[2] / "demo"
LIMIT_S = 150.0


def run(name: str, folder: Path) -> str:
    """Returns what the recipe prints. Its ranks have ended by then."""
    environ = {**os.environ, "PYTHONPATH": str(DEMO.parent)}
    recipe = subprocess.Popen(
        [sys.executable, str(DEMO / name), str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environ,
        start_new_session=True,
    )
    try:
        out, errors = recipe.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(recipe.pid, signal.SIGKILL)
        out, errors = recipe.communicate()
    assert recipe.returncode == 0, out + errors
    return out


@pytest.mark.parametrize(
    ("name", "needs", "last_line", "checkpoints"),
    [
        (
            "hf_trainer.py",
            "transformers",
            "resumed at step 3; at step 6: 113 tensors (1.5 MB) and 54 other values are equal",
            [
                "resumed/checkpoint-6",
                "whole/checkpoint-3",
                "whole/checkpoint-6",
            ],
        ),
        (
            "accelerate_fsdp.py",
            "accelerate",
            "of rank 0, saved and loaded: 96 tensors (0.6 MB) and 36 other values are equal",
            ["checkpoints/checkpoint_0", "optimizer_0", "pytorch_model_fsdp_0"],
        ),
        (
            "lightning_fsdp2.py",
            "lightning",
            "resumed after one epoch; of rank 0 after 2: 32 tensors (0.1 MB) and 20 other values are equal",
            ["resumed/epoch=1-step=8.ckpt", "whole/epoch=0-step=4.ckpt", "whole/epoch=1-step=8.ckpt"],
        ),
    ],
    ids=["hf_trainer", "accelerate_fsdp", "lightning_fsdp2"],
)
def test_a_recipe(name: str, needs: str, last_line: str, checkpoints: list[str], tmp_path: Path) -> None:
    if importlib.util.find_spec(needs) is None:
        pytest.skip(f"RECIPE NOT RUN: {needs} is not installed")

    out = run(name, tmp_path)

    assert out.splitlines()[-1] == last_line
    assert sorted(str(file.parent.relative_to(tmp_path)) for file in tmp_path.rglob(".metadata")) == checkpoints
    for checkpoint in checkpoints:
        bytecheckpoint.verify(tmp_path / checkpoint).raise_if_damaged()
