# SPDX-License-Identifier: Apache-2.0
"""Tests that a save that was not committed removes the folders that it made, and no others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.pausing_planner import PausingPlanner
from torch.distributed.checkpoint.api import CheckpointException

import bytecheckpoint
from bytecheckpoint import (
    BcpSavePlanner,
    BcpWriter,
    CheckpointError,
    async_save_state_dict,
    load_state_dict,
    save_state_dict,
    shutdown,
)
from bytecheckpoint.errors import SaveCancelledError

LIMIT_S = 60.0


class Raising(BcpSavePlanner):
    """Raises in one of its hooks."""

    def __init__(self, hook: str, error: type[BaseException]) -> None:
        super().__init__()
        self._hook, self._error = hook, error

    def finish_plan(self, new_plan: Any) -> Any:
        if self._hook == "finish_plan":
            raise self._error("no")
        return super().finish_plan(new_plan)

    def resolve_data(self, write_item: Any) -> Any:
        if self._hook == "resolve_data":
            raise self._error("no")
        return super().resolve_data(write_item)


def state() -> dict[str, torch.Tensor]:
    return {"a": torch.ones(1000)}


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    shutdown(LIMIT_S)


@pytest.mark.parametrize("hook", ["finish_plan", "resolve_data"])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_of_a_save_that_failed_nothing_is_left(tmp_path: Path, hook: str, error: type[BaseException]) -> None:
    with pytest.raises((CheckpointError, KeyboardInterrupt)):
        save_state_dict(tmp_path / "run" / "step-5", state(), planner=Raising(hook, error))
    assert not (tmp_path / "run").exists()
    run = tmp_path / "kept"
    run.mkdir()
    with pytest.raises((CheckpointError, KeyboardInterrupt)):
        save_state_dict(run / "step-5", state(), planner=Raising(hook, error))
    assert list(run.iterdir()) == []


def test_a_folder_that_was_there_stays(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        save_state_dict(tmp_path / "empty", state(), planner=Raising("resolve_data", ValueError), overwrite=True)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError):
        save_state_dict(tmp_path / "empty", state(), planner=Raising("resolve_data", ValueError))
    assert list((tmp_path / "empty").iterdir()) == []
    save_state_dict(tmp_path / "full", state())
    with pytest.raises(CheckpointError):
        save_state_dict(tmp_path / "full", state(), planner=Raising("resolve_data", ValueError))
    got = {"a": torch.zeros(1000)}
    load_state_dict(tmp_path / "full", got)
    assert torch.equal(got["a"], state()["a"])


def test_of_a_save_that_was_cancelled_nothing_is_left(tmp_path: Path) -> None:
    planner = PausingPlanner()
    handle = async_save_state_dict(tmp_path / "run" / "step-5", state(), planner=planner)
    assert planner.arrived.wait(LIMIT_S)
    handle._give_up()
    planner.go_on.set()
    with pytest.raises(SaveCancelledError):
        handle.committed.result(LIMIT_S)
    assert list(tmp_path.iterdir()) == []


def test_dcp_s_own_saves_leave_nothing_either(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match="no"):
        dcp.save(
            state(),
            storage_writer=BcpWriter(tmp_path / "run"),
            planner=Raising("resolve_data", ValueError),
            no_dist=True,
        )
    assert list(tmp_path.iterdir()) == []


class Unpicklable:
    def __reduce__(self) -> Any:
        raise ValueError("no")


def test_parts_leave_no_folder_of_a_step(tmp_path: Path) -> None:
    class Model(torch.nn.Linear):
        def get_extra_state(self) -> Any:
            return Unpicklable()

        def set_extra_state(self, state: Any) -> None:
            pass

    with pytest.raises(CheckpointError):
        bytecheckpoint.save(tmp_path / "run", {"model": Model(2, 2)}, framework="ddp", global_steps=5)
    assert not (tmp_path / "run").exists()
