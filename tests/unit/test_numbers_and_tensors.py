# SPDX-License-Identifier: Apache-2.0
"""Tests what a load does where the checkpoint has a number or an object and the state a tensor, and the other way."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner

import bytecheckpoint
from bytecheckpoint import BcpLoadPlanner, BcpReader, Config, LoadReport, LoadSpec, load_state_dict, save_state_dict
from bytecheckpoint.errors import CheckpointError, ShapeMismatchError


def by_dcp(path: Path, state: dict[str, Any], planner: Any) -> LoadReport:
    reader = BcpReader(path, config=Config(planning="as given"))
    try:
        dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)
    except dcp.api.CheckpointException as exception:
        raise exception.failures[0][0] from None
    assert reader.last_report is not None
    return reader.last_report


def by_register(path: Path, state: dict[str, Any]) -> None:
    with bytecheckpoint.registered():
        try:
            dcp.load(state, checkpoint_id=path, no_dist=True)
        except dcp.api.CheckpointException as exception:
            raise exception.failures[0][0] from None


class Overriding(BcpLoadPlanner):
    """A planner whose hooks per item are called."""

    def load_bytes(self, read_item: Any, value: Any) -> None:
        super().load_bytes(read_item, value)


LOADS: dict[str, Callable[[Path, dict[str, Any]], Any]] = {
    "load_state_dict": lambda path, state: load_state_dict(path, state, no_dist=True),
    "dcp.load": lambda path, state: by_dcp(path, state, BcpLoadPlanner()),
    "a hook": lambda path, state: by_dcp(path, state, Overriding()),
    "a spec": lambda path, state: load_state_dict(path, state, no_dist=True, spec=LoadSpec()),
    "register": by_register,
}

EXACT = [
    (5, torch.float32),
    (5, torch.int64),
    (200, torch.uint8),
    (2**53, torch.float64),
    (0.5, torch.bfloat16),
    (3.0, torch.int32),
    (True, torch.bool),
    (True, torch.float32),
    (1 + 2j, torch.complex64),
    (math.nan, torch.float32),
    (-math.inf, torch.float16),
]
NEAR = [(2**24 + 1, torch.float32), (0.1, torch.float32), (2.5, torch.int64), (7, torch.bool)]
IMPOSSIBLE = [(300, torch.uint8), (1 + 2j, torch.float32), (math.nan, torch.int64), (10**30, torch.int64)]


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_a_number_fills_a_tensor_in_place(tmp_path: Path, load: Callable[[Path, dict[str, Any]], Any]) -> None:
    save_state_dict(tmp_path / "ck", {str(n): {"step": value} for n, (value, _) in enumerate(EXACT)}, no_dist=True)
    tensors = [torch.zeros((), dtype=dtype) for _, dtype in EXACT]
    state = {str(n): {"step": tensor} for n, tensor in enumerate(tensors)}
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        load(tmp_path / "ck", state)
    for n, (value, dtype) in enumerate(EXACT):
        assert state[str(n)]["step"] is tensors[n]
        assert tensors[n].equal(torch.tensor(value, dtype=dtype)) or (value != value and tensors[n].isnan())


def test_the_report_says_it(tmp_path: Path) -> None:
    save_state_dict(tmp_path / "ck", {"step": 5, "lr": 0.5, "epoch": 3}, no_dist=True)
    state = {"step": torch.zeros(()), "lr": torch.zeros((), requires_grad=True), "epoch": 0}
    report = load_state_dict(tmp_path / "ck", state, no_dist=True)
    assert {*report.casts} == {("step", "int", "float32"), ("lr", "float", "float32")}
    assert "int -> float32" in report.table()
    assert state["lr"].item() == 0.5


@pytest.mark.parametrize(("value", "dtype"), NEAR)
def test_a_value_that_the_dtype_lacks_follows_the_rules_of_casts(tmp_path: Path, value: Any, dtype: Any) -> None:
    save_state_dict(tmp_path / "ck", {"n": value, "w": torch.ones(3)}, no_dist=True)
    for spec in (None, LoadSpec(), LoadSpec(cast="widen"), LoadSpec(cast={"w": "float64"})):
        state = {"n": torch.zeros((), dtype=dtype), "w": torch.zeros(3)}
        with pytest.raises(ShapeMismatchError, match=r"'n': stored is .*which does not have this value.*cast='any'"):
            load_state_dict(tmp_path / "ck", state, no_dist=True, spec=spec)
        assert not any(tensor.any() for tensor in state.values()), "nothing is filled"
    for spec in (LoadSpec(cast="any"), LoadSpec(cast={"n": dtype})):
        state = {"n": torch.zeros((), dtype=dtype), "w": torch.zeros(3)}
        load_state_dict(tmp_path / "ck", state, no_dist=True, spec=spec)
        assert state["n"].equal(torch.zeros((), dtype=dtype).fill_(value))
    state = {"n": torch.zeros((), dtype=dtype), "w": torch.zeros(3)}
    with pytest.warns(RuntimeWarning, match=r"values may be lost.*'n' is .*loaded into"):
        by_dcp(tmp_path / "ck", state, BcpLoadPlanner())
    assert state["n"].equal(torch.zeros((), dtype=dtype).fill_(value))


@pytest.mark.parametrize(("value", "dtype"), IMPOSSIBLE)
def test_a_value_that_the_dtype_cannot_hold_is_refused(tmp_path: Path, value: Any, dtype: Any) -> None:
    save_state_dict(tmp_path / "ck", {"n": value, "w": torch.ones(3)}, no_dist=True)
    for load in (LOADS["load_state_dict"], LOADS["dcp.load"]):
        state = {"n": torch.zeros((), dtype=dtype), "w": torch.zeros(3)}
        with pytest.raises(ShapeMismatchError, match=r"'n': stored is .*cannot hold it"):
            load(tmp_path / "ck", state)
        assert not any(tensor.any() for tensor in state.values())


@pytest.mark.parametrize("stored", [None, "text", [1, 2], {1, 2}, 5], ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 3)])
@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_an_object_never_takes_the_place_of_a_tensor(
    tmp_path: Path, load: Callable[[Path, dict[str, Any]], Any], shape: tuple[int, ...], stored: Any
) -> None:
    shape = shape or (1, 1) if stored == 5 else shape  # a tensor without dims is filled with it
    save_state_dict(tmp_path / "ck", {"n": stored, "w": torch.ones(3)}, no_dist=True)
    state = {"n": torch.full(shape, 7.0), "w": torch.zeros(3)}
    with pytest.raises(ShapeMismatchError, match=r"'n': stored is .*into a tensor of \[.*put None there"):
        load(tmp_path / "ck", state)
    assert state["n"].equal(torch.full(shape, 7.0))
    state["n"] = None
    load(tmp_path / "ck", state)
    assert state["n"] == stored
    assert state["w"].eq(1).all()


@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
@pytest.mark.parametrize("value", [0, 0.0, None, "text"])
def test_a_tensor_never_takes_the_place_of_another_value(
    tmp_path: Path, load: Callable[[Path, dict[str, Any]], Any], value: Any
) -> None:
    save_state_dict(tmp_path / "ck", {"n": torch.tensor(5, dtype=torch.int32), "w": torch.ones(3)}, no_dist=True)
    state = {"n": value, "w": torch.zeros(3)}
    kind = type(value).__name__
    with pytest.raises(CheckpointError, match=rf"'n': stored is a tensor of \[\].*{kind}; put a tensor .*dtype int32"):
        load(tmp_path / "ck", state)
    assert state["n"] == value
    assert not state["w"].any()


def test_extra_state_of_a_module_may_be_any_value(tmp_path: Path) -> None:
    """A module gets it by ``set_extra_state``: an object of an older version may come where there is a tensor now."""
    save_state_dict(tmp_path / "ck", {"m": {"layer._extra_state": {1, 2}, "_extra_state": 5}}, no_dist=True)
    state: dict[str, Any] = {"m": {"layer._extra_state": torch.zeros(4), "_extra_state": torch.zeros(())}}
    report = load_state_dict(tmp_path / "ck", state, no_dist=True)
    assert state == {"m": {"layer._extra_state": {1, 2}, "_extra_state": 5}}
    assert report.casts == ()


def test_dcps_planner_does_as_stock_and_is_named(tmp_path: Path) -> None:
    save_state_dict(tmp_path / "ck", {"a": {"step": 5, "epoch": 6}}, no_dist=True)
    state = {"a": {"step": torch.zeros(()), "epoch": 0}}
    with pytest.warns(RuntimeWarning, match=r"DefaultLoadPlanner: it puts an object in the place .*: 'a\.step'\. "):
        by_dcp(tmp_path / "ck", state, DefaultLoadPlanner())
    assert state == {"a": {"step": 5, "epoch": 6}}


def test_a_buffer_of_a_live_model(tmp_path: Path) -> None:
    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.tensor(0))

    save_state_dict(tmp_path / "model", {"steps": 5}, no_dist=True)
    model = Counting()
    bytecheckpoint.load(tmp_path, {"model": model}, "ddp")
    assert model.steps.item() == 5


def test_shards_and_views_are_filled(tmp_path: Path) -> None:
    save_state_dict(tmp_path / "ck", {"a": 5, "b": 6}, no_dist=True)
    memory = torch.zeros(4)
    load_state_dict(tmp_path / "ck", {"a": memory[1], "b": memory[3]}, no_dist=True)
    assert memory.tolist() == [0, 5, 0, 6]
