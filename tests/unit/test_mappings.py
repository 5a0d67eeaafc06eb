# SPDX-License-Identifier: Apache-2.0
"""Mappings that are no dicts, and dicts with attributes: what is in them is stored, or it is said that it is not."""

from __future__ import annotations

import collections
import types
import warnings
from collections.abc import ItemsView, Iterator, KeysView, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from bytecheckpoint import Config, async_save_state_dict, load_state_dict, save_state_dict
from bytecheckpoint.native import _C


class Text(Mapping[str, Any]):
    """Has a text and no items, as tensordict's values that are no tensors."""

    def __init__(self, text: str = "") -> None:
        if text:
            self.text = text

    def __getitem__(self, key: str) -> Any:
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Text) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]


class Slotted(Text):
    __slots__ = ("inner",)

    def __init__(self, inner: object) -> None:
        self.inner = inner


class Rows(Mapping[str, Any]):
    """Its iteration, its length and its ``in`` are about rows and not about keys, as those of a TensorDict."""

    def __init__(self, **values: Any) -> None:
        self.values_by_key = values

    def __getitem__(self, key: Any) -> Any:
        return self.values_by_key[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.values_by_key[key] = value

    def __iter__(self) -> Iterator[str]:
        raise TypeError("iteration over 0 rows")

    def __len__(self) -> int:
        return 0

    def __contains__(self, key: object) -> bool:
        raise NotImplementedError("say keys()")

    def keys(self) -> KeysView[str]:
        return self.values_by_key.keys()

    def items(self) -> ItemsView[str, Any]:
        return self.values_by_key.items()


def save(path: Path, state: dict[str, Any], in_background: bool) -> list[str]:
    if in_background:
        async_save_state_dict(path, state, no_dist=True).committed.result(60)
    else:
        save_state_dict(path, state, no_dist=True)
    return _C.Checkpoint.open(str(path)).names()


@pytest.mark.filterwarnings("ignore:.*these objects will not load without opting in")
@pytest.mark.parametrize("in_background", [False, True])
def test_a_mapping_without_items_but_with_attributes_is_an_object(tmp_path: Path, in_background: bool) -> None:
    state = {"a": Text("hello"), "l": [Text("in a list"), torch.ones(2)], "n": {"s": Slotted("kept")}}
    assert save(tmp_path, state, in_background) == ["a", "l.0", "l.1", "n.s"]
    got = {"a": Text("other"), "l": [Text("other"), torch.zeros(2)], "n": {"s": Slotted("other")}}
    load_state_dict(tmp_path, got, no_dist=True, config=Config(allow_pickle=True))
    assert (got["a"], got["l"][0]) == (Text("hello"), Text("in a list"))
    assert got["n"]["s"].inner == "kept"
    assert got["l"][1].eq(1).all()


def test_a_mapping_with_nothing_in_it_has_no_key(tmp_path: Path) -> None:
    nothing = [
        {}, collections.OrderedDict(), collections.Counter(), collections.UserDict(), collections.ChainMap({}, {}),
        types.MappingProxyType({}), Text(), Slotted(None), Slotted(({}, [set(), [None]])),
    ]  # fmt: skip
    state = {"w": torch.ones(2), **{str(number): value for number, value in enumerate(nothing)}}
    assert save(tmp_path / "1", state, False) == ["w"]
    del state["5"]  # staging copies, and nobody can copy a MappingProxyType
    assert save(tmp_path / "2", state, True) == ["w"]


@pytest.mark.parametrize("in_background", [False, True])
def test_a_mapping_that_iterates_over_something_else(tmp_path: Path, in_background: bool) -> None:
    def state(value: float) -> dict[str, Any]:
        return {"x": Rows(a=torch.full((3,), value), step=value, deep=Rows(b=torch.full((2,), value), text=f"{value}"))}

    saved, got = state(2.0), state(0.0)
    assert save(tmp_path, saved, in_background) == ["x.a", "x.deep.b", "x.deep.text", "x.step"]
    load_state_dict(tmp_path, got, no_dist=True)
    x = got["x"]
    assert (x["step"], x["deep"]["text"]) == (2.0, "2.0")
    assert x["a"].eq(2).all()
    assert x["deep"]["b"].eq(2).all()


def test_values_beside_the_items_are_named_once(tmp_path: Path) -> None:
    state = collections.OrderedDict(a=torch.ones(2))
    # As TensorDict.state_dict() has them.
    facts = {"batch_size": torch.Size([]), "device": None}
    state._metadata = {"": facts, "text": {**facts, "_non_tensor": {"data": "hello"}}}  # type: ignore[attr-defined]
    name = f"x{id(facts)}"
    with pytest.warns(RuntimeWarning, match=rf"attribute _metadata .* does not have them: '{name}\.text'\. Give them"):
        save(tmp_path / "1", {name: state}, False)
    with pytest.warns(RuntimeWarning, match=rf"does not have them: 'y{name}\.text'\. Give them"):
        save(tmp_path / "2", {name: state, f"y{name}": state}, True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(tmp_path / "3", {name: state}, False)


def test_versions_of_modules_are_not_named(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(tmp_path / "1", {"model": model.state_dict()}, False)
        save(tmp_path / "2", model.state_dict(), True)
