# SPDX-License-Identifier: Apache-2.0
"""Training with FSDP2 or HSDP and AdamW is saved, and resumes on other numbers of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.equality import assert_equal
from support.ranks import run_ranks
from support.training import Training
from torch.distributed.tensor import DTensor

from bytecheckpoint import BcpReader, BcpWriter


def train_and_save(path: str, reference: str, hybrid: bool) -> None:
    training = Training(seed=1, hybrid=hybrid)
    training.step(3)
    state = training.state()
    assert all(isinstance(value, DTensor) for value in state["model"].values())
    dcp.save(state, storage_writer=BcpWriter(path))
    full = training.full_state()
    if dist.get_rank() == 0:
        torch.save(full, reference)


def resume(path: str, reference: str, hybrid: bool) -> None:
    wanted = torch.load(reference, weights_only=True)
    for reader in (BcpReader(path), dcp.FileSystemReader(path)):
        training = Training(seed=2, hybrid=hybrid)
        state = training.state()
        state["step"] = 0
        dcp.load(state, storage_reader=reader)
        assert state["step"] == 3
        training.load_state(state)
        assert_equal(training.full_state(), wanted)


@pytest.mark.parametrize(
    ("savers", "hybrid_save", "loaders", "hybrid_load"),
    [(2, False, 4, False), (4, True, 2, False), (4, False, 1, False), (2, False, 4, True)],
)
def test_training_resumes(tmp_path: Path, savers: int, hybrid_save: bool, loaders: int, hybrid_load: bool) -> None:
    path, reference = str(tmp_path / "ckpt"), str(tmp_path / "reference.pt")
    run_ranks(savers, train_and_save, path, reference, hybrid_save)
    run_ranks(loaders, resume, path, reference, hybrid_load)
