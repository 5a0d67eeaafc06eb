# SPDX-License-Identifier: Apache-2.0
"""``read`` gives whole tensors and objects without a state: checked, in little memory, and never of two saves."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from support.equality import assert_equal
from torch import nn
from unit.partial_states import PARTIAL, rows

import bytecheckpoint
from bytecheckpoint import Config, LoadSpec, read, save_state_dict
from bytecheckpoint.errors import CheckpointError, ConfigError, CorruptCheckpointError, UnsafeObjectError
from bytecheckpoint.native import _core
from bytecheckpoint.transforms import Concat, Stack

LARGE = torch.arange(600_000, dtype=torch.float32).reshape(600, 1000)
DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64, torch.complex64)


def state() -> dict[str, Any]:
    odd = {str(dtype).removeprefix("torch."): torch.arange(7).to(dtype) for dtype in DTYPES}
    return {
        "model": {"large": LARGE, "bias": torch.arange(7.0), "scalar": torch.tensor(3.0), "empty": torch.empty(0, 4)},
        "odd": odd,
        "strided": torch.arange(400_000).reshape(2, 200_000).t(),
        "step": 7,
        "settings": {"lr": 0.1, "betas": (0.9, 0.95)},
    }


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {prefix: value}
    return {name: each for key, of in value.items() for name, each in flat(of, f"{prefix}.{key}".lstrip(".")).items()}


@pytest.fixture
def step(tmp_path: Path) -> Path:
    save_state_dict(tmp_path / "step_1", state(), no_dist=True, user_metadata={"run": 5})
    return tmp_path / "step_1"


def is_mapped(tensor: torch.Tensor) -> bool:
    """Whether its memory is that of a data file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, _, end = line.split()[0].partition("-")
        if int(begin, 16) <= tensor.data_ptr() < int(end, 16):
            return ".distcp" in line
    return False


def test_everything_is_as_it_was_saved(step: Path) -> None:
    got = read(step)
    wanted = flat(state())
    assert sorted(got) == sorted(wanted)
    assert len(got) == len(wanted)
    assert_equal(dict(sorted(got.items())), dict(sorted(wanted.items())))
    assert got.user_metadata == {"run": 5}
    assert repr(got) == f"<StoredState of {step}: 11 tensors, 3 objects, 5.60 MB>"
    model = nn.ParameterDict({"large": torch.zeros(600, 1000)})
    model.load_state_dict({"large": got["model.large"]})
    assert torch.equal(model["large"], LARGE)


def test_keys(step: Path) -> None:
    got = read(step)
    assert "model.large" in got
    assert "large" not in got
    assert got.get("none") is None
    with pytest.raises(KeyError, match=r"there is no 'model.larg'; near it model.large"):
        got["model.larg"]


def test_a_large_tensor_is_mapped_and_private(step: Path) -> None:
    got = read(step)
    large = got["model.large"]
    assert is_mapped(large)
    assert large.untyped_storage().nbytes() == large.nbytes
    assert got["model.large"] is large
    large.fill_(-1)
    assert torch.equal(read(step)["model.large"], LARGE)
    assert bytecheckpoint.verify(step).is_whole
    shutil.rmtree(step)
    assert bool((large == -1).all())


def test_nothing_is_kept_but_what_is_held(step: Path) -> None:
    got = read(step)
    address = got["strided"].data_ptr()
    kept = got["strided"]
    assert got["strided"] is kept
    del kept
    assert address
    assert not got._held
    bias = got["model.bias"]
    assert bias.untyped_storage().nbytes() == bias.nbytes  # one that is pickled takes no others along


@pytest.mark.parametrize("key", ["model.large", "strided", "odd.bfloat16", "step"])
def test_damage_is_found_at_the_value_that_has_it(step: Path, key: str) -> None:
    checkpoint = _core.Checkpoint.open(str(step))
    named = dict(zip((name for name, *_ in checkpoint.contents()), checkpoint.chunks(), strict=True))
    ((_, _, file, offset, num_bytes),) = named[key]
    assert file is not None
    with (step / file).open("r+b") as opened:
        opened.seek(offset + num_bytes - 3)
        byte = opened.read(1)[0]
        opened.seek(offset + num_bytes - 3)
        opened.write(bytes([byte ^ 0x40]))
    got = read(step)
    with pytest.raises(CorruptCheckpointError, match=key if key != "step" else ""):
        got[key]
    if key == "strided":  # with the others it has no block in common, unlike the small ones
        assert torch.equal(got["odd.int64"], torch.arange(7))


def test_another_save_is_no_mixture(step: Path) -> None:
    got = read(step)
    assert got["step"] == 7
    save_state_dict(step, {**state(), "step": 8}, no_dist=True)
    with pytest.raises(CheckpointError):
        got["model.large"]
    with pytest.raises(CheckpointError):
        got["settings.lr"]
    assert got["step"] == 7
    assert read(step)["step"] == 8


def test_patterns_and_specs(step: Path) -> None:
    assert sorted(read(step, "model")) == ["model.bias", "model.empty", "model.large", "model.scalar"]
    assert sorted(read(step, include="model.*", exclude=["*.empty", "*.scalar"])) == ["model.bias", "model.large"]
    assert is_mapped(read(step, "model")["model.large"])
    spec = LoadSpec(include="model", rename={"model": "net"}, cast={"*.large": "bfloat16"})
    got = read(step, spec=spec)
    assert got["net.large"].dtype == torch.bfloat16
    assert torch.equal(got["net.large"], LARGE.bfloat16())
    assert torch.equal(got["net.bias"], torch.arange(7.0))
    with pytest.raises(ConfigError, match="patterns or a spec"):
        read(step, "model", spec=spec)
    with pytest.raises(ConfigError, match="'none'"):
        read(step, "none")


def test_transforms(tmp_path: Path) -> None:
    parts = {f"layers.{number}.w": torch.full((300, 1000), float(number)) for number in range(3)}
    save_state_dict(tmp_path / "step_1", parts, no_dist=True)
    got = read(tmp_path / "step_1", spec=LoadSpec(transforms=Stack("layers.{i}.w", "all.w")))
    assert torch.equal(got["all.w"], torch.stack([*parts.values()]))
    got = read(tmp_path / "step_1", spec=LoadSpec(transforms=Concat([*parts], "all", dim=0)))
    assert torch.equal(got["all"], torch.cat([*parts.values()]))


@pytest.mark.parametrize("form", ["stock", "safetensors", "torch"])
def test_formats_of_others_are_read_and_never_mapped(tmp_path: Path, form: str) -> None:
    values = {"a.large": LARGE, "a.small": torch.arange(5)}
    path = tmp_path / {"stock": "stock", "safetensors": "m.safetensors", "torch": "m.pt"}[form]
    if form == "stock":
        dcp.save(dict(values), checkpoint_id=path, no_dist=True)
    elif form == "safetensors":
        save_file(values, path)
    else:
        torch.save(values, path)
    got = read(path)
    assert_equal(dict(got), values)
    assert not is_mapped(got["a.large"])


def test_parts_of_save(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bytecheckpoint.save(tmp_path, {"model": model, "optimizer": optimizer}, "ddp", global_steps=1)
    with pytest.raises(ConfigError, match=r"there are 2 parts: pass the path of one: .*global_step_1/model"):
        read(tmp_path / "global_step_1")
    assert torch.equal(read(tmp_path / "global_step_1" / "model")["weight"], model.weight)


class Odd:
    pass


def test_objects_run_no_code(tmp_path: Path) -> None:
    save_state_dict(tmp_path / "a", {"odd": Odd(), "w": torch.ones(2)}, no_dist=True, config=Config())
    got = read(tmp_path / "a")
    with pytest.raises((UnsafeObjectError, pickle.UnpicklingError, CheckpointError)):
        got["odd"]
    assert torch.equal(got["w"], torch.ones(2))


def test_a_run_folder_and_nothing(tmp_path: Path, step: Path) -> None:
    with pytest.raises(CheckpointError, match="step_1"):
        read(tmp_path)
    with pytest.raises(CheckpointError):
        read(tmp_path / "none")


def test_many_small_ones_are_read_together(tmp_path: Path) -> None:
    values = {f"w{number:05}": torch.full((100,), float(number)) for number in range(3000)}
    save_state_dict(tmp_path / "a", values, no_dist=True)
    got = read(tmp_path / "a")
    num_readers = 0
    made = got._reader

    def counting(names: Any) -> Any:
        nonlocal num_readers
        num_readers += 1
        return made(names)

    got._reader = counting  # type: ignore[method-assign]
    assert all(bool((tensor == number).all()) for number, tensor in enumerate(got.values()))
    assert num_readers == 1
    for number in (7, 2000, 30):  # here and there: nothing else is read
        assert bool((got[f"w{number:05}"] == number).all())
        assert not got._ahead
    assert num_readers == 4
    assert os.fspath(got.path) == str(tmp_path / "a")


def test_a_tensor_that_lacks_elements_does_not_keep_others(tmp_path: Path) -> None:
    whole = {"a": torch.arange(5.0), "c": torch.arange(3.0)}
    save_state_dict(tmp_path / "a", {**whole, "b": rows(0, 4)}, no_dist=True, config=PARTIAL)
    got = read(tmp_path / "a")
    assert [*got] == ["a", "b", "c"]
    assert torch.equal(got["a"], whole["a"])
    with pytest.raises(CheckpointError, match="'b'"):
        got["b"]
    assert torch.equal(got["c"], whole["c"])
