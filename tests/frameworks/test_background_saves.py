# SPDX-License-Identifier: Apache-2.0
"""Live objects of every framework, saved in the background while training goes on."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
import torch.distributed as dist
from distributed.ranks import run_ranks

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
