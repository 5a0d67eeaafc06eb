# SPDX-License-Identifier: Apache-2.0
"""What DCP asks its ``Stateful`` protocol once a writer or reader of ours was made, with and without ``register``."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.stateful import Stateful

import bytecheckpoint
from bytecheckpoint.dcp import stateful
from bytecheckpoint.dcp.stateful import QuickStateful, quick_copy
from bytecheckpoint.probes.of_torch import QUICK_CHECKS

SAVER: Any = state_dict_saver
LOADER: Any = state_dict_loader


@pytest.fixture(autouse=True)
def dcp_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(SAVER, "_stateful_to_state_dict", _dcps(SAVER._stateful_to_state_dict))
    monkeypatch.setattr(LOADER, "Stateful", Stateful)
    yield
    bytecheckpoint.unregister()


def _dcps(function: Any) -> Any:
    """Returns DCP's own function, in case that some test before has made a writer or reader of ours."""
    return function if function.__module__ == SAVER.__name__ else inspect.getclosurevars(function).nonlocals["theirs"]


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


def save_and_load(path: Path, save_planner: Any = None, load_planner: Any = None) -> None:
    state = {f"weight.{i}": torch.full((3,), float(i)) for i in range(20)} | {"counter": Counter(), "step": 7}
    state["counter"].count = 3
    dcp.save(state, storage_writer=bytecheckpoint.BcpWriter(path), planner=save_planner)
    into = {f"weight.{i}": torch.zeros(3) for i in range(20)} | {"counter": Counter(), "step": 0}
    dcp.load(into, storage_reader=bytecheckpoint.BcpReader(path), planner=load_planner)
    assert all(torch.equal(into[f"weight.{i}"], state[f"weight.{i}"]) for i in range(20))
    assert into["counter"].count == 3
    assert into["step"] == 7


def test_with_our_classes_only_values_whose_type_does_not_tell_are_asked_about(
    tmp_path: Path, questions: list[type]
) -> None:
    save_and_load(tmp_path / "plain")
    save_and_load(tmp_path / "explicit", bytecheckpoint.BcpSavePlanner(), bytecheckpoint.BcpLoadPlanner())
    assert set(questions) == {Counter}


def test_nothing_changes_before_a_writer_or_reader_is_made(tmp_path: Path, questions: list[type]) -> None:
    dcp.save({"weight": torch.ones(3)}, checkpoint_id=tmp_path)
    assert questions == [torch.Tensor]


@pytest.mark.parametrize("make", [bytecheckpoint.BcpWriter, bytecheckpoint.BcpReader])
def test_either_class_is_enough(tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(tmp_path)
    quick = SAVER._stateful_to_state_dict
    make(tmp_path)
    assert SAVER._stateful_to_state_dict is quick
    assert LOADER.Stateful is QuickStateful


def test_it_stays_through_register(tmp_path: Path, questions: list[type]) -> None:
    planner, setup = SAVER.DefaultSavePlanner, SAVER._storage_setup
    bytecheckpoint.BcpWriter(tmp_path)
    assert SAVER.DefaultSavePlanner is planner
    assert SAVER._storage_setup is setup
    quick = SAVER._stateful_to_state_dict
    with bytecheckpoint.registered():
        assert SAVER._stateful_to_state_dict is not quick
    assert SAVER._stateful_to_state_dict is quick
    assert LOADER.Stateful is QuickStateful
    save_and_load(tmp_path / "after")
    assert set(questions) == {Counter}


def test_register_leaves_nothing_behind(tmp_path: Path) -> None:
    slow = SAVER._stateful_to_state_dict
    with bytecheckpoint.registered():
        dcp.save({"weight": torch.ones(3)}, checkpoint_id=tmp_path)
    assert SAVER._stateful_to_state_dict is slow
    assert LOADER.Stateful is Stateful


def test_with_another_dcp_nothing_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stateful, "holds", lambda feature: feature is not QUICK_CHECKS)
    slow = SAVER._stateful_to_state_dict
    save_and_load(tmp_path)
    assert SAVER._stateful_to_state_dict is slow
    assert LOADER.Stateful is Stateful


class Half:
    """Has one method of the two."""

    def state_dict(self) -> dict[str, Any]:
        return {"half": 1}


class TensorWithState(torch.Tensor):
    """A tensor whose class is Stateful."""

    state_dict = Half.state_dict
    load_state_dict = Counter.load_state_dict


class DictWithState(dict):  # type: ignore[type-arg]
    """A dict that is Stateful."""

    state_dict = Half.state_dict
    load_state_dict = Counter.load_state_dict


def with_attributes(value: Any, **attributes: Any) -> Any:
    for name, attribute in attributes.items():
        setattr(value, name, attribute)
    return value


def with_state(value: Any) -> Any:
    counter = Counter()
    return with_attributes(value, state_dict=counter.state_dict, load_state_dict=counter.load_state_dict)


def none_as_method(value: Any) -> Any:
    return with_attributes(value, state_dict=None, load_state_dict=None)


def outcome_of(copy: Callable[[Any], Any], value: Any) -> tuple[type, str]:
    """Returns what becomes of a value in a state that is copied: itself, its state, or the error of its method."""
    try:
        copied = copy({"value": value})["value"]
    except Exception as error:
        return type(error), str(error)
    return type(copied), "itself" if copied is value else str(copied)


VALUES: dict[str, Callable[[], Any]] = {
    **{type(value).__name__: lambda value=value: value for value in (None, True, 1, 1.5, "a", b"a", {}, [], (), set())},
    "tensor": lambda: torch.ones(3),
    "parameter": lambda: torch.nn.Parameter(torch.ones(3)),
    "module": lambda: torch.nn.Linear(2, 2),
    "optimizer": lambda: torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1),
    "counter": Counter,
    "half": Half,
    "a class": lambda: Counter,
    "tensor whose class is Stateful": lambda: torch.ones(3).as_subclass(TensorWithState),
    "dict whose class is Stateful": DictWithState,
    "ordered dict": OrderedDict,
    "tensor that is Stateful": lambda: with_state(torch.ones(3)),
    "parameter that is Stateful": lambda: with_state(torch.nn.Parameter(torch.ones(3))),
    "tensor with half of it": lambda: with_attributes(torch.ones(3), load_state_dict=print),
    "tensor with the other half": lambda: with_attributes(torch.ones(3), state_dict=print),
    "tensor whose methods are None": lambda: none_as_method(torch.ones(3)),
    "object whose methods are None": lambda: none_as_method(Half()),
}


@pytest.mark.parametrize("make", VALUES.values(), ids=VALUES.keys())
def test_the_answer_is_that_of_dcp(make: Callable[[], Any]) -> None:
    value = make()
    assert isinstance(value, QuickStateful) == isinstance(value, Stateful)
    dcps = SAVER._stateful_to_state_dict
    assert outcome_of(quick_copy(dcps), value) == outcome_of(dcps, value)
