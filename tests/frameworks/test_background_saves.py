# SPDX-License-Identifier: Apache-2.0
"""Live objects of every framework, saved in the background while training goes on."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
import torch.distributed as dist
from support.ranks import run_ranks

import bytecheckpoint
from frameworks.wrapped import FRAMEWORK_OF, WRAPPINGS, differences, full_state, optimizer_of, train, wrap


def saved_while_training(folder: str) -> list[str]:
    found = []
    for name in WRAPPINGS:
        model = wrap(name, seed=1)
        optimizer = optimizer_of(model)
        train(model, optimizer)
        wanted = copy.deepcopy(full_state(model, optimizer))
        parts = {"model": model, "optimizer": optimizer}
        handle = bytecheckpoint.save(f"{folder}/{name}", parts, FRAMEWORK_OF[name], fast_saving=True)
        train(model, optimizer)
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.zero_()
        handle.committed.result()
        other = wrap(name, seed=2)
        parts = {"model": other, "optimizer": optimizer_of(other)}
        bytecheckpoint.load(f"{folder}/{name}", parts, FRAMEWORK_OF[name])
        got = full_state(other, parts["optimizer"])
        found += [f"{name}: {key}" for key in differences(got, wanted) if dist.get_rank() == 0]
    bytecheckpoint.shutdown()
    return found


def test_the_state_of_the_call_is_saved(tmp_path: Path) -> None:
    """Parameters and optimizer states may change as soon as there is a handle."""
    assert run_ranks(2, saved_while_training, str(tmp_path), limit_s=200)[0] == []


def one_rank_fails(folder: str) -> list[str]:
    """Of the first rank the optimizer is another model's."""
    found = []
    for is_fast in (False, True):
        model = wrap("ddp", seed=1)
        optimizer = optimizer_of(model if dist.get_rank() else wrap("plain", seed=1))
        parts = {"model": model, "optimizer": optimizer}
        try:
            bytecheckpoint.save(folder, parts, "ddp", fast_saving=is_fast).committed.result()
        except bytecheckpoint.errors.CheckpointError as error:
            found.append(str(error))
        # And the next one is not in the way of what was left.
        parts = {"model": model, "optimizer": optimizer_of(model)}
        bytecheckpoint.save(folder, parts, "ddp", fast_saving=is_fast).committed.result()
    bytecheckpoint.shutdown()
    return found


def test_a_rank_that_cannot_save_tells_the_others(tmp_path: Path) -> None:
    """Though they ask first who holds which buffer."""
    for found in run_ranks(2, one_rank_fails, str(tmp_path), limit_s=60):
        assert len(found) == 2
        assert all("not one of the model's: pass the model that the optimizer was made for" in text for text in found)
