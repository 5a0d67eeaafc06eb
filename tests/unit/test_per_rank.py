# SPDX-License-Identifier: Apache-2.0
"""``per_rank``: values that each rank has of its own, in one checkpoint with the state; here of one rank."""

from __future__ import annotations

import random
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from bytecheckpoint import (
    BcpLoadPlanner,
    BcpSavePlanner,
    BcpWriter,
    LoadSpec,
    async_save_state_dict,
    get_rng_state,
    load_state_dict,
    read,
    resume,
    save_state_dict,
    set_rng_state,
)
from bytecheckpoint.errors import ConfigError, CorruptCheckpointError, InvalidPlanError, KeyMismatchError

VALUES: dict[str, Any] = {
    "number": 3,
    "nothing": None,
    "text": "a",
    "dict": {"list": [1, {"deep": torch.arange(3)}], "t": (1, 2)},
    "list": [1, 2],
    "empty": [],
    "tuple": (torch.ones(2), "b"),
    "one": (5,),
    "ordered": OrderedDict(a=1),
    "tensor": torch.arange(6.0).reshape(2, 3),
    "scalar": torch.tensor(2.5),
    "a.b": {"dotted": 1},
    "": 7,
}


def state(value: float = 1.0) -> dict[str, Any]:
    return {"w": torch.full((100,), float(value)), "step": int(value)}


def same(got: Any, wanted: Any) -> bool:
    if isinstance(wanted, torch.Tensor):
        return isinstance(got, torch.Tensor) and torch.equal(got, wanted)
    if isinstance(wanted, dict):
        return type(got) is type(wanted) and [*got] == [*wanted] and all(same(got[key], wanted[key]) for key in wanted)
    if isinstance(wanted, list | tuple):
        return type(got) is type(wanted) and len(got) == len(wanted) and all(map(same, got, wanted))
    return type(got) is type(wanted) and bool(got == wanted)


@pytest.mark.parametrize("policy", ["own", "replicated"])
@pytest.mark.parametrize("background", [False, True])
def test_what_was_saved_comes_back(tmp_path: Path, policy: str, background: bool) -> None:
    save = async_save_state_dict if background else save_state_dict
    saved: Any = save(tmp_path, state(), per_rank=VALUES, per_rank_policy=policy, no_dist=True)
    if background:
        saved.committed.result()
    into: dict[str, Any] = {}
    got = state(0)
    load_state_dict(tmp_path, got, per_rank=into, no_dist=True)
    assert {key for key in VALUES if not same(into[key], VALUES[key])} == set()
    assert into.keys() == VALUES.keys()
    assert same(got, state())
    assert "per_rank" not in got


def test_a_load_without_it_and_stock_dcp(tmp_path: Path) -> None:
    save_state_dict(tmp_path, state(), per_rank={"sampler": {"seen": [1, 2]}}, no_dist=True)
    got = state(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_state_dict(tmp_path, got, no_dist=True)
    assert same(got, state())
    stock: dict[str, Any] = {"w": torch.zeros(100), "per_rank": {"rank_0_of_1.sampler": None}}
    dcp.load(stock, checkpoint_id=tmp_path, no_dist=True)
    assert stock["per_rank"] == {"rank_0_of_1.sampler": ({"seen": [1, 2]},)}
    assert read(tmp_path)["per_rank.rank_0_of_1.sampler"] == ({"seen": [1, 2]},)


class Loader:
    """Has a state, as data loaders and schedulers do."""

    def __init__(self, position: int) -> None:
        self.position = position

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position = state_dict["position"]


def test_objects_with_a_state(tmp_path: Path) -> None:
    save_state_dict(tmp_path, state(), per_rank={"loader": Loader(5)}, no_dist=True)
    into = {"loader": Loader(0)}
    loader = into["loader"]
    load_state_dict(tmp_path, state(), per_rank=into, no_dist=True)
    assert into["loader"] is loader
    assert loader.position == 5


def test_random_numbers_go_on(tmp_path: Path) -> None:
    save_state_dict(tmp_path / "step_1", state(), per_rank={"rng": get_rng_state()}, no_dist=True)
    wanted = random.random(), torch.rand(3)
    into: dict[str, Any] = {}
    resumed = resume(tmp_path, state(0), per_rank=into, no_dist=True)
    assert resumed is not None
    set_rng_state(into["rng"])
    assert same((random.random(), torch.rand(3)), wanted)


def test_patterns_leave_it_in(tmp_path: Path) -> None:
    save_state_dict(tmp_path, state(), include="w", per_rank={"n": 1}, no_dist=True)
    assert sorted(read(tmp_path)) == ["per_rank.rank_0_of_1.n", "w"]
    into: dict[str, Any] = {}
    got = {"v": torch.zeros(100)}
    load_state_dict(tmp_path, got, spec=LoadSpec(include="w", rename={"w": "v"}), per_rank=into, no_dist=True)
    assert into == {"n": 1}
    assert bool((got["v"] == 1).all())


def test_keys_that_are_not_there(tmp_path: Path) -> None:
    save_state_dict(tmp_path, state(), per_rank={"a": 1}, no_dist=True)
    with pytest.raises(KeyMismatchError, match=r"per_rank: 'b' was not saved by per_rank="):
        load_state_dict(tmp_path, state(), per_rank={"b": 2}, no_dist=True)
    into = {"b": 2}
    with pytest.warns(RuntimeWarning, match="per_rank: 'b' is not loaded: what is there is kept"):
        load_state_dict(tmp_path, state(), per_rank=into, spec=LoadSpec(strict="checkpoint"), no_dist=True)
    assert into == {"a": 1, "b": 2}
    save_state_dict(tmp_path, state(), no_dist=True)
    into = {}
    load_state_dict(tmp_path, state(), per_rank=into, no_dist=True)
    assert into == {}


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    for arguments, error, text in (
        ({"per_rank": [1]}, ConfigError, "must be a dict of values by name, got a list"),
        ({"per_rank": {"a": 1}, "per_rank_policy": "mine"}, ConfigError, "per_rank_policy='mine': must be one of own"),
        ({"per_rank": {1: 1}}, InvalidPlanError, r"per_rank\[1\]: the key must be a str"),
        ({"per_rank": {"rank_0_of_2.a": 1}}, InvalidPlanError, "the key must be a str that does not begin like"),
        ({"per_rank": {"a": 1}, "per_rank_policy": "sharded"}, InvalidPlanError, "is to be sharded, but is a int"),
    ):
        with pytest.raises(error, match=text):
            save_state_dict(tmp_path / "new", state(), no_dist=True, **arguments)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="has a key 'per_rank'"):
        save_state_dict(tmp_path / "new", {"per_rank": 1}, per_rank={"a": 1}, no_dist=True)
    assert not (tmp_path / "new").exists()
    save_state_dict(tmp_path / "step_1", state(), per_rank={"a": 1}, no_dist=True)
    with pytest.raises(ConfigError, match="pass planner or per_rank, not both"):
        load_state_dict(tmp_path / "step_1", state(), planner=BcpLoadPlanner(), per_rank={}, no_dist=True)
    with pytest.raises(ConfigError, match="per_rank is for state dicts"):
        resume(tmp_path, {}, framework="ddp", per_rank={})
    save_state_dict(tmp_path / "step_2", state(), planner=BcpSavePlanner(), per_rank={"a": 1}, no_dist=True)
    into: dict[str, Any] = {}
    load_state_dict(tmp_path / "step_2", state(), per_rank=into, no_dist=True)
    assert into == {"a": 1}


def test_keys_that_contradict_one_another(tmp_path: Path) -> None:
    """Anybody may have written them."""
    others = {"per_rank": {"rank_0_of_1.a": 1, "rank_0_of_2.b": 2}}
    dcp.save(state() | others, storage_writer=BcpWriter(tmp_path), no_dist=True)
    with pytest.raises(CorruptCheckpointError, match="its keys name 2 numbers of ranks"):
        load_state_dict(tmp_path, state(), per_rank={}, no_dist=True)
