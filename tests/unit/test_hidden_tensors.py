# SPDX-License-Identifier: Apache-2.0
"""Tensors of subclasses that keep tensors in attributes: refused where only their elements would be saved or loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from bytecheckpoint import BcpSavePlanner, BcpWriter, Config, async_save_state_dict, load_state_dict, save_state_dict
from bytecheckpoint.errors import CheckpointError, InvalidPlanError


class Scales:
    def __init__(self, value: float) -> None:
        self.absmax = torch.full((4,), value)


class Codes(torch.nn.Parameter):
    """Built as Params4bit of bitsandbytes: elements are codes, the scales are in an attribute."""


class Marked(torch.Tensor):
    """A tensor without operators of its own."""


def codes(value: int, scales: Any) -> Codes:
    made = Codes(torch.full((8,), value, dtype=torch.uint8), requires_grad=False)
    made.quant_state, made.blocksize = scales, 64  # type: ignore[attr-defined]
    made.module = torch.nn.Linear(2, 2)  # type: ignore[attr-defined]
    return made


def marked(value: int, scales: Any) -> Marked:
    made = torch.full((8,), value, dtype=torch.uint8).as_subclass(Marked)
    made.quant_state = scales  # type: ignore[attr-defined]
    return made


HIDDEN = [Scales(0.5), torch.ones(2), [torch.ones(2)], {"a": (Scales(1.0),)}, torch.ones(2).numpy()]


@pytest.mark.parametrize("make", [codes, marked])
@pytest.mark.parametrize("scales", HIDDEN)
def test_they_are_refused_before_anything_is_written(tmp_path: Path, make: Any, scales: Any) -> None:
    state = {"layer": {"w": make(3, scales)}, "bias": torch.ones(2)}
    said = r"'layer\.w': a (Codes|Marked) keeps tensors in 'quant_state', and only its own elements would be saved"
    for config in (Config(), Config(tensor_subclasses="opaque")):
        with pytest.raises(InvalidPlanError, match=said):
            save_state_dict(tmp_path, state, config=config)
        with pytest.raises(CheckpointError, match=said):
            async_save_state_dict(tmp_path, state, config=config).committed.result()
    with pytest.raises(dcp.api.CheckpointException, match="keeps tensors in 'quant_state'"):
        dcp.save(state, storage_writer=BcpWriter(tmp_path), no_dist=True)  # DCP's planner
    with pytest.raises(dcp.api.CheckpointException, match="keeps tensors in 'quant_state'"):
        dcp.save(
            {"w": make(3, scales)}, storage_writer=BcpWriter(tmp_path), planner=BcpSavePlanner(False), no_dist=True
        )
    assert not (tmp_path / ".metadata").exists()


@pytest.mark.parametrize("make", [codes, marked])
def test_they_are_refused_before_anything_is_loaded(tmp_path: Path, make: Any) -> None:
    save_state_dict(tmp_path, {"w": torch.full((8,), 3, dtype=torch.uint8)})
    tensor = make(1, Scales(0.5))
    with pytest.raises(InvalidPlanError, match=r"'w': a (Codes|Marked) keeps tensors in 'quant_state'"):
        load_state_dict(tmp_path, {"w": tensor})
    assert tensor.data.eq(1).all()


def test_other_attributes_are_fine(tmp_path: Path) -> None:
    """Frameworks mark parameters with values and functions, and keep gradients in plain ones."""
    plain = torch.nn.Parameter(torch.ones(8))
    plain.tensor_model_parallel, plain.main_grad = True, torch.ones(8)  # type: ignore[attr-defined]
    parameter = Codes(torch.full((8,), 3, dtype=torch.uint8), requires_grad=False)
    parameter.loader, parameter.shape_before = plain.sum, torch.Size([4, 4])  # type: ignore[attr-defined]
    state = {"plain": plain, "tensor": torch.ones(3), "subclass": parameter}
    state["tensor"].mark = torch.ones(1)  # type: ignore[attr-defined]
    save_state_dict(tmp_path / "now", state)
    async_save_state_dict(tmp_path / "later", state).committed.result()
    for name in ("now", "later"):
        other = Codes(torch.zeros(8, dtype=torch.uint8), requires_grad=False)
        got = {"plain": torch.zeros(8), "tensor": torch.zeros(3), "subclass": other}
        load_state_dict(tmp_path / name, got)
        assert torch.equal(got["plain"], plain)
        assert torch.equal(got["tensor"], state["tensor"])
        assert other.data.eq(3).all()
