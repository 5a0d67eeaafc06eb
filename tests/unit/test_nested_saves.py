# SPDX-License-Identifier: Apache-2.0
"""Tests saves and loads in the hooks of another save."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from bytecheckpoint import BcpSavePlanner, BcpWriter, load_state_dict, save_state_dict, verify
from bytecheckpoint.errors import CheckpointBusyError


class Calling(BcpSavePlanner):
    """A planner that calls ``call`` while it resolves its first value."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__()
        self._call: Callable[[], object] | None = call

    def resolve_data(self, item: Any) -> Any:
        call, self._call = self._call, None
        if call is not None:
            call()
        return super().resolve_data(item)


def state(number: int) -> dict[str, Any]:
    return {"weight": torch.full((1000,), float(number))}


def check(path: Path, number: int) -> None:
    got = state(-1)
    load_state_dict(path, got)
    assert torch.equal(got["weight"], state(number)["weight"])
    assert not verify(path).problems


def dcp_save(path: Path, number: int, **arguments: Any) -> None:
    dcp.save(state(number), storage_writer=BcpWriter(path), no_dist=True, **arguments)


def own_save(path: Path, number: int, **arguments: Any) -> None:
    save_state_dict(path, state(number), **arguments)


@pytest.mark.parametrize("inner", [dcp_save, own_save])
@pytest.mark.parametrize("outer", [dcp_save, own_save])
def test_a_save_in_a_hook_of_another(tmp_path: Path, outer: Callable[..., None], inner: Callable[..., None]) -> None:
    outer(tmp_path / "outer", 1, planner=Calling(lambda: inner(tmp_path / "inner", 2)))
    check(tmp_path / "outer", 1)
    check(tmp_path / "inner", 2)


def test_a_save_in_a_hook_with_the_same_writer(tmp_path: Path) -> None:
    writer = BcpWriter(tmp_path / "outer")

    def again() -> None:
        dcp.save(state(2), checkpoint_id=tmp_path / "inner", storage_writer=writer, no_dist=True)

    dcp.save(state(1), storage_writer=writer, planner=Calling(again), no_dist=True)
    check(tmp_path / "outer", 1)
    check(tmp_path / "inner", 2)
    dcp.save(state(3), checkpoint_id=tmp_path / "outer", storage_writer=writer, no_dist=True)
    check(tmp_path / "outer", 3)


def test_a_save_in_a_hook_to_the_same_path_is_refused(tmp_path: Path) -> None:
    def again() -> None:
        with pytest.raises(CheckpointBusyError):
            own_save(tmp_path / "outer", 2)

    own_save(tmp_path / "outer", 1, planner=Calling(again))
    check(tmp_path / "outer", 1)


def test_a_save_that_failed_in_a_hook_leaves_the_path_free(tmp_path: Path) -> None:
    def fail() -> None:
        raise RuntimeError("of the hook")

    for _ in range(2):
        with pytest.raises(Exception, match="of the hook"):
            own_save(tmp_path / "ckpt", 1, planner=Calling(fail))
    own_save(tmp_path / "ckpt", 2)
    check(tmp_path / "ckpt", 2)
