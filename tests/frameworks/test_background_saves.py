# SPDX-License-Identifier: Apache-2.0
"""Saves live objects of every framework in the background while training continues."""

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
    """Parameters and optimizer states may change once the call has returned a handle.

    The save holds the earlier state.
    """
    assert run_ranks(2, saved_while_training, str(tmp_path), limit_s=200)[0] == []


def one_rank_fails(folder: str) -> list[str]:
    """Saves with an optimizer that, on rank 0, belongs to another model."""
    found = []
    for is_fast in (False, True):
        model = wrap("ddp", seed=1)
        optimizer = optimizer_of(model if dist.get_rank() else wrap("plain", seed=1))
        parts = {"model": model, "optimizer": optimizer}
        try:
            bytecheckpoint.save(folder, parts, "ddp", fast_saving=is_fast).committed.result()
        except bytecheckpoint.errors.CheckpointError as error:
            found.append(str(error))
        # What the failed save left behind does not block the next one.
        parts = {"model": model, "optimizer": optimizer_of(model)}
        bytecheckpoint.save(folder, parts, "ddp", fast_saving=is_fast).committed.result()
    bytecheckpoint.shutdown()
    return found


def test_a_rank_that_cannot_save_tells_the_others(tmp_path: Path) -> None:
    """All ranks raise the error, although the ranks first exchange who holds which buffer."""
    for found in run_ranks(2, one_rank_fails, str(tmp_path), limit_s=60):
        assert len(found) == 2
        assert all("not one of the model's: pass the model that the optimizer was made for" in text for text in found)
