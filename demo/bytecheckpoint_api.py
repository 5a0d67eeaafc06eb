# SPDX-License-Identifier: Apache-2.0
"""The calls of ByteCheckpoint on this engine: FSDP2, two ranks, two roles, saves in the background.

An actor and a critic train side by side. Both save every 2 steps with ``fast_saving=True``, and a callback reports when
a step is committed. Then the demo creates everything again, loads the newest checkpoints, and compares weights,
optimizers and random number generators bit for bit. Finally ``strict=False`` loads the actor into a larger model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from training.comparison import compare
from training.job import local_shards
from training.two_ranks import on_two_ranks

import bytecheckpoint
from bytecheckpoint.errors import CheckpointError

ROLES = ("actor", "critic")
STEPS = 4


def make(role: str, num_layers: int = 3) -> dict[str, Any]:
    """Returns the checkpoint state of a role: live objects, as a training loop has them."""
    width = 96 if role == "actor" else 48
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(num_layers)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return {"model": model, "optimizer": optimizer, "extra_state": {"rng": bytecheckpoint.get_rng_state()}}


def train_step(state: dict[str, Any]) -> None:
    model, optimizer = state["model"], state["optimizer"]
    model(torch.randn(8, model[0].in_features)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    state["extra_state"] = {"rng": bytecheckpoint.get_rng_state()}


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def run(folder: Path) -> None:
    dist.init_process_group("gloo")
    states = {role: make(role) for role in ROLES}
    for step in range(1, STEPS + 1):
        for role, state in states.items():
            train_step(state)
            if step % 2 == 0:
                bytecheckpoint.save(
                    folder,
                    state,
                    framework="fsdp2",
                    fast_saving=True,
                    global_steps=step,
                    callback=lambda role=role, step=step: say(f"{role}: step {step} is committed"),
                    role=role,
                )
    bytecheckpoint.shutdown()  # waits for saves in the background

    wanted = torch.rand(3)
    resumed = {role: make(role) for role in ROLES}
    for role, state in resumed.items():
        path = bytecheckpoint.find_latest_ckpt_path(folder, role, process_group=dist.group.WORLD)
        bytecheckpoint.load(path, state, framework="fsdp2", role=role)
        say(f"{role}: loaded {Path(path).relative_to(folder)}")
        before, after = (
            local_shards(dict(enumerate(get_state_dict(of_run["model"], of_run["optimizer"]))))
            for of_run in (states[role], state)
        )
        comparison = compare(before, after)
        if not comparison.equal:
            raise SystemExit(f"loaded is not what was saved: {comparison}")
        say(f"{role}: {comparison}")
    bytecheckpoint.set_rng_state(resumed["critic"]["extra_state"]["rng"])
    if not torch.equal(torch.rand(3), wanted):
        raise SystemExit("other random numbers follow")
    say("weights, optimizers and what random numbers follow are equal, bit for bit")

    grown = make("actor", num_layers=4)
    path = bytecheckpoint.find_latest_ckpt_path(folder, "actor", process_group=dist.group.WORLD)
    try:
        bytecheckpoint.load(path, {"model": grown["model"]}, framework="fsdp2", role="actor")
    except CheckpointError as error:
        say(f"strict: {str(error)[-120:]}")
    result = bytecheckpoint.load(path, {"model": grown["model"]}, framework="fsdp2", role="actor", strict=False)
    say(f"strict=False: loaded, but for {', '.join(result.missing_keys)}")


if __name__ == "__main__":
    on_two_ranks(__file__, run)
