# SPDX-License-Identifier: Apache-2.0
"""A load of another writer's files is of one checkpoint: files that are replaced, or written in place, are noticed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from bytecheckpoint import BcpLoadPlanner, BcpReader, Config, load_state_dict, verify
from bytecheckpoint.errors import CheckpointChangedError, CheckpointError
from interop.replaced_sources import KEYS, NUMEL, values, write

KINDS = ("dcp", "safetensors", "torch")


def empty() -> dict[str, torch.Tensor]:
    return {key: torch.zeros(NUMEL) for key in KEYS}


class Late(BcpLoadPlanner):
    """Calls something when the metadata have been read, and before any tensor is."""

    def __init__(self, call: Callable[[], None]) -> None:
        super().__init__()
        self._call = call

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        super().set_up_planner(*args, **kwargs)
        self._call()


def refused(source: Path, call: Callable[[], None], **config: Any) -> CheckpointChangedError:
    with pytest.raises((CheckpointError, CheckpointException)) as caught:
        dcp.load(empty(), storage_reader=BcpReader(source, config=Config(**config)), planner=Late(call), no_dist=True)
    error: Any = caught.value
    if not isinstance(error, CheckpointError):
        (error,) = (each[0] for each in error.failures.values())
    assert isinstance(error, CheckpointChangedError), error
    return error


@pytest.mark.parametrize("kind", KINDS)
def test_replaced_after_the_plan(kind: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    write(kind, source, 1)
    assert "since the checkpoint was opened" in str(refused(source, lambda: write(kind, source, 2)))
    state = empty()
    dcp.load(state, storage_reader=BcpReader(source), planner=BcpLoadPlanner(), no_dist=True)
    assert all(torch.equal(state[key], value) for key, value in values(2).items())


@pytest.mark.parametrize("kind", KINDS)
def test_a_twin_of_the_same_time_and_length(kind: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    write(kind, source, 1)
    other = tmp_path / "twin" / source.name  # torch.save puts the name of the file into it
    other.parent.mkdir()
    write(kind, other, 2)
    last = max(each for each in ([source] if kind == "torch" else source.iterdir()) if each.name != ".metadata")
    twin = other if kind == "torch" else other / last.name
    found = last.stat()
    os.utime(twin, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert twin.stat().st_size == found.st_size
    assert last.name in str(refused(source, lambda: twin.replace(last)))


@pytest.mark.parametrize("kind", KINDS)
def test_our_own_call_begins_again(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    write(kind, source, 1)
    real = BcpReader.prepare_local_plan
    steps = iter([2])

    def late(self: BcpReader, plan: Any) -> Any:
        for step in steps:
            write(kind, source, step)
        return real(self, plan)

    monkeypatch.setattr(BcpReader, "prepare_local_plan", late)
    state = empty()
    load_state_dict(source, state, no_dist=True)
    assert all(torch.equal(state[key], value) for key, value in values(2).items())


@pytest.mark.parametrize("kind", KINDS)
def test_touching_nothing_is_no_change(kind: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    write(kind, source, 1)
    state = empty()
    planner = Late(lambda: os.utime(source.parent))
    dcp.load(state, storage_reader=BcpReader(source), planner=planner, no_dist=True)
    assert all(torch.equal(state[key], value) for key, value in values(1).items())
    verify(source).raise_if_damaged()
