# SPDX-License-Identifier: Apache-2.0
"""Tensors of subclasses that describe themselves: saved by their parts, filled in place, loadable by stock DCP."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.subclasses import Int8Rows, MaybeScaled, Mode, PerTensor, Tiling, TwoLevels

import bytecheckpoint
from bytecheckpoint import (
    BcpLoadPlanner,
    BcpReader,
    BcpSavePlanner,
    BcpStager,
    BcpWriter,
    Config,
    LoadSpec,
    async_save_state_dict,
    load_state_dict,
    save_state_dict,
    verify,
)
from bytecheckpoint.errors import (
    CheckpointError,
    InvalidPlanError,
    KeyMismatchError,
    ShapeMismatchError,
    UnsafeObjectError,
)
from bytecheckpoint.tensors.equality import bits
from bytecheckpoint.tensors.subclass_context import NotPlainError, difference, plain_context
from bytecheckpoint.tensors.subclass_parts import parts_of


def state_of(seed: int, **options: Any) -> dict[str, Any]:
    layers = [
        {"weight": torch.nn.Parameter(Int8Rows.make(6, 4, seed + i, **options), requires_grad=False)} for i in range(2)
    ]
    two = TwoLevels(PerTensor.make(3, 5, seed + 0.5, **options), **options)
    return {"model": {"layers": layers, "two": two, "bias": torch.full((4,), float(seed))}, "step": seed}


PARTS = {
    *(f"model.layers.{i}.weight.{part}" for i in range(2) for part in ("qdata", "scale", "table", "__subclass__")),
    *(f"model.two.{part}" for part in ("inner.qdata", "inner.scale", "__subclass__")),
    "model.bias",
    "step",
}


def plain(value: Any) -> list[torch.Tensor]:
    if not isinstance(value, torch.Tensor):
        return [torch.tensor(value)]
    parts = getattr(value, "parts", None)
    return [value] if parts is None else [leaf for part in parts() for leaf in plain(part)]


def leaves(state: Any) -> list[torch.Tensor]:
    if isinstance(state, dict):
        return [leaf for each in state.values() for leaf in leaves(each)]
    if isinstance(state, list):
        return [leaf for each in state for leaf in leaves(each)]
    return plain(state)


def assert_same(got: Any, wanted: Any) -> None:
    pairs = [*zip(leaves(got), leaves(wanted), strict=True)]
    assert len(pairs) == 10
    for a, b in pairs:
        assert a.dtype == b.dtype
        assert torch.equal(bits(a), bits(b))


def save_now(path: Path, state: Any) -> None:
    save_state_dict(path, state)


def save_later(path: Path, state: Any) -> None:
    handle = async_save_state_dict(path, state)
    for leaf in leaves({key: value for key, value in state.items() if key != "step"}):
        leaf.zero_()
    handle.committed.result()


def save_by_dcp(path: Path, state: Any) -> None:
    dcp.save(state, storage_writer=BcpWriter(path), planner=BcpSavePlanner(), no_dist=True)


def save_by_dcp_later(path: Path, state: Any) -> None:
    options: Any = {"storage_writer": BcpWriter(path), "planner": BcpSavePlanner(), "async_stager": BcpStager()}
    dcp.async_save(state, no_dist=True, **options).result()  # type: ignore[union-attr]


def save_by_stock_writer(path: Path, state: Any) -> None:
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path), planner=BcpSavePlanner(), no_dist=True)


SAVES = [save_now, save_later, save_by_dcp, save_by_dcp_later, save_by_stock_writer]


@pytest.mark.parametrize("save", SAVES)
def test_parts_are_saved_and_filled_in_place(tmp_path: Path, save: Callable[[Path, Any], None]) -> None:
    save(tmp_path, state_of(1))
    metadata = dcp.FileSystemReader(tmp_path).read_metadata()
    assert {*metadata.state_dict_metadata} == PARTS
    assert metadata.planner_data["model.two.inner.scale"] == ("model", "two", "inner", "scale")
    got = state_of(7)
    tensors = leaves(got)
    load_state_dict(tmp_path, got)  # nothing is unpickled: the default Config would refuse it
    assert_same(got, state_of(1))
    assert type(got["model"]["two"]) is TwoLevels
    assert all(a is b for a, b in zip(tensors[:-1], leaves(got)[:-1], strict=True))
    got = state_of(7)
    dcp.load(got, storage_reader=BcpReader(tmp_path), planner=BcpLoadPlanner(), no_dist=True)
    assert_same(got, state_of(1))
    got = state_of(7)
    dcp.load(got, storage_reader=dcp.FileSystemReader(tmp_path), planner=BcpLoadPlanner(), no_dist=True)
    assert_same(got, state_of(1))
    if save is not save_by_stock_writer:
        assert verify(tmp_path).is_whole


def dict_of_parts(tensor: Any) -> Any:
    """What a program without this package writes to load with stock DCP."""
    if not hasattr(type(tensor), "__tensor_flatten__"):
        return tensor
    return {name: dict_of_parts(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0]}


@pytest.mark.parametrize("save", SAVES)
def test_stock_dcp_loads_it(tmp_path: Path, save: Callable[[Path, Any], None]) -> None:
    save(tmp_path, state_of(1))
    got = state_of(7)
    model = got["model"]
    parts = {
        "layers": [{"weight": dict_of_parts(layer["weight"])} for layer in model["layers"]],
        "two": dict_of_parts(model["two"]),
        "bias": model["bias"],
    }
    loaded = {"model": parts, "step": 0}
    dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    got["step"] = loaded["step"]
    assert_same(got, state_of(1))
    by_key = {"model.two.inner.qdata": torch.zeros(3, 5, dtype=torch.float8_e4m3fn)}
    dcp.load(by_key, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(bits(by_key["model.two.inner.qdata"]), bits(state_of(1)["model"]["two"].inner.qdata))


def test_the_description_is_plain(tmp_path: Path) -> None:
    save_now(tmp_path, state_of(1))
    got: dict[str, Any] = {"model.layers.0.weight.__subclass__": ""}
    dcp.load(got, checkpoint_id=tmp_path, no_dist=True)
    description = json.loads(got["model.layers.0.weight.__subclass__"])
    assert description == {
        "class": "Int8Rows",
        "module": "support.subclasses",
        "shape": [6, 4],
        "context": {
            "tiling": {"class": "Tiling", "fields": {"rows": 1, "mode": "Mode.SYMMETRIC"}},
            "dtype": "torch.float32",
            "shape": [6, 4],
            "device": "device",
        },
        "parts": ["qdata", "scale", "table"],
        "inner": {},
    }


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"tiling": Tiling(rows=2)}, r"'model\.layers\.0\.weight': context\.tiling\.fields\.rows: stored is 1,"),
        ({"tiling": Tiling(mode=Mode.AFFINE)}, "stored is 'Mode.SYMMETRIC', the tensor to fill has 'Mode.AFFINE'"),
        ({"dtype": torch.bfloat16}, "stored is 'torch.float32', the tensor to fill has 'torch.bfloat16'"),
    ],
)
def test_another_context_is_refused(tmp_path: Path, other: dict[str, Any], said: str) -> None:
    save_now(tmp_path, state_of(1))
    with pytest.raises(InvalidPlanError, match=said):
        load_state_dict(tmp_path, state_of(7, **other))


def test_another_class_or_shape_is_refused_before_reading(tmp_path: Path) -> None:
    save_now(tmp_path, {"w": Int8Rows.make(6, 4, 1)})
    other = {"w": Int8Rows.make(6, 5, 2)}
    before = [part.clone() for part in other["w"].parts()]
    with pytest.raises(ShapeMismatchError, match=r"'w\.qdata'"):
        load_state_dict(tmp_path, other)
    assert all(map(torch.equal, other["w"].parts(), before))
    with pytest.raises(KeyMismatchError, match=r"'w\.table' is stored, and the PerTensor to fill has no such part"):
        load_state_dict(tmp_path, {"w": PerTensor.make(6, 4, 0.5)})
    with pytest.raises(KeyMismatchError, match=r"'w'"):  # a plain tensor of the same shape
        load_state_dict(tmp_path, {"w": torch.zeros(6, 4)})
    with pytest.raises(KeyMismatchError, match=r"'w\.inner\.qdata'"):
        load_state_dict(tmp_path, {"w": TwoLevels(PerTensor.make(6, 4, 0.5)), "w.qdata": torch.zeros(1)})


def load_loosely(path: Path, state: Any) -> None:
    load_state_dict(path, state, spec=LoadSpec(strict=False))


def load_in_part(path: Path, state: Any) -> None:
    planner = BcpLoadPlanner(allow_partial_load=True)
    load_state_dict(path, state, planner=planner)


def load_registered(path: Path, state: Any) -> None:
    with bytecheckpoint.registered():
        try:
            dcp.load(state, checkpoint_id=path, no_dist=True)
        except dcp.api.CheckpointException as failed:
            raise failed.failures[0][0] from None


def load_live(path: Path, state: Any) -> None:
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(state["w"], requires_grad=False)
    bytecheckpoint.load(path, {"model": model}, "ddp", strict=False)


@pytest.mark.parametrize("load", [load_state_dict, load_loosely, load_in_part, load_registered, load_live])
@pytest.mark.parametrize("outer", [lambda each: each, TwoLevels])
@pytest.mark.parametrize(("stored", "own"), [(0.5, None), (None, 0.5)])
def test_a_part_that_one_side_lacks(tmp_path: Path, load: Any, outer: Any, stored: Any, own: Any) -> None:
    """However strict the load is: the values of the other parts mean nothing without it."""
    path = tmp_path / "model" if load is load_live else tmp_path
    save_state_dict(path, {"w": outer(MaybeScaled.make(6, 4, 3, stored)), "bias": torch.ones(4)})
    tensor = outer(MaybeScaled.make(6, 4, 1, own))
    before = [part.clone() for part in plain(tensor)]
    key = r"w\.inner\.factor" if outer is TwoLevels else r"w\.factor"
    said = f"'{key}' is stored, and the" if own is None else f"has the part '{key}', which is not stored"
    with pytest.raises(KeyMismatchError, match=said):
        load(tmp_path, {"w": tensor})
    assert all(map(torch.equal, plain(tensor), before))


@pytest.mark.parametrize("saved", [MaybeScaled.make(6, 4, 3, 0.5), torch.ones(6, 4)])
def test_what_the_class_cannot_copy(tmp_path: Path, saved: Any) -> None:
    """An opaque record with another part, or a plain tensor: the class itself refuses it, with any exception."""
    save_state_dict(tmp_path, {"w": saved}, config=Config(tensor_subclasses="opaque", unsafe_objects="allow"))
    with pytest.raises(InvalidPlanError, match=r"'w': what is stored cannot be copied: a \w+ into a Maybe"):
        load_state_dict(tmp_path, {"w": MaybeScaled.make(6, 4, 1)}, config=Config(allow_pickle=True))


def test_a_part_that_a_spec_leaves_out(tmp_path: Path) -> None:
    """The keys look alike then, but the description names the parts."""
    save_state_dict(tmp_path, {"w": MaybeScaled.make(6, 4, 3, 0.5)})
    with pytest.raises(InvalidPlanError, match=r"'w': stored are the parts \['qdata', 'factor'\], the tensor to fill"):
        load_state_dict(tmp_path, {"w": MaybeScaled.make(6, 4, 1)}, spec=LoadSpec(exclude="w.factor"))
    with pytest.raises(KeyMismatchError, match=r"'v\.factor' is stored"):
        load_state_dict(tmp_path, {"v": MaybeScaled.make(6, 4, 1)}, spec=LoadSpec(rename={"w": "v"}, strict=False))


def test_a_key_of_a_part_that_is_there_already(tmp_path: Path) -> None:
    state = {"w": Int8Rows.make(6, 4, 1), "w.scale": torch.ones(2)}
    with pytest.raises(InvalidPlanError, match=r"'w\.scale': the state has this key"):
        save_state_dict(tmp_path, state)
    handle = async_save_state_dict(tmp_path, state)
    with pytest.raises(CheckpointError, match=r"duplicated flatten key w\.scale"):
        handle.committed.result()
    assert not (tmp_path / ".metadata").exists()


def test_opaque_as_before(tmp_path: Path) -> None:
    """The setting keeps what stock DCP writes; both ways load, into the same program."""
    opaque = Config(tensor_subclasses="opaque")
    state = {"w": Int8Rows.make(6, 4, 1)}
    save_state_dict(tmp_path / "now", state, config=opaque)
    async_save_state_dict(tmp_path / "later", state, config=opaque).committed.result()
    dcp.save(state, checkpoint_id=tmp_path / "stock", no_dist=True)
    stager, writer = BcpStager(), dcp.FileSystemWriter(tmp_path / "stock staged")
    dcp.async_save(state, storage_writer=writer, async_stager=stager, no_dist=True).result()  # type: ignore[union-attr]
    for name in ("now", "later", "stock", "stock staged"):
        assert {*dcp.FileSystemReader(tmp_path / name).read_metadata().state_dict_metadata} == {"w"}, name
        got = {"w": Int8Rows.make(6, 4, 2)}
        with pytest.raises(UnsafeObjectError, match="Int8Rows"):
            load_state_dict(tmp_path / name, got)
        load_state_dict(tmp_path / name, got, config=Config(allow_pickle=True))
        assert all(map(torch.equal, got["w"].parts(), state["w"].parts()))


class Unsayable(Int8Rows):
    """Its context has a function without a name."""

    def __tensor_flatten__(self) -> Any:
        return [*self.names], {"function": lambda x: x}


class Computed(Int8Rows):
    """One of its tensors is made anew at each access, so that filling it would change nothing."""

    names = ("qdata", "scale", "table")

    @property
    def doubled(self) -> torch.Tensor:
        return self.scale * 2  # type: ignore[attr-defined, no-any-return]

    def __tensor_flatten__(self) -> Any:
        return ["qdata", "doubled"], None


@pytest.mark.parametrize("kind", [Unsayable, Computed])
def test_what_cannot_be_taken_apart_stays_whole(tmp_path: Path, kind: Any) -> None:
    tensor = kind.make(6, 4, 1)
    assert parts_of(tensor, "w") is None
    dcp.save({"w": tensor}, storage_writer=BcpWriter(tmp_path), no_dist=True)
    assert {*dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata} == {"w"}


def test_patterns_and_specs_work_on_parts(tmp_path: Path) -> None:
    save_state_dict(tmp_path, state_of(1), exclude=["model.layers.1", "step"])
    assert {*dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata} == {
        key for key in PARTS if not key.startswith("model.layers.1") and key != "step"
    }
    got = {"net": {"w": Int8Rows.make(6, 4, 5)}}
    load_state_dict(tmp_path, got, spec=LoadSpec(include="model.layers.0", rename={"model.layers.0.weight": "net.w"}))
    wanted = Int8Rows.make(6, 4, 1)
    assert all(map(torch.equal, got["net"]["w"].parts(), wanted.parts()))
    # Without its description, the tensors of the parts are still loaded; a part that is missing is an error.
    got = {"net": {"w": Int8Rows.make(6, 4, 5)}}
    rename = {"model.layers.0.weight": "net.w"}
    spec = LoadSpec(include="model.layers.0", exclude="*.__subclass__", rename=rename)
    load_state_dict(tmp_path, got, spec=spec)
    assert all(map(torch.equal, got["net"]["w"].parts(), wanted.parts()))
    with pytest.raises(KeyMismatchError, match=r"net\.w\.scale"):
        load_state_dict(tmp_path, got, spec=dataclasses.replace(spec, exclude=["*.scale", "*.__subclass__"]))


def test_staged_memory_holds_the_parts(tmp_path: Path) -> None:
    """They are copied into the arena, whose limit counts them."""
    tensor = Int8Rows.make(512, 1024, 1)
    with pytest.raises(bytecheckpoint.errors.StagingFullError):
        async_save_state_dict(tmp_path, {"w": tensor}, config=Config(staging_bytes=64 << 10))


class Net(torch.nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(Int8Rows.make(6, 4, seed), requires_grad=False)
        self.bias = torch.nn.Parameter(torch.full((6,), float(seed)))


@pytest.mark.parametrize("fast", [False, True])
def test_bytecheckpoint_save_and_load(tmp_path: Path, fast: bool) -> None:
    model = Net(1)
    optimizer = torch.optim.AdamW([model.bias])
    model.bias.sum().backward()
    optimizer.step()
    live = {"model": model, "optimizer": optimizer, "extra_state": {"step": 3}}
    bytecheckpoint.save(tmp_path, live, "ddp", fast_saving=fast).committed.result()
    keys = {*dcp.FileSystemReader(tmp_path / "model").read_metadata().state_dict_metadata}
    assert keys == {"w.qdata", "w.scale", "w.table", "w.__subclass__", "bias"}
    other = Net(2)
    got = {"model": other, "optimizer": torch.optim.AdamW([other.bias]), "extra_state": {"step": 0}}
    result = bytecheckpoint.load(tmp_path, got, "ddp")
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert all(map(torch.equal, other.w.parts(), model.w.parts()))  # type: ignore[operator]
    assert torch.equal(other.bias, model.bias)


class Settings(NamedTuple):
    rows: int
    dtype: torch.dtype


def test_contexts_in_plain_values() -> None:
    assert plain_context(Settings(1, torch.int8)) == {"class": "Settings", "fields": {"rows": 1, "dtype": "torch.int8"}}
    assert plain_context((1, torch.Size([2]), {"a": Mode, "b": math.sqrt, "c": torch.strided})) == [
        1,
        [2],
        {"a": "Mode", "b": "sqrt", "c": "torch.strided"},
    ]
    for value in (object(), torch.ones(1), lambda: 0, {1: 2}, dict_of_parts.__get__(1)):
        with pytest.raises(NotPlainError):
            plain_context(value)


@pytest.mark.parametrize(
    "stored",
    [
        None,
        [],
        {},
        {"class": "A"},
        {"class": "A", "context": [1], "shape": None},
        {"class": "A", "context": {"x": [2, 3]}},
    ],
)
def test_descriptions_that_are_none(stored: Any) -> None:
    """A stored description may say anything."""
    own = {"class": "A", "context": {"x": [2, 4]}, "shape": [2, 4], "inner": {"b": {"class": "B"}}}
    assert difference(json.dumps(stored), json.dumps(own)) is not None
    for odd in (stored, "{", b"\xff", "[" * 100_000, 7):
        assert difference(odd, json.dumps(own)) is not None


def test_sizes_may_be_those_of_the_shard() -> None:
    def described(shape: list[int], block: list[int]) -> str:
        return json.dumps({"class": "A", "shape": shape, "context": {"shape": shape, "block": block}, "inner": {}})

    assert difference(described([8, 4], [8, 4]), described([2, 4], [2, 4])) is None  # one block for the whole
    assert difference(described([8, 4], [1, 4]), described([2, 4], [1, 4])) is None
    assert difference(described([8, 4], [2, 4]), described([2, 4], [2, 4])) is None
    assert difference(described([8, 4], [1, 4]), described([8, 4], [2, 4])) is not None
    assert difference(described([8, 4], [1, 2]), described([8, 4], [1, 4])) is not None
