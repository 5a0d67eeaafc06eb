# SPDX-License-Identifier: Apache-2.0
"""``cast`` of a save: a tensor is stored in another dtype, under one of its names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.equality import assert_equal

from bytecheckpoint import (
    BcpSavePlanner,
    BcpStager,
    BcpWriter,
    async_save_state_dict,
    load_state_dict,
    read,
    save_state_dict,
    shutdown,
)
from bytecheckpoint.errors import ConfigError
from bytecheckpoint.planning import key_choice

CAST = {"copy": "bfloat16"}


def state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    w = torch.randn(300, 40, generator=generator)
    model = {
        "w": w,
        "view": w[::2, 3:],
        "p": torch.nn.Parameter(torch.randn(5, generator=generator)),
        "n": torch.arange(4),
    }
    return {"model": model, "copy": dict(model), "step": 3}


def sync(path: Path, value: dict[str, Any]) -> None:
    save_state_dict(path, value, no_dist=True, cast=CAST)


def background(path: Path, value: dict[str, Any]) -> None:
    handle = async_save_state_dict(path, value, no_dist=True, cast=CAST)
    handle.staged.result()
    for tensor in value["model"].values():
        tensor.detach().zero_()  # what was at the call is saved
    handle.committed.result()
    shutdown()


def of_dcp(path: Path, value: dict[str, Any]) -> None:
    dcp.save(value, storage_writer=BcpWriter(path), planner=BcpSavePlanner(cast=CAST), no_dist=True)


@pytest.mark.parametrize("save", [sync, background, of_dcp])
def test_a_copy_beside_the_model(tmp_path: Path, save: Callable[[Path, dict[str, Any]], None]) -> None:
    wanted, value = state(), state()
    save(tmp_path, value)
    stored = dict(read(tmp_path))
    for name, tensor in wanted["model"].items():
        assert_equal(stored[f"model.{name}"], tensor.detach())
        to = torch.bfloat16 if tensor.is_floating_point() else tensor.dtype
        assert_equal(stored[f"copy.{name}"], tensor.detach().to(to))
    assert stored["step"] == 3
    if save is not background:
        assert_equal(value, wanted)  # the caller's state is as it was
    got = {"model": {name: torch.zeros_like(tensor) for name, tensor in wanted["model"].items()}, "step": 0}
    load_state_dict(tmp_path, got, no_dist=True)
    assert_equal(got["model"]["w"], wanted["model"]["w"])


def test_the_stager_casts_before_it_copies(tmp_path: Path) -> None:
    value = state()
    planner = BcpSavePlanner(cast=CAST)
    stager = BcpStager()
    dcp.async_save(
        value, storage_writer=BcpWriter(tmp_path), planner=planner, no_dist=True, async_stager=stager
    ).result()
    stager.close()
    assert_equal(read(tmp_path)["copy.w"], value["model"]["w"].bfloat16())


def test_the_first_pattern_counts(tmp_path: Path) -> None:
    cast = {"copy.w": torch.float16, "copy": "torch.float64"}
    save_state_dict(tmp_path, state(), no_dist=True, cast=cast, include="copy")
    assert {name: tensor.dtype for name, tensor in read(tmp_path).items()} == {
        "copy.w": torch.float16,
        "copy.view": torch.float64,
        "copy.p": torch.float64,
        "copy.n": torch.int64,
    }


@pytest.mark.parametrize(
    ("cast", "said"),
    [
        ({"nothing": "bfloat16"}, "no tensor of floats, on any rank: 'nothing'"),
        ({"step": "bfloat16"}, "no tensor of floats, on any rank: 'step'"),
        ({"model.n": "bfloat16"}, "no tensor of floats, on any rank: 'model.n'"),
        ({"model": "int8"}, "'int8'}: must be one of torch.bfloat16"),
        ({"model": "bf17"}, "'bf17'}: must be one of torch.bfloat16"),
        ({3: "bfloat16"}, "3 is no pattern"),
        ("bfloat16", "cast='bfloat16': must be a dict"),
    ],
)
def test_what_is_refused(tmp_path: Path, cast: dict[Any, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        save_state_dict(tmp_path / "ckpt", state(), no_dist=True, cast=cast)
    assert not (tmp_path / "ckpt" / ".metadata").exists()
    with pytest.raises(ConfigError, match=r"BcpSavePlanner takes include, exclude and cast"):
        save_state_dict(tmp_path / "ckpt", state(), no_dist=True, cast=CAST, planner=BcpSavePlanner())


def test_floats_of_8_bits_stay_as_they_are(tmp_path: Path) -> None:
    value = {"w": torch.ones(3), "codes": torch.ones(4).to(torch.float8_e4m3fn)}
    save_state_dict(tmp_path, value, no_dist=True, cast={"*": "bfloat16"})
    assert {name: tensor.dtype for name, tensor in read(tmp_path).items()} == {
        "w": torch.bfloat16,
        "codes": torch.float8_e4m3fn,
    }


def test_other_tensors_are_refused(tmp_path: Path) -> None:
    class Own(torch.Tensor):
        pass

    value = {"t": torch.ones(3).as_subclass(Own)}
    with pytest.raises(ConfigError, match="'t' is a Own: only plain tensors and DTensors are cast"):
        key_choice.KeyChoice(cast={"t": "bfloat16"}).chosen(value, None)
