# SPDX-License-Identifier: Apache-2.0
"""``speed_up_dcp()``: what DCP asks its ``Stateful`` protocol, with and without ``register``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.stateful import Stateful

import bytecheckpoint
from bytecheckpoint.dcp import stateful
from bytecheckpoint.dcp.stateful import QuickStateful

SAVER: Any = state_dict_saver
LOADER: Any = state_dict_loader


@pytest.fixture(autouse=True)
def dcp_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(SAVER, "_stateful_to_state_dict", SAVER._stateful_to_state_dict)
    monkeypatch.setattr(LOADER, "Stateful", LOADER.Stateful)
    monkeypatch.setattr(stateful, "_is_wanted", False)
    yield
    bytecheckpoint.unregister()


class Counter:
    """A Stateful object."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]


@pytest.fixture
def questions(monkeypatch: pytest.MonkeyPatch) -> list[type]:
    """The types of the values that the real protocol was asked about."""
    asked: list[type] = []
    kind: Any = type(Stateful)
    ask = kind.__instancecheck__

    def noted(cls: type, value: object) -> bool:
        if cls is Stateful:
            asked.append(type(value))
        return bool(ask(cls, value))

    monkeypatch.setattr(kind, "__instancecheck__", noted)
    return asked


def save_and_load(path: Path) -> None:
    state = {f"weight.{i}": torch.full((3,), float(i)) for i in range(20)} | {"counter": Counter(), "step": 7}
    state["counter"].count = 3
    dcp.save(state, storage_writer=bytecheckpoint.BcpWriter(path), planner=bytecheckpoint.BcpSavePlanner())
    into = {f"weight.{i}": torch.zeros(3) for i in range(20)} | {"counter": Counter(), "step": 0}
    dcp.load(into, storage_reader=bytecheckpoint.BcpReader(path), planner=bytecheckpoint.BcpLoadPlanner())
    assert all(torch.equal(into[f"weight.{i}"], state[f"weight.{i}"]) for i in range(20))
    assert into["counter"].count == 3
    assert into["step"] == 7


def test_only_values_whose_type_does_not_tell_are_asked_about(tmp_path: Path, questions: list[type]) -> None:
    save_and_load(tmp_path / "before")
    assert torch.Tensor in questions
    assert Counter in questions
    questions.clear()
    bytecheckpoint.speed_up_dcp()
    save_and_load(tmp_path / "after")
    assert set(questions) == {Counter}


def test_it_stays_through_register_and_changes_no_classes(tmp_path: Path, questions: list[type]) -> None:
    planner, setup = SAVER.DefaultSavePlanner, SAVER._storage_setup
    bytecheckpoint.speed_up_dcp()
    bytecheckpoint.speed_up_dcp()
    assert SAVER.DefaultSavePlanner is planner
    assert SAVER._storage_setup is setup
    quick = SAVER._stateful_to_state_dict
    with bytecheckpoint.registered():
        assert SAVER._stateful_to_state_dict is not quick
    assert SAVER._stateful_to_state_dict is quick
    assert LOADER.Stateful is QuickStateful
    save_and_load(tmp_path / "after")
    assert set(questions) == {Counter}


def test_it_lasts_if_it_is_called_while_ours_are_in_place(tmp_path: Path, questions: list[type]) -> None:
    slow = SAVER._stateful_to_state_dict
    with bytecheckpoint.registered():
        counting = SAVER._stateful_to_state_dict
        bytecheckpoint.speed_up_dcp()
        assert SAVER._stateful_to_state_dict is counting
    assert SAVER._stateful_to_state_dict not in (slow, counting)
    assert LOADER.Stateful is QuickStateful
    save_and_load(tmp_path / "after")
    assert set(questions) == {Counter}


def test_without_it_register_leaves_nothing_behind() -> None:
    slow = SAVER._stateful_to_state_dict
    with bytecheckpoint.registered():
        pass
    assert SAVER._stateful_to_state_dict is slow
    assert LOADER.Stateful is Stateful
