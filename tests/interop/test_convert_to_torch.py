# SPDX-License-Identifier: Apache-2.0
"""Conversions to a file of torch.save: every dtype, nested, cast, with objects; read by torch.load and by zip tools."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from support.dtypes import NAMES
from support.ranks import run_ranks

from bytecheckpoint import LoadSpec, save_state_dict
from bytecheckpoint.convert import convert
from bytecheckpoint.errors import CheckpointExistsError, ConfigError, UnsupportedError
from bytecheckpoint.transforms import Stack, Unstack
from interop.nested_state import assert_equal, save_sharded, state

LONG = pytest.mark.skipif("BCP_LONG" not in os.environ, reason="writes 8.6 GB; runs in make torture (BCP_LONG=1)")


def test_a_nested_state_of_several_ranks(tmp_path: Path) -> None:
    run_ranks(3, save_sharded, str(tmp_path / "ckpt"), False)
    report = convert(tmp_path / "ckpt", tmp_path / "out/model.pt", to="torch", verify=True)
    assert (report.num_files, report.num_tensors, report.num_objects) == (1, 6, 3)
    assert [*(tmp_path / "out").iterdir()] == [tmp_path / "out/model.pt"]
    for mmap in (False, True):
        assert_equal(torch.load(tmp_path / "out/model.pt", weights_only=True, mmap=mmap), state())
    with zipfile.ZipFile(tmp_path / "out/model.pt") as archive:
        assert archive.testzip() is None  # compares all checksums
    with pytest.raises(CheckpointExistsError):
        convert(tmp_path / "ckpt", tmp_path / "out/model.pt", to="torch")


def test_every_dtype_and_shape(tmp_path: Path) -> None:
    tensors: dict[str, Any] = {"scalar": torch.tensor(3.5), "empty": torch.zeros(3, 0, 2), "none": torch.zeros(0)}
    for name in NAMES:
        bits = torch.arange(256, dtype=torch.uint8)
        tensors[name] = (bits % 2).bool() if name == "bool" else bits.view(getattr(torch, name)).reshape(2, -1)
    save_state_dict(tmp_path / "ckpt", tensors, no_dist=True)
    convert(tmp_path / "ckpt", tmp_path / "model.pt", to="torch", verify=True)
    got = torch.load(tmp_path / "model.pt", weights_only=True)
    assert got.keys() == tensors.keys()
    for key, value in tensors.items():
        assert (got[key].dtype, got[key].shape, got[key].is_contiguous()) == (value.dtype, value.shape, True)
        assert got[key].view(torch.uint8).equal(value.view(torch.uint8)) if value.dim() else got[key].equal(value)


def test_objects_alone(tmp_path: Path) -> None:
    save_state_dict(tmp_path / "ckpt", {"step": 3, "names": ["a", (1, None)]}, no_dist=True)
    convert(tmp_path / "ckpt", tmp_path / "state.pt", to="torch", verify=True)
    assert torch.load(tmp_path / "state.pt", weights_only=True) == {"step": 3, "names": ["a", (1, None)]}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("beside", [{}, {"w": torch.arange(3.0)}], ids=["alone", "beside tensors"])
def test_tensors_in_objects_are_storages_of_the_file(tmp_path: Path, beside: dict[str, torch.Tensor]) -> None:
    shared = torch.arange(24.0).reshape(4, 6)
    large = torch.randint(0, 256, (20_000_003,), dtype=torch.uint8)  # in three slots
    every = [torch.arange(256, dtype=torch.uint8).view(getattr(torch, name)) for name in NAMES if name != "bool"]
    held = (shared, shared.T, shared[1:, ::2], torch.tensor(2.5), torch.zeros(0, 3), large)
    objects = {"held": held, "every": (*every,), "parameter": (torch.nn.Parameter(shared),)}
    objects["conj"] = (torch.tensor([1 + 2j]).conj(),)
    save_state_dict(tmp_path / "ckpt", {**beside, **objects}, no_dist=True)
    convert(tmp_path / "ckpt", tmp_path / "state.pt", to="torch", verify=True)
    with zipfile.ZipFile(tmp_path / "state.pt") as archive:
        assert archive.testzip() is None
    for mmap in (False, True):
        got = torch.load(tmp_path / "state.pt", weights_only=True, mmap=mmap)
        assert_equal({name: got[name] for name in beside}, beside)
        for name, tensors in objects.items():
            assert len(got[name]) == len(tensors)
            for value, wanted in zip(got[name], tensors, strict=True):
                assert (value.dtype, value.shape, value.stride()) == (wanted.dtype, wanted.shape, wanted.stride())
                assert (value.requires_grad, type(value)) == (wanted.requires_grad, type(wanted))
                assert _bits(value).equal(_bits(wanted))
        got["held"][0][0, 0] = 7
        assert got["held"][1][0, 0] == 7  # still one storage


def test_cast_and_renamed_over_several_slots(tmp_path: Path) -> None:
    tensors = {f"l.{i}": torch.randn(1_000_003 + i) for i in range(8)}
    save_state_dict(tmp_path / "ckpt", {"model": tensors}, no_dist=True)
    spec = LoadSpec(include="model", rename={"model": ""})
    convert(tmp_path / "ckpt", tmp_path / "model.pt", to="torch", spec=spec, dtype="bfloat16", verify=True)
    got = torch.load(tmp_path / "model.pt", weights_only=True)
    assert_equal(got, {key: value.bfloat16() for key, value in tensors.items()})


def test_more_entries_than_a_zip_of_old_can_count(tmp_path: Path) -> None:
    number = 66_000
    save_state_dict(tmp_path / "ckpt", {"w": torch.arange(number)}, no_dist=True)
    convert(tmp_path / "ckpt", tmp_path / "many.pt", to="torch", spec=LoadSpec(transforms=[Unstack("w", "w.{i}")]))
    got = torch.load(tmp_path / "many.pt", weights_only=True)
    assert len(got) == number
    assert all(int(got[f"w.{i}"]) == i for i in range(number))


@LONG
def test_more_bytes_than_a_zip_of_old_can_count(tmp_path: Path) -> None:
    rows = 130
    tensors = {f"w.{i}": torch.full((1 << 25,), i, dtype=torch.uint8) for i in range(rows)}
    save_state_dict(tmp_path / "ckpt", tensors | {"z": torch.ones(3)}, no_dist=True)
    spec = LoadSpec(transforms=[Stack("w.{i}", "large")])
    convert(tmp_path / "ckpt", tmp_path / "large.pt", to="torch", spec=spec, verify=True)
    assert (tmp_path / "large.pt").stat().st_size > 1 << 32
    got = torch.load(tmp_path / "large.pt", weights_only=True, mmap=True)
    assert got["large"].shape == (rows, 1 << 25)
    assert all(int(got["large"][i, -1]) == i for i in range(rows))
    assert got["z"].equal(torch.ones(3))


def test_quantized_tensors_are_refused(tmp_path: Path) -> None:
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.qint8)
    save_state_dict(tmp_path / "ckpt", {"q": quantized}, no_dist=True)
    with pytest.raises(UnsupportedError, match="'q' is qint8"):
        convert(tmp_path / "ckpt", tmp_path / "model.pt", to="torch")
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


@pytest.mark.parametrize(
    ("rename", "message"),
    [
        ({"x": "a"}, "key 'a' is a value where key 'a.b' needs a dict"),
        ({"a.b": "x.b"}, "key 'x' is a value where key 'x.b' needs a dict"),
        ({"a.b": "l.b"}, "keys 'l.0' and 'l.b': one is in a list where the other one needs a dict"),
    ],
)
def test_keys_that_no_nested_state_can_have_together(tmp_path: Path, rename: dict[str, str], message: str) -> None:
    nested = {"a": {"b": torch.ones(3), "d": {"e": torch.ones(4)}}, "l": [torch.ones(1), 2], "x": torch.zeros(2)}
    save_state_dict(tmp_path / "ckpt", nested, no_dist=True)
    with pytest.raises(ConfigError, match=f"{message}.*rename or exclude one of them"):
        convert(tmp_path / "ckpt", tmp_path / "m.pt", to="torch", spec=LoadSpec(rename=rename))
    assert not (tmp_path / "m.pt").exists()


def test_renamed_keys_with_dots_stay_beside_dicts(tmp_path: Path) -> None:
    nested = {"a": {"d": {"e": torch.ones(4)}}, "x": torch.zeros(2)}
    save_state_dict(tmp_path / "ckpt", nested, no_dist=True)
    convert(tmp_path / "ckpt", tmp_path / "m.pt", to="torch", spec=LoadSpec(rename={"x": "a.d"}))
    assert_equal(torch.load(tmp_path / "m.pt", weights_only=True), {"a": nested["a"], "a.d": nested["x"]})


def test_lists_are_whole_or_refused(tmp_path: Path) -> None:
    """If an element were left out, the others would move."""
    nested = {"l": [torch.zeros(2), {"w": torch.ones(2), "v": 3}, torch.full((2,), 2.0)], "x": torch.zeros(1)}
    save_state_dict(tmp_path / "ckpt", nested, no_dist=True)

    def converted(**choice: Any) -> Any:
        (tmp_path / "m.pt").unlink(missing_ok=True)
        convert(tmp_path / "ckpt", tmp_path / "m.pt", to="torch", spec=LoadSpec(**choice))
        return torch.load(tmp_path / "m.pt", weights_only=True)

    for choice, missing, moved in [
        ({"exclude": "l.1"}, "l.1", "l.2"),
        ({"exclude": "l.0"}, "l.0", "l.1.w"),
        ({"include": "l.2"}, "l.0", "l.2"),
    ]:
        with pytest.raises(ConfigError, match=rf"'{missing}' is an element of a list, and left out.*'{moved}'"):
            converted(**choice)
        assert not (tmp_path / "m.pt").exists()
    assert_equal(converted(exclude="l"), {"x": nested["x"]})
    shorter, other = converted(exclude="l.2")["l"], converted(exclude="l.1.w")["l"]
    assert [each.tolist() for each in (shorter[0], shorter[1].pop("w"))] == [[0.0, 0.0], [1.0, 1.0]]
    assert shorter[1:] == [{"v": 3}]
    assert [other[0].tolist(), other[1], other[2].tolist()] == [[0.0, 0.0], {"v": 3}, [2.0, 2.0]]


@pytest.mark.parametrize("to", ["torch", "safetensors", "bcp", "dcp"])
@pytest.mark.parametrize("kind", ["declared", "named weight", "all are empty"])
def test_placeholders_of_zero_3_are_refused(tmp_path: Path, to: Any, kind: str) -> None:
    empty, ones = torch.zeros(0), torch.ones(2)
    shapes = [{"up.gate": torch.Size([4, 2]), "bias": torch.Size([2])}]
    state: dict[str, Any] = {
        "declared": {"module": {"up.gate": empty, "bias": ones}, "param_shapes": shapes},
        "named weight": {"module": {"up.weight": empty, "bias": ones}},
        "all are empty": {"module": {"up": empty, "down": torch.zeros(0)}},
    }[kind]
    torch.save(state, tmp_path / "rank.pt")
    spec = LoadSpec(include="module", rename={"module": ""})
    with pytest.raises(UnsupportedError, match=r"as ZeRO-3 leaves them .*'up.*Pass the folder of the step"):
        convert(tmp_path / "rank.pt", tmp_path / "out", to=to, spec=spec)
    assert not (tmp_path / "out").exists()


def test_empty_tensors_that_are_data_are_converted(tmp_path: Path) -> None:
    state = {
        "module": {"up.weight": torch.ones(4), "seen": torch.zeros(0)},
        "param_shapes": [{"seen": torch.Size([0])}],
    }
    torch.save(state, tmp_path / "rank.pt")
    convert(tmp_path / "rank.pt", tmp_path / "m.pt", to="torch", spec=LoadSpec(include="module"))
    assert_equal(torch.load(tmp_path / "m.pt", weights_only=True), {"module": state["module"]})
