# SPDX-License-Identifier: Apache-2.0
"""Loads with a LoadSpec in one process: choice, names, transforms, dtypes, and every fault before a byte is read."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.ranks import failures

import bytecheckpoint as bcp
from bytecheckpoint import BcpLoadPlanner, BcpReader, LoadSpec, load_state_dict, save_state_dict
from bytecheckpoint.errors import CheckpointError, ConfigError, KeyMismatchError, ShapeMismatchError, UnsupportedError
from bytecheckpoint.transforms import Concat, Permute, Reshape, Slice, Split, Stack, Transform, Transpose, Unstack

EXPERTS = 3


def stored() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    model = {f"layers.{layer}.{part}": draw(8, 4) for layer in range(2) for part in ("q", "k", "v")}
    model |= {f"experts.{i}.w": draw(5, 6) for i in range(EXPERTS)}
    model |= {"embed": draw(10, 4).to(torch.bfloat16), "bias": draw(6), "scalar": draw()}
    return {"model": model, "step": 7, "optimizer": {"m": draw(4, 4)}}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("spec") / "ckpt"
    save_state_dict(path, stored(), no_dist=True)
    return path


def load(path: Path, state: dict[str, Any], **spec: Any) -> bcp.LoadReport:
    return load_state_dict(path, state, no_dist=True, spec=LoadSpec(**spec))


def blank(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, -1.0).to(dtype)


def test_a_part_is_chosen_and_renamed(saved: Path) -> None:
    state = {f"net.{key}": torch.zeros_like(value) for key, value in stored()["model"].items() if "layers" in key}
    report = load(saved, state, include="model.layers", rename={"model": "net"})
    assert all(torch.equal(value, stored()["model"][key.removeprefix("net.")]) for key, value in state.items())
    assert report.num_renamed_keys == 6
    assert ("model.layers.0.q", "net.layers.0.q") in report.renamed_keys
    assert report.num_missing_keys == report.num_unexpected_keys == 0


def test_objects_can_be_renamed_too(saved: Path) -> None:
    state: dict[str, Any] = {"at": {"step": 0}}
    load(saved, state, include=["step"], rename={"": "at"})
    assert state == {"at": {"step": 7}}


def test_strict_says_which_differences_are_errors(saved: Path) -> None:
    def both() -> dict[str, Any]:
        return {"optimizer": {"m": blank(4, 4), "more": blank(2)}}

    with pytest.raises(KeyMismatchError, match=r"optimizer\.more"):
        load(saved, both(), include="optimizer", strict="model")
    state = both()
    report = load(saved, state, include="optimizer", strict="checkpoint")
    assert report.missing_keys == ("optimizer.more",)
    assert torch.equal(state["optimizer"]["m"], stored()["optimizer"]["m"])
    with pytest.raises(KeyMismatchError, match=r"not asked for: .*model\.bias"):
        load(saved, both(), strict="checkpoint")
    report = load(saved, both(), strict=False)
    assert report.num_unexpected_keys == len(stored()["model"]) + 1
    with pytest.raises(KeyMismatchError):
        load(saved, {"optimizer": {"m": blank(4, 4)}}, strict=True)
    load(saved, {"optimizer": {"m": blank(4, 4)}}, strict=True, exclude=["model", "step"])


CASTS: list[tuple[torch.dtype, torch.dtype, bool]] = [
    (torch.bfloat16, torch.float32, True),
    (torch.float32, torch.bfloat16, False),
    (torch.float16, torch.bfloat16, False),
    (torch.bfloat16, torch.float16, False),
    (torch.float32, torch.float64, True),
    (torch.float8_e4m3fn, torch.bfloat16, True),
    (torch.float8_e5m2, torch.float16, True),
    (torch.float8_e4m3fn, torch.float8_e5m2, False),
    (torch.int32, torch.int64, True),
    (torch.int64, torch.int32, False),
    (torch.uint8, torch.int8, False),
    (torch.uint8, torch.int16, True),
    (torch.int16, torch.float32, True),
    (torch.int32, torch.float32, False),
    (torch.int32, torch.float64, True),
    (torch.float32, torch.int64, False),
    (torch.bool, torch.uint8, True),
    (torch.float32, torch.complex64, True),
    (torch.complex64, torch.complex128, True),
]


@pytest.mark.parametrize(("stored_dtype", "to", "is_wider"), CASTS)
def test_casts(tmp_path: Path, stored_dtype: torch.dtype, to: torch.dtype, is_wider: bool) -> None:
    value = torch.tensor([0, 1, 0, 1]).to(stored_dtype)
    save_state_dict(tmp_path, {"w": value}, no_dist=True)

    def loaded(**spec: Any) -> torch.Tensor:
        state = {"w": torch.zeros(4, dtype=to)}
        report = load_state_dict(tmp_path, state, no_dist=True, spec=LoadSpec(**spec) if spec else None)
        if spec:
            assert report.casts == (("w", str(stored_dtype)[6:], str(to)[6:]),)
        return state["w"]

    assert torch.equal(loaded(cast="any").to(torch.complex128), value.to(torch.complex128))
    assert torch.equal(loaded(cast={"w": to}), loaded(cast={"*": str(to)}))
    with pytest.raises(ShapeMismatchError, match="'w' is"):
        loaded(cast="same")
    for ways in ({"cast": "widen"}, {}):
        if is_wider:
            loaded(**ways)
        else:
            with pytest.raises(ShapeMismatchError, match="cast='any'"):
                loaded(**ways)


def test_plain_dcp_warns_of_values_that_may_be_lost(saved: Path) -> None:
    state = {"model": {"bias": torch.zeros(6, dtype=torch.float16), "embed": torch.zeros(10, 4)}}
    for planner in (BcpLoadPlanner(), None):
        with pytest.warns(RuntimeWarning, match=r"'model\.bias' is float32, loaded into float16(?!.*embed)"):
            dcp.load(state, storage_reader=BcpReader(saved), planner=planner, no_dist=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        planner = BcpLoadPlanner(spec=LoadSpec(include=["model.bias", "model.embed"], cast="any"))
        dcp.load(state, storage_reader=BcpReader(saved), planner=planner, no_dist=True)


def experts_of(model: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [model[f"experts.{i}.w"] for i in range(EXPERTS)]


def test_patterns_that_match_nothing_and_two_sources_for_one_key(saved: Path) -> None:
    for spec, part in (
        ({"include": "modle"}, "'modle' matches no key"),
        ({"exclude": ["x.*"]}, r"'x\.\*' matches no key"),
        ({"rename": {"modle": ""}}, "'modle' matches no key"),
        ({"transforms": [Stack("expert.{i}.w", "experts")]}, "no key of the checkpoint fits"),
    ):
        with pytest.raises(CheckpointError, match=part):
            load(saved, {"step": 0}, **spec)
    with pytest.raises(
        KeyMismatchError, match=r"two sources for one key: .*'model\.layers\.q' of 'model\.layers\.0\.q'"
    ):
        load(saved, {}, rename={"model.layers.{l}": "model.layers"})
    with pytest.raises(KeyMismatchError, match="two sources for one key"):
        load(saved, {}, transforms=[Transpose("model.layers.0.q", to="model.layers.0.k")])


@pytest.mark.parametrize(
    ("transforms", "key", "made"),
    [
        (
            [Stack("model.experts.{i}.w", "model.experts")],
            "experts",
            lambda m: torch.stack(experts_of(m)),
        ),
        (
            [Stack("model.experts.{i}.w", "model.e", dim=-1)],
            "e",
            lambda m: torch.stack(experts_of(m), -1),
        ),
        (
            [Concat(["model.layers.{l}.q", "model.layers.{l}.k", "model.layers.{l}.v"], "model.layers.{l}.qkv")],
            "layers.1.qkv",
            lambda m: torch.cat([m[f"layers.1.{p}"] for p in "qkv"]),
        ),
        ([Split("model.embed", ["model.a", "model.b"], sizes=[7, 3])], "b", lambda m: m["embed"][7:]),
        ([Split("model.layers.0.q", ["model.a", "model.b"], dim=1)], "b", lambda m: m["layers.0.q"][:, 2:]),
        ([Slice("model.embed", begin=2, end=5)], "embed", lambda m: m["embed"][2:5]),
        ([Slice("model.embed", dim=-1, begin=1)], "embed", lambda m: m["embed"][:, 1:]),
        ([Transpose("model.layers.*")], "layers.1.k", lambda m: m["layers.1.k"].T),
        ([Permute("model.embed", "model.e", dims=[1, 0])], "e", lambda m: m["embed"].permute(1, 0)),
        ([Reshape("model.embed", shape=[2, -1, 2])], "embed", lambda m: m["embed"].reshape(2, 10, 2)),
        ([Unstack("model.layers.0.q", "model.rows.{i}")], "rows.5", lambda m: m["layers.0.q"][5]),
    ],
)
def test_transforms(
    saved: Path, transforms: list[Transform], key: str, made: Callable[[dict[str, torch.Tensor]], torch.Tensor]
) -> None:
    wanted = made(stored()["model"])
    state = {"model": {key: torch.zeros_like(wanted, memory_format=torch.contiguous_format)}}
    load(saved, state, transforms=transforms, strict="model")
    assert torch.equal(state["model"][key], wanted)


def test_a_missing_expert_is_an_error_and_not_dropped(tmp_path: Path) -> None:
    save_state_dict(tmp_path, {f"e.{i}.w": torch.ones(2) for i in (0, 1, 3)}, no_dist=True)
    with pytest.raises(KeyMismatchError, match=r"up to 3, but lacks 2"):
        load(tmp_path, {"e": blank(4, 2)}, transforms=[Stack("e.{i}.w", "e")])


def test_a_tensor_that_is_joined_with_itself(tmp_path: Path) -> None:
    save_state_dict(tmp_path, {"a": torch.arange(3.0)}, no_dist=True)
    got = {"x": torch.zeros(6)}
    load(tmp_path, got, transforms=[Concat(["a", "a"], "x")])
    assert torch.equal(got["x"], torch.arange(3.0).repeat(2))


def test_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    save_state_dict(
        tmp_path,
        {"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(2, dtype=torch.int32), "o": [1]},
        no_dist=True,
    )
    for transform, part in (
        (Stack("{i}", "x{i}"), "one placeholder"),
        (Concat(["a", "c"], "x"), "float32 and int32"),
        (Concat(["a", "z"], "x"), "not .'z'."),
        (Concat(["a", "o"], "x"), "'o': it is an object"),
        (Slice("a", end=3), "not all in shape"),
        (Slice("a", dim=2), "dim 2 of 1 dims"),
        (Reshape("a", shape=[3]), "cannot become"),
        (Split("b", ["x", "y"]), "do not make 3"),
    ):
        with pytest.raises(CheckpointError, match=part):
            load(tmp_path, {}, transforms=[transform], strict=False)


Change = Callable[[torch.Tensor], torch.Tensor]


def draw_transforms(draw: random.Random, shape: list[int]) -> tuple[list[Transform], Change]:
    """Draws transforms of the tensor `w`, and what they do in torch."""
    transforms: list[Transform] = []
    steps: list[Callable[[torch.Tensor], torch.Tensor]] = []
    now = torch.empty(shape)
    for _ in range(draw.randint(1, 4)):
        kind = draw.choice(["permute", "slice", "reshape"])
        if kind == "permute":
            dims = draw.sample(range(now.dim()), now.dim())
            transforms.append(Permute("w", dims=dims))
            steps.append(lambda t, dims=dims: t.permute(dims))  # type: ignore[misc]
        elif kind == "slice" and now.dim():
            dim = draw.randrange(now.dim())
            begin = draw.randrange(now.shape[dim])
            end = draw.randint(begin + 1, now.shape[dim])
            transforms.append(Slice("w", dim=dim, begin=begin, end=end))
            steps.append(lambda t, d=dim, b=begin, e=end: t.narrow(d, b, e - b))  # type: ignore[misc]
        else:
            left, new = now.numel(), []
            while left > 1 and len(new) < 3:
                new.append(draw.choice([d for d in range(1, left + 1) if left % d == 0]))
                left //= new[-1]
            new.append(left)
            transforms.append(Reshape("w", shape=new))
            steps.append(lambda t, new=new: t.reshape(new))  # type: ignore[misc]
        now = steps[-1](now)

    def all_steps(tensor: torch.Tensor) -> torch.Tensor:
        for step in steps:
            tensor = step(tensor)
        return tensor

    return transforms, all_steps


@pytest.mark.parametrize("seed", range(30))
def test_any_transforms_of_what_ours_and_stock_dcp_wrote(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    shape = [draw.randint(1, 6) for _ in range(draw.randint(1, 4))]
    dtype = draw.choice([torch.float32, torch.bfloat16, torch.uint8, torch.complex64])
    value = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    if draw.random() < 0.3:  # stock DCP keeps the strides
        value = value.permute(*draw.sample(range(value.dim()), value.dim()))
    transforms, in_torch = draw_transforms(draw, list(value.shape))
    wanted = in_torch(value)
    save_state_dict(tmp_path / "ours", {"w": value}, no_dist=True)
    dcp.save({"w": value}, storage_writer=dcp.FileSystemWriter(tmp_path / "stock"), no_dist=True)
    for name in ("ours", "stock"):
        state = {"w": torch.zeros(wanted.shape, dtype=dtype)}
        may_be_refused = name == "stock" and not value.is_contiguous()
        with contextlib.suppress(*[UnsupportedError] * may_be_refused):
            load(tmp_path / name, state, transforms=transforms)
            assert torch.equal(state["w"], wanted), (name, transforms)


def test_a_spec_needs_our_reader(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(2)}, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    planner = BcpLoadPlanner(spec=LoadSpec(rename={"w": "v"}))
    failed = failures(
        lambda: dcp.load({"v": blank(2)}, storage_reader=dcp.FileSystemReader(tmp_path), planner=planner, no_dist=True)
    )
    assert isinstance(failed[0], UnsupportedError)
    state = {"w": torch.zeros(2, dtype=torch.float64)}
    planner = BcpLoadPlanner(spec=LoadSpec(cast="widen"))
    dcp.load(state, storage_reader=dcp.FileSystemReader(tmp_path), planner=planner, no_dist=True)
    assert torch.equal(state["w"], torch.ones(2, dtype=torch.float64))


def test_register_takes_a_spec(saved: Path) -> None:
    state = {"m": blank(4, 4)}
    with bcp.registered(spec=LoadSpec(include="optimizer", rename={"optimizer": ""})):
        dcp.load(state, checkpoint_id=saved, no_dist=True)
    assert torch.equal(state["m"], stored()["optimizer"]["m"])


def test_planner_or_spec_but_not_both(saved: Path) -> None:
    with pytest.raises(ConfigError, match="not both"):
        load_state_dict(saved, {}, no_dist=True, planner=BcpLoadPlanner(), spec=LoadSpec())


def test_an_inverted_spec_undoes_it(tmp_path: Path) -> None:
    spec = LoadSpec(transforms=[Transpose("w"), Stack("e.{i}", "e"), Permute("p", dims=[2, 0, 1])])
    value = {"w": torch.randn(2, 3), "e.0": torch.randn(2), "e.1": torch.randn(2), "p": torch.randn(2, 3, 4)}
    save_state_dict(tmp_path / "a", value, no_dist=True)
    there = {"w": blank(3, 2), "e": blank(2, 2), "p": blank(4, 2, 3)}
    load_state_dict(tmp_path / "a", there, no_dist=True, spec=spec)
    save_state_dict(tmp_path / "b", there, no_dist=True)
    back = {key: torch.zeros_like(tensor) for key, tensor in value.items()}
    load_state_dict(tmp_path / "b", back, no_dist=True, spec=spec.inverted())
    assert all(torch.equal(back[key], value[key]) for key in value)
    assert LoadSpec(rename={"a": "b", "h.{i}": "l.{i}"}).inverted().rename == {"b": "a", "l.{i}": "h.{i}"}
    for one_way in (LoadSpec(rename={"a*": "b"}), LoadSpec(transforms=[Slice("a", begin=1)])):
        with pytest.raises(ConfigError, match="invert"):
            one_way.inverted()


def test_a_file_says_the_same(tmp_path: Path, saved: Path) -> None:
    file = tmp_path / "spec.toml"
    file.write_text(
        """
include = ["model.experts.*", "model.bias"]
strict = "model"
[rename]
model = ""
[cast]
bias = "float64"
[[transforms]]
kind = "stack"
from = "model.experts.{i}.w"
to = "model.experts"
"""
    )
    state = {"experts": blank(3, 5, 6), "bias": blank(6, dtype=torch.float64)}
    load_state_dict(saved, state, no_dist=True, spec=LoadSpec.from_file(file))
    assert torch.equal(state["experts"], torch.stack([stored()["model"][f"experts.{i}.w"] for i in range(3)]))


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("include = [", r"line 1|end of document"),
        ("strict = true\ninclud = []", r"line 2, column 1: unknown key 'includ'"),
        ("\ncast = 'wide'", r"line 2, column 9: .*must be one of"),
        ("[[transforms]]\nkind = 'stak'", r"line 2, column 9: kind = 'stak'"),
        ("[[transforms]]\nkind = 'stack'\nfrm = 'x'\nto = 'y'", r"line 3, column 1: 'frm'"),
        ("[[transforms]]\nkind = 'stack'", "missing"),
        ("transforms = 3", "table"),
        ("rename = 3", "must be a dict"),
        ("include = ['re:(']", "line 1"),
    ],
)
def test_a_fault_in_a_file_is_named_with_its_place(tmp_path: Path, text: str, part: str) -> None:
    file = tmp_path / "spec.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=part) as failure:
        LoadSpec.from_file(file)
    assert str(file) in str(failure.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        LoadSpec.from_file(tmp_path / "absent.toml")


def test_large_metadata_are_read_whole_for_a_view(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bytecheckpoint.dcp._reader_base._MAX_WHOLE_METADATA_BYTES", 0)
    state = {"m": blank(4, 4)}
    load(saved, state, include="optimizer", rename={"optimizer": ""})
    assert torch.equal(state["m"], stored()["optimizer"]["m"])


def test_a_reader_used_again_reads_what_the_next_planner_says(saved: Path) -> None:
    reader = BcpReader(saved)
    for spec, key in ((LoadSpec(include="optimizer", rename={"optimizer": ""}), "m"), (None, "optimizer.m")):
        state = {key: blank(4, 4)}
        dcp.load(state, storage_reader=reader, planner=BcpLoadPlanner(spec=spec), no_dist=True)
        assert torch.equal(state[key], stored()["optimizer"]["m"])
