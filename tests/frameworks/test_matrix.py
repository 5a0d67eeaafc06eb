# SPDX-License-Identifier: Apache-2.0
"""Saves under each kind of parallelism, and loads under every other and on other numbers of ranks.

One job saves all, and one job for each number of ranks loads all, because starting processes costs more than loading.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from torch import nn

import bytecheckpoint
from frameworks.wrapped import FRAMEWORK_OF, WRAPPINGS, differences, full_state, optimizer_of, train, wrap

SAVING_RANKS = 4
SAVERS = [*WRAPPINGS]
# Meshes of two dims whose first dim has 2 ranks.
OF_EVEN_RANKS = {"fsdp hybrid", "fsdp2 hybrid", "fsdp2 tp"}


def optimizer_by_unit(model: nn.Module) -> torch.optim.Optimizer:
    """Returns an optimizer whose groups do not split a flat parameter, so that all of it has the same options."""
    return optimizer_of(model, is_decayed=lambda name: "layers." in name)


def save_all(folder: str) -> None:
    """Saves each wrapping after two steps, and keeps torch's full state then and after one more step."""
    for seed, name in enumerate(SAVERS):
        model = wrap(name, seed)
        optimizer = optimizer_by_unit(model)
        train(model, optimizer, steps=2, seed=seed)
        bytecheckpoint.save(f"{folder}/{name}", {"model": model, "optimizer": optimizer}, FRAMEWORK_OF[name])
        keep(f"{folder}/{name}.saved.pt", full_state(model, optimizer))
        losses = train(model, optimizer, steps=1, seed=100 + seed)
        keep(f"{folder}/{name}.after.pt", {**full_state(model, optimizer), "losses": losses})


def keep(path: str, state: dict[str, Any]) -> None:
    if dist.get_rank() == 0:
        torch.save(state, path)


def load_all(folder: str, every: int) -> list[str]:
    """Loads every checkpoint, or one of ``every`` of them, into each wrapping. Returns the differences, on rank 0."""
    is_first, num_ranks = dist.get_rank() == 0, dist.get_world_size()
    told = {name: torch.load(f"{folder}/{name}.saved.pt", weights_only=True) for name in SAVERS}
    found = []
    for number, name in enumerate(SAVERS):
        if name in OF_EVEN_RANKS and num_ranks % 2:
            continue
        model = wrap(name, seed=1000)
        optimizer = optimizer_by_unit(model)
        # A different checkpoint is loaded first each time, into an optimizer without state. The last one is the
        # wrapping's own.
        for saver in (SAVERS[number + 1 :] + SAVERS[: number + 1])[every - 1 :: every]:
            parts = {"model": model, "optimizer": optimizer}
            bytecheckpoint.load(f"{folder}/{saver}", parts, FRAMEWORK_OF[name])
            state = full_state(model, optimizer)
            found += [f"{saver} in {name}: {key}" for key in differences(state, told[saver]) if is_first]
        if num_ranks == SAVING_RANKS:  # the arithmetic is the same as after the save
            losses = train(model, optimizer, steps=1, seed=100 + number)
            state = {**full_state(model, optimizer), "losses": losses}
            after = torch.load(f"{folder}/{name}.after.pt", weights_only=True)
            found += [f"{name}, a step later: {key}" for key in differences(state, after) if is_first]
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("matrix")
    run_ranks(SAVING_RANKS, save_all, str(folder), limit_s=300)
    return folder


@pytest.mark.parametrize(
    ("num_ranks", "every"),
    [
        pytest.param(2, 1, marks=pytest.mark.long),
        (2, 8),
        (4, 8),
        (3, 8),  # an odd number pads each unit differently
        pytest.param(4, 1, marks=pytest.mark.long),
        pytest.param(3, 1, marks=pytest.mark.long),
    ],
)
def test_every_wrapping_loads_every_other(saved: Path, num_ranks: int, every: int) -> None:
    """`make torture` runs all 16 x 16 pairs; otherwise some of them, on 2, 3 and 4 ranks.

    On 4 ranks training continues.
    """
    assert run_ranks(num_ranks, load_all, str(saved), every, limit_s=300)[0] == []
