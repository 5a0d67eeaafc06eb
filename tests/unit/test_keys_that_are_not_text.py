# SPDX-License-Identifier: Apache-2.0
"""Tests that values under keys other than text come back under these keys, and that keys with one text are refused."""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner

import bytecheckpoint
from bytecheckpoint import (
    BcpLoadPlanner,
    BcpReader,
    BcpSavePlanner,
    BcpWriter,
    Config,
    LoadSpec,
    async_save_state_dict,
    load_state_dict,
    save_state_dict,
)
from bytecheckpoint.convert import convert
from bytecheckpoint.errors import CheckpointNotFoundError, InvalidPlanError, KeyMismatchError
from bytecheckpoint.native import _C


class Color(enum.Enum):
    RED = 1


class Level(enum.StrEnum):
    LOW = "low"


KEYS = [
    0,
    -1,
    2**70,
    0.9,
    float("inf"),
    True,
    None,
    (1, "a"),
    Color.RED,
    Level.LOW,
    np.int64(3),
    np.float32(0.5),
    "text",
]


def of(value: Any) -> dict[str, Any]:
    """Returns a state with objects under keys of all kinds: at the top, deep down, in a list, in an OrderedDict."""
    return {
        "flat": dict.fromkeys(KEYS, value),
        "deep": {key: {"step": value, 7: {key: (value, "x")}, "m": torch.full((2,), value)} for key in KEYS},
        "list": [{1: value, "w": torch.full((3,), value)}, [{2.5: value}]],
        "ordered": OrderedDict({5: OrderedDict({False: value})}),
    }


def is_same(state: Any, wanted: Any) -> bool:
    if isinstance(wanted, dict):
        return [*state] == [*wanted] and all(is_same(state[key], wanted[key]) for key in wanted)
    if isinstance(wanted, list):
        return len(state) == len(wanted) and all(map(is_same, state, wanted))
    return torch.equal(state, wanted) if isinstance(wanted, torch.Tensor) else state == wanted


def save_by_register(path: Path, state: dict[str, Any]) -> None:
    with bytecheckpoint.registered():
        dcp.save(state, checkpoint_id=path, no_dist=True)


def load_by_register(path: Path, state: dict[str, Any]) -> None:
    with bytecheckpoint.registered():
        dcp.load(state, checkpoint_id=path, no_dist=True)


SAVES: dict[str, Callable[[Path, dict[str, Any]], Any]] = {
    "save_state_dict": lambda path, state: save_state_dict(path, state, no_dist=True),
    "in the background": lambda path, state: async_save_state_dict(path, state, no_dist=True).committed.result(),
    "include": lambda path, state: save_state_dict(path, state, no_dist=True, include="*"),
    "dcp.save": lambda path, state: dcp.save(
        state, storage_writer=BcpWriter(path), planner=BcpSavePlanner(), no_dist=True
    ),
    "DCP's planner": lambda path, state: dcp.save(
        state, storage_writer=BcpWriter(path), planner=DefaultSavePlanner(), no_dist=True
    ),
    "stock": lambda path, state: dcp.save(state, checkpoint_id=path, no_dist=True),
    "register": save_by_register,
}


class Overriding(BcpLoadPlanner):
    """A planner whose hooks per item are called, with records as bytes."""

    def load_bytes(self, read_item: Any, value: Any) -> None:
        super().load_bytes(read_item, value)


LOADS: dict[str, Callable[[Path, dict[str, Any]], Any]] = {
    "load_state_dict": lambda path, state: load_state_dict(path, state, no_dist=True),
    "dcp.load": lambda path, state: dcp.load(
        state, storage_reader=BcpReader(path), planner=BcpLoadPlanner(), no_dist=True
    ),
    "a hook": lambda path, state: dcp.load(state, storage_reader=BcpReader(path), planner=Overriding(), no_dist=True),
    "register": load_by_register,
}


@pytest.mark.parametrize("save", SAVES.values(), ids=SAVES)
def test_values_of_any_save_come_back_under_the_callers_keys(
    tmp_path: Path, save: Callable[[Path, dict[str, Any]], Any]
) -> None:
    save(tmp_path / "ck", of(5))
    loaded = of(0)
    load_state_dict(tmp_path / "ck", loaded, no_dist=True)
    assert is_same(loaded, of(5))


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_every_load_fills_the_callers_keys(tmp_path: Path, load: Callable[[Path, dict[str, Any]], Any]) -> None:
    save_state_dict(tmp_path / "ck", of(5), no_dist=True)
    loaded = of(0)
    load(tmp_path / "ck", loaded)
    assert is_same(loaded, of(5))


def test_keys_of_several_types_at_the_top(tmp_path: Path) -> None:
    """DCP's own ``load`` cannot sort them, with any planner."""
    save_state_dict(tmp_path / "ck", {"a": 5, 3: 5, None: {"x": 5}, 10: torch.ones(2)}, no_dist=True)
    state = {"a": 0, 3: 0, None: {"x": 0}, 10: torch.zeros(2)}
    load_state_dict(tmp_path / "ck", state, no_dist=True)
    assert is_same(state, {"a": 5, 3: 5, None: {"x": 5}, 10: torch.ones(2)})


def test_the_state_of_an_optimizer_as_it_is(tmp_path: Path) -> None:
    class Steps(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for parameter in group["params"]:
                    state = self.state[parameter]
                    state["step"] = state.get("step", 0) + 1
                    state.setdefault("buffers", {})[0.9] = torch.full((3,), float(state["step"]))
            return super().step(closure)

    def trained(steps: int) -> Steps:
        parameter = torch.nn.Parameter(torch.ones(3))
        optimizer = Steps([parameter], lr=0.1, momentum=0.9)
        for _ in range(steps):
            parameter.sum().backward()
            optimizer.step()
        return optimizer

    before, after = trained(5), trained(1)
    save_state_dict(tmp_path / "ck", {"o": before.state_dict()}, no_dist=True)
    state = {"o": after.state_dict()}
    load_state_dict(tmp_path / "ck", state, no_dist=True)
    after.load_state_dict(state["o"])
    assert is_same(after.state_dict(), before.state_dict())


def test_the_text_of_a_number_is_the_key_of_a_pattern(tmp_path: Path) -> None:
    save_state_dict(tmp_path / "ck", {"old": {0: {"step": 5}, 1: {"step": 6}}}, no_dist=True, exclude="old.1")
    state = {"new": {0: {"step": 0}}}
    load_state_dict(tmp_path / "ck", state, no_dist=True, spec=LoadSpec(rename={"old": "new"}))
    assert state == {"new": {0: {"step": 5}}}


def test_keys_that_differ_in_their_text_are_missing(tmp_path: Path) -> None:
    save_state_dict(tmp_path / "ck", {"a": {1: 5}}, no_dist=True)
    with pytest.raises(KeyMismatchError, match=r"'a\.1\.0'.*'a\.1'"):
        load_state_dict(tmp_path / "ck", {"a": {1.0: 0}}, no_dist=True)


TWINS = [
    (0, "0"),
    (True, "True"),
    (None, "None"),
    (0.5, "0.5"),
    ((1,), "(1,)"),
    (Color.RED, "Color.RED"),
    (1, np.str_("1")),
]


@pytest.mark.parametrize("twins", TWINS, ids=str)
@pytest.mark.parametrize("save", [SAVES["save_state_dict"], SAVES["in the background"]], ids=["now", "background"])
def test_keys_with_one_text_are_refused_before_a_byte_is_written(
    tmp_path: Path, twins: tuple[Any, Any], save: Callable[[Path, dict[str, Any]], Any]
) -> None:
    first, second = twins
    for state in ({"a": {first: 1, second: 2}}, {"a": {second: {"x": 1}, first: {"y": 2}}}):
        with pytest.raises(InvalidPlanError) as error:
            save(tmp_path / "ck", state)
        text = str(error.value)
        assert "state_dict['a']" in text
        assert repr(first) in text
        assert repr(second) in text
        assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_keys_with_one_text_are_refused_before_a_byte_is_read(tmp_path: Path) -> None:
    save_state_dict(tmp_path / "ck", {"a": {"0": torch.ones(2), "1": 3}}, no_dist=True)
    state = {"a": {"0": torch.zeros(2), 1: 0, "1": 0}}
    with pytest.raises(
        InvalidPlanError, match=r"state_dict\['a'\] have the text '1': 1 of type int and '1' of type str"
    ):
        load_state_dict(tmp_path / "ck", state, no_dist=True)
    assert state["a"]["0"].eq(0).all()


@pytest.mark.parametrize(
    ("state", "places"),
    [
        ({"a.b": 1, "a": {"b": 2}}, ["state_dict['a.b']", "state_dict['a']['b']"]),
        ({"a": {0: {"b": 1}, "0.b": 2}}, ["state_dict['a'][0]['b']", "state_dict['a']['0.b']"]),
        ({"a": [torch.ones(1), 2], "a.1": 2}, ["state_dict['a'][1]", "state_dict['a.1']"]),
        ({0.5: 1, 0: {5: 2}}, ["state_dict[0.5]", "state_dict[0][5]"]),
    ],
)
def test_two_paths_with_one_key_are_both_named(tmp_path: Path, state: dict[Any, Any], places: list[str]) -> None:
    with pytest.raises(InvalidPlanError) as error:
        save_state_dict(tmp_path / "ck", state, no_dist=True)
    assert all(place in str(error.value) for place in places)
    with pytest.raises(CheckpointNotFoundError):
        BcpReader(tmp_path / "ck").read_metadata()


def test_containers_whose_names_only_look_alike_are_saved(tmp_path: Path) -> None:
    def alike(value: int) -> dict[Any, Any]:
        return {"a.b": {"x": value}, "a": {"b": {"y": value}, "b/x": value}, 1: {"x": value}, "1.": value}

    save_state_dict(tmp_path / "ck", alike(5), no_dist=True)
    state = alike(0)
    load_state_dict(tmp_path / "ck", state, no_dist=True)
    assert state == alike(5)


@pytest.mark.parametrize(
    ("key", "why"),
    [(torch.nn.Parameter(torch.ones(2)), "elements of a tensor"), (object(), "address"), ((len, object()), "address")],
    ids=["a parameter", "an object", "a tuple of one"],
)
def test_keys_that_no_load_would_find_are_refused(tmp_path: Path, key: Any, why: str) -> None:
    with pytest.raises(InvalidPlanError, match=rf"a key of state_dict\['state'\] is of type .*{why}"):
        save_state_dict(tmp_path / "ck", {"state": {key: {"step": 1}}}, no_dist=True)


def test_other_mappings_are_checked_too() -> None:
    with pytest.raises(InvalidPlanError, match="have the text '0'"):
        _C.flatten_state_dict({"a": MappingProxyType({0: 1, "0": 2})})
    flat, paths = _C.flatten_state_dict(MappingProxyType({0: MappingProxyType({None: 1})}))
    assert (flat, paths) == ({"0.None": 1}, {"0.None": ("0", "None")})


def test_dcps_planner_does_as_stock_and_is_named(tmp_path: Path) -> None:
    save_state_dict(tmp_path / "ck", {"a": {0: 5, 1: torch.ones(2)}, "b": 6}, no_dist=True)
    state: dict[str, Any] = {"a": {0: 0, 1: torch.zeros(2)}, "b": 0}
    reader = BcpReader(tmp_path / "ck", config=Config(planning="as given"))
    with pytest.warns(RuntimeWarning, match=r"DefaultLoadPlanner: it puts these .*: 'a\.0'\. BcpLoadPlanner"):
        dcp.load(state, storage_reader=reader, planner=DefaultLoadPlanner(), no_dist=True)
    assert state["a"][0] == 0
    assert state["a"]["0"] == 5
    assert state["a"][1].eq(1).all()


def test_without_a_state_the_keys_are_text(tmp_path: Path) -> None:
    save_state_dict(tmp_path / "ck", {"a": {0: {"step": 5}}}, no_dist=True)
    convert(tmp_path / "ck", tmp_path / "file.pt", to="torch")
    assert torch.load(tmp_path / "file.pt") == {"a": {"0": {"step": 5}}}
