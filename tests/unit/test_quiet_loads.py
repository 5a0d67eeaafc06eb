# SPDX-License-Identifier: Apache-2.0
"""Tests that a save or load in one process warns of nothing, and that a wrong path gives one error, no log of DCP."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import bytecheckpoint
from bytecheckpoint import BcpLoadPlanner, BcpReader, BcpWriter, load_state_dict, save_state_dict
from bytecheckpoint.errors import CheckpointNotFoundError, CorruptCheckpointError


@pytest.fixture(autouse=True)
def _no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="TypedStorage")
        yield


def by_dcp(planner: Any) -> Callable[[Path], None]:
    def load(path: Path) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(state(), storage_reader=BcpReader(path), planner=planner())

    return load


LOADS: dict[str, Callable[[Path], object]] = {
    "load_state_dict": lambda path: load_state_dict(path, state()),
    "load": lambda path: bytecheckpoint.load(path, {"model": torch.nn.Linear(2, 2)}, "ddp"),
    "dcp.load": by_dcp(dcp.DefaultLoadPlanner),
    "dcp.load, our planner": by_dcp(BcpLoadPlanner),
}


def state() -> dict[str, Any]:
    return {"a": torch.ones(3)}


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Returns the messages without the events of DCP's own loggers, which go nowhere unless somebody asks for them."""
    return [record.getMessage() for record in caplog.records if not record.name.startswith("c10d-")]


def failure_of(load: Callable[[Path], object], path: Path) -> BaseException:
    try:
        load(path)
    except CheckpointException as error:
        (failure,) = error.failures.values()
        return failure[0]
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def test_alone_nobody_is_warned(tmp_path: Path) -> None:
    save_state_dict(tmp_path, state())
    load_state_dict(tmp_path, state())
    bytecheckpoint.save(tmp_path / "parts", {"model": torch.nn.Linear(2, 2)}, framework="ddp")
    LOADS["load"](tmp_path / "parts")


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_a_wrong_path_is_one_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, load: Callable[[Path], object]
) -> None:
    caplog.set_level(logging.INFO)
    error = failure_of(load, tmp_path / "nothing")
    assert isinstance(error, CheckpointNotFoundError)
    assert str(tmp_path / "nothing") in str(error)
    assert logged(caplog) == []


@pytest.mark.parametrize("name", [name for name in LOADS if name != "load"])
def test_damage_is_one_error(tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    save_state_dict(tmp_path, state())
    mark = tmp_path / ".metadata"
    mark.write_bytes(mark.read_bytes()[:-1])
    caplog.set_level(logging.INFO)
    caplog.clear()  # of the save, where a test before this one has set the level
    error = failure_of(LOADS[name], tmp_path)
    assert isinstance(error, CorruptCheckpointError)
    assert logged(caplog) == []


def test_parts_of_ranks_load_without_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state(), storage_writer=BcpWriter(tmp_path), use_collectives=False)
    assert not (tmp_path / ".metadata").exists()
    caplog.clear()
    caplog.set_level(logging.WARNING)
    for load in ("load_state_dict", "dcp.load", "dcp.load, our planner"):
        LOADS[load](tmp_path)
    assert logged(caplog) == []


def test_whoever_asks_for_the_metadata_gets_the_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError):
        BcpReader(tmp_path / "nothing").read_metadata()
