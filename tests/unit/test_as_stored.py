# SPDX-License-Identifier: Apache-2.0
"""Values that have another size in each save, such as the extra states of modules, are loaded as they are stored."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import bytecheckpoint
from bytecheckpoint import BcpLoadPlanner, BcpReader, LoadSpec, load_state_dict, save_state_dict
from bytecheckpoint.errors import ShapeMismatchError, UnsupportedError

SPEC = LoadSpec(as_stored="*_extra_state")
SAVED: dict[str, Any] = {
    "long": torch.arange(2322).to(torch.uint8),
    "none": torch.zeros(0, dtype=torch.uint8),
    "same": torch.ones(4),
    "object": {"scale": [1.0, 2.0]},
    "nothing": None,
    "bytes": io.BytesIO(b"abc"),
}


class Scaled(nn.Module):
    """Has an extra state of any length, as a layer with a history of scales has."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


def is_same(got: Any, wanted: Any) -> bool:
    if isinstance(wanted, torch.Tensor):
        return isinstance(got, torch.Tensor) and got.dtype == wanted.dtype and torch.equal(got, wanted)
    if isinstance(wanted, io.BytesIO):
        return isinstance(got, io.BytesIO) and got.getvalue() == wanted.getvalue()
    return bool(got == wanted)


@pytest.mark.parametrize("fresh", ["of 4", "none", "object"])
@pytest.mark.parametrize("kind", SAVED)
def test_a_module_gets_what_was_saved(tmp_path: Path, kind: str, fresh: str) -> None:
    saved = nn.Sequential(Scaled(SAVED[kind]), nn.Linear(3, 3))
    made = {"of 4": torch.zeros(4, dtype=torch.uint8), "none": None, "object": {"scale": [0.0]}}[fresh]
    model = nn.Sequential(Scaled(made), nn.Linear(3, 3))
    bytecheckpoint.save(tmp_path / "live", {"model": saved}, "ddp", global_steps=1)
    bytecheckpoint.load(tmp_path / "live" / "global_step_1", {"model": model}, "ddp")
    assert is_same(model[0].state, SAVED[kind])
    assert torch.equal(model[1].weight, saved[1].weight)
    if kind == "object" and fresh != "object":
        return  # in a state dict it has the keys of a dict
    save_state_dict(tmp_path / "dict", {"model": saved.state_dict()}, no_dist=True)
    state = {"model": nn.Sequential(Scaled(made), nn.Linear(3, 3)).state_dict()}
    load_state_dict(tmp_path / "dict", state, spec=SPEC, no_dist=True)
    assert is_same(state["model"]["0._extra_state"], SAVED[kind])


def test_without_the_option_the_error_names_it(tmp_path: Path) -> None:
    save_state_dict(tmp_path, {"m": {"_extra_state": torch.ones(9), "w": torch.ones(9)}}, no_dist=True)
    with pytest.raises(ShapeMismatchError, match=r"LoadSpec\(as_stored='\*_extra_state'\) takes such values"):
        load_state_dict(tmp_path, {"m": {"_extra_state": torch.ones(4), "w": torch.ones(9)}}, no_dist=True)
    with pytest.raises(ShapeMismatchError) as caught:  # others stay strict
        load_state_dict(tmp_path, {"m": {"_extra_state": torch.ones(4), "w": torch.ones(4)}}, spec=SPEC, no_dist=True)
    assert "'m.w'" in str(caught.value)
    assert "_extra_state" not in str(caught.value)


def test_for_dcp_and_for_lists(tmp_path: Path) -> None:
    save_state_dict(tmp_path, {"buffers": [torch.ones(5), torch.ones(2)], "step": 1}, no_dist=True)
    state: dict[str, Any] = {"buffers": [torch.zeros(1), torch.zeros(2)], "step": 0}
    kept = state["buffers"][1]
    planner = BcpLoadPlanner(spec=LoadSpec(as_stored="buffers"))
    dcp.load(state, storage_reader=BcpReader(tmp_path), planner=planner, no_dist=True)
    assert [each.tolist() for each in state["buffers"]] == [[1.0] * 5, [1.0] * 2]
    assert state["buffers"][1] is kept, "what fits is filled"
    with pytest.raises(UnsupportedError, match=r"'buffers.0': stored are 20 bytes.*as_stored_bytes=8"):
        load_state_dict(
            tmp_path,
            {"buffers": [torch.zeros(1), torch.zeros(2)], "step": 0},
            spec=LoadSpec(as_stored="buffers", as_stored_bytes=8),
            no_dist=True,
        )


def test_a_checkpoint_does_not_decide_how_much_memory_is_taken(tmp_path: Path) -> None:
    save_state_dict(tmp_path, {"_extra_state": torch.zeros((64 << 20) + 1, dtype=torch.uint8)}, no_dist=True)
    with pytest.raises(UnsupportedError, match="stored are 67,108,865 bytes"):
        load_state_dict(tmp_path, {"_extra_state": torch.zeros(4, dtype=torch.uint8)}, spec=SPEC, no_dist=True)
