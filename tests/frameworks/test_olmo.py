# SPDX-License-Identifier: Apache-2.0
"""OLMo-core 3 over our writer and reader: its functions of checkpoints and its trainer's Checkpointer."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.ranks import run_ranks

pytest.importorskip("olmo_core", reason="OLMo-core is not installed: pip install ai2-olmo-core==3.0.0")

import olmo_core.distributed.checkpoint as olmo_checkpoint
import olmo_core.version
from frameworks.olmo_states import change, states, train_module
from olmo_core.distributed.checkpoint import filesystem
from olmo_core.train.checkpoint import Checkpointer
from olmo_core.train.train_module.transformer import ddp_train_module

import bytecheckpoint
import bytecheckpoint.olmo
from bytecheckpoint.dcp.save_planner import BcpSavePlanner
from bytecheckpoint.errors import CheckpointNotFoundError, UnsafeObjectError, UnsupportedError
from bytecheckpoint.olmo import OlmoReader, OlmoWriter

LIMIT_S = 200.0


@pytest.fixture
def installed() -> Iterator[None]:
    with bytecheckpoint.olmo.installed():
        yield


def is_ours(path: Path) -> bool:
    """Written by us, and whole."""
    try:
        bytecheckpoint.verify(path).raise_if_damaged()
    except UnsupportedError:
        return False
    return True


def assert_same(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert got[name].dtype == value.dtype
            assert torch.equal(got[name], value), name
        else:
            assert got[name] == value, name


# The trainer's Checkpointer, on FSDP2.


def checkpointer(run: Path) -> Checkpointer:
    group = dist.new_group(backend="gloo") if dist.is_initialized() else None
    return Checkpointer(work_dir=run / "work", process_group=group, save_thread_count=3, load_thread_count=100)


def save_steps(run: Path) -> dict[str, Any]:
    """Step 1 by ours, 2 by ours in the background while tensors change, 3 by OLMo-core's own."""
    module = train_module(seed=0, num_steps=2)
    saved = states(module)
    train_state = {"global_step": 2, "rank": dist.get_rank()}
    saver = checkpointer(run)
    with bytecheckpoint.olmo.installed():
        saver.save(run / "step1", module, train_state)
    saver.save(run / "step3", module, train_state)
    with bytecheckpoint.olmo.installed():
        future = saver.save_async(run / "step2", module, train_state)
        change(module)
        future.result(timeout=LIMIT_S)
    dist.barrier()
    return saved


def load_steps(run: Path) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Each step by whichever has not written it, and step 2 by both."""
    loaded = []
    loader = checkpointer(run)
    module = train_module(seed=1, num_steps=1)
    for step, by_ours in (("step1", False), ("step2", False), ("step2", True), ("step3", True)):
        change(module)
        if by_ours:
            with bytecheckpoint.olmo.installed():
                train_state = loader.load(run / step, module)
        else:
            train_state = loader.load(run / step, module)
        loaded.append((step, train_state, states(module)))
    return loaded


def test_the_checkpointer_of_four_ranks_and_of_two(tmp_path: Path) -> None:
    saved = run_ranks(4, save_steps, tmp_path, limit_s=LIMIT_S)[0]

    assert [step for step, _ in sorted(Checkpointer.find_checkpoints(tmp_path))] == [1, 2, 3]
    assert Checkpointer.latest_checkpoint(tmp_path) == str(tmp_path / "step3")
    assert is_ours(tmp_path / "step1" / "model_and_optim")
    assert is_ours(tmp_path / "step2" / "model_and_optim")
    assert not is_ours(tmp_path / "step3" / "model_and_optim")

    for rank, of_rank in enumerate(run_ranks(2, load_steps, tmp_path, limit_s=LIMIT_S)):
        assert [step for step, _, _ in of_rank] == ["step1", "step2", "step2", "step3"]
        for _, train_state, state in of_rank:
            assert train_state == {"global_step": 2, "rank": rank}
            assert_same(state, saved)
