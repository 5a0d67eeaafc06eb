# SPDX-License-Identifier: Apache-2.0
"""SIGKILL at any moment of a training that saves to memory and to a near disk, and of its holder."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path

import pytest
import torch

from bytecheckpoint import MemoryTier, Tiers, latest, load_state_dict, read, scan_steps, verify
from bytecheckpoint.storage.memory.connection import disconnect, holders, stop_holder

LIMIT_S = 60.0
NUM_KILLS = 8
NUMEL = 1 << 18

# It says of each step where that is committed, as soon as it hears of it.
TRAIN = """
    import sys, torch, bytecheckpoint
    from bytecheckpoint import MemoryTier, Tiers
    near, first = sys.argv[1], int(sys.argv[2])
    tiers = Tiers(memory=MemoryTier(keep=1), near=near, near_every=3)
    def say(tier, step):
        print(tier, step, flush=True)
    for step in range(first, first + 10_000):
        state = {f"w{n}": torch.full((1 << 18,), float(step)) for n in range(4)}
        handle = bytecheckpoint.async_save_state_dict(tiers / f"step-{step}", state, no_dist=True)
        handle.memory.result()
        say("memory", step)
        if handle.committed.result().tier == "near":
            say("near", step)
"""


def held_run(tiers: Tiers) -> str:
    return tiers.in_memory.rpartition("/")[2]


def pid_of_holder(run: str) -> int:
    for folder in Path("/proc").iterdir():
        try:
            command = (folder / "cmdline").read_bytes().split(b"\0") if folder.name.isdigit() else []
        except OSError:
            continue
        if run.encode() in command:
            return int(folder.name)
    raise AssertionError(f"no holder of {run}")


def train_until_killed(near: str, first: int, seconds: float) -> dict[str, int]:
    """Returns the newest step that was said to be committed, by tier."""
    command = [sys.executable, "-c", textwrap.dedent(TRAIN), near, str(first)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    newest = {}
    begun = process.stdout.readline().split()
    time.sleep(seconds)
    process.send_signal(signal.SIGKILL)
    for line in [" ".join(begun), *process.stdout.read().splitlines()]:
        tier, _, step = line.partition(" ")
        if step.isdecimal():
            newest[tier] = int(step)
    process.stdout.close()
    assert process.wait(LIMIT_S) == -signal.SIGKILL
    return newest


def loaded_step(path: str) -> int:
    verify(path).raise_if_damaged()
    (value,) = {value for tensor in read(path).values() for value in set(tensor.tolist())}
    return int(value)


@pytest.mark.parametrize("seed", [1, 2])
def test_kills_at_random(tmp_path: Path, seed: int) -> None:
    """What was said to be committed loads, unless the tier is lost; nothing older is taken for it."""
    moments = random.Random(seed)
    tiers = Tiers(memory=MemoryTier(keep=1), near=tmp_path / "near", near_every=3)
    run = held_run(tiers)
    first = 1
    try:
        for _ in range(NUM_KILLS // 2):
            newest = train_until_killed(str(tiers.near), first, moments.uniform(0.0, 0.4))
            is_holder_killed = moments.random() < 0.4
            if is_holder_killed:
                os.kill(pid_of_holder(run), signal.SIGKILL)
                while run in holders():
                    time.sleep(0.01)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = latest(tiers)
            least = newest.get("near", 0) if is_holder_killed else max(newest.values())
            if found is None:
                assert is_holder_killed
                assert least == 0
                continue
            step = loaded_step(found)
            assert step >= least
            assert found.endswith(f"/step-{step}")
            state = {f"w{n}": torch.zeros(NUMEL) for n in range(4)}
            load_state_dict(tiers / f"step-{step}", state, no_dist=True)
            assert {int(tensor[-1]) for tensor in state.values()} == {step}
            in_memory = [folder.step for folder in scan_steps(tiers) if folder.tiers.get("memory") == "complete"]
            assert len(in_memory) <= 2  # one that is committed, and the one before if its saver died at once
            first = step + 1
            disconnect(run)
    finally:
        stop_holder(run)
