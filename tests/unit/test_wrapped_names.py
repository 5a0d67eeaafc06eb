# SPDX-License-Identifier: Apache-2.0
"""The spec that an error names, where a wrapper has changed the names of keys."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import bytecheckpoint
from bytecheckpoint import LoadSpec, load_state_dict, save_state_dict
from bytecheckpoint.errors import KeyMismatchError
from bytecheckpoint.load_spec.wrapped_names import spec_that_loads

PLAIN = ["embed.weight", "layers.0.w", "layers.1.w", "layers.10.w", "head.weight"]


def before(prefix: str) -> list[str]:
    return [f"{prefix}.{name}" for name in PLAIN]


def within(wrapper: str) -> list[str]:
    return [
        name.replace("layers.", "layers.").replace(".w", f".{wrapper}.w") if "layers" in name else name
        for name in PLAIN
    ]


@pytest.mark.parametrize(
    ("asked", "stored", "rules"),
    [
        (PLAIN, before("_orig_mod"), {"_orig_mod": ""}),
        (PLAIN, before("module"), {"module": ""}),
        (PLAIN, before("module._orig_mod"), {"module._orig_mod": ""}),
        (before("model"), PLAIN, {"": "model"}),
        (before("model"), before("module"), {"module": "model"}),
        (before("model"), before("model._orig_mod"), {"model._orig_mod": "model"}),
        (before("model._orig_mod"), before("model"), {"model": "model._orig_mod"}),
        (PLAIN, within("_orig_mod"), {"layers.{i0}._orig_mod": "layers.{i0}"}),
        (within("_checkpoint_wrapped_module"), PLAIN, {"layers.{i0}": "layers.{i0}._checkpoint_wrapped_module"}),
        (PLAIN, [*before("module"), "step"], {"module": ""}),
    ],
)
def test_the_spec_is_found(asked: list[str], stored: list[str], rules: dict[str, str]) -> None:
    missing = [name for name in asked if name not in stored]
    strict = ", strict='model'" if "step" in stored else ""
    assert spec_that_loads(missing, stored, asked) == f"LoadSpec(rename={rules!r}{strict}) loads them"


@pytest.mark.parametrize(
    "stored",
    [
        ["other.a", "other.b"],
        before("module")[:-1],  # one is nowhere
        [*before("a"), *before("b")],  # which of both is not known
        [],
    ],
)
def test_none_is_named_that_would_not_load(stored: list[str]) -> None:
    assert spec_that_loads(PLAIN, stored) == ""


def test_weights_of_another_module_are_not_taken() -> None:
    """Names and shapes may fit, and the weights would be wrong."""
    assert spec_that_loads(before("text"), before("vision")) == ""
    assert spec_that_loads(before("decoder.model"), before("encoder.model")) == ""
    assert spec_that_loads(before("net.text"), before("module.text")) != ""


def test_the_spec_loads_where_more_is_stored(tmp_path: Path) -> None:
    save_state_dict(
        tmp_path, {"model": {"w": torch.ones(2)}, "optim": {"state": torch.ones(3)}, "step": 3}, no_dist=True
    )
    with pytest.raises(KeyMismatchError, match=r"LoadSpec\(rename=\{'model': ''\}, strict='model'\) loads them"):
        load_state_dict(tmp_path, {"w": torch.zeros(2)}, no_dist=True)
    got = {"w": torch.zeros(2)}
    load_state_dict(tmp_path, got, no_dist=True, spec=LoadSpec(rename={"model": ""}, strict="model"))
    assert got["w"].eq(1).all()


def call_dcp_planner(path: Path, model: nn.Module) -> None:
    load_state_dict(path, dict(model.state_dict()), no_dist=True)


def call_load(path: Path, model: nn.Module) -> None:
    bytecheckpoint.load(path, {"model": model}, "ddp")


@pytest.mark.parametrize("call", [call_dcp_planner, call_load])
def test_the_error_of_a_load_names_it_and_it_loads(tmp_path: Path, call: Callable[[Path, nn.Module], None]) -> None:
    wrapped = nn.ModuleDict({"net": nn.Linear(2, 3)})
    if call is call_load:
        bytecheckpoint.save(tmp_path, {"model": wrapped}, "ddp")
    else:
        save_state_dict(tmp_path, wrapped.state_dict(), no_dist=True)
    with pytest.raises(KeyMismatchError, match=r"LoadSpec\(rename=\{'net': ''\}\) loads them"):
        call(tmp_path, nn.Linear(2, 3))
    spec = LoadSpec(rename={"net": ""})
    if call is call_dcp_planner:
        load_state_dict(tmp_path, dict(nn.Linear(2, 3).state_dict()), no_dist=True, spec=spec)
    else:
        bytecheckpoint.load(tmp_path, {"model": nn.Linear(2, 3)}, "ddp", spec=spec)


def test_the_warning_of_a_load_of_nothing_names_it(tmp_path: Path) -> None:
    save_state_dict(tmp_path, {"module.w": torch.ones(2), "module.b": torch.ones(2)}, no_dist=True)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        spec = LoadSpec(strict=False)
        load_state_dict(tmp_path, {"w": torch.ones(2), "b": torch.ones(2)}, no_dist=True, spec=spec)
    assert any("LoadSpec(rename={'module': ''}) loads them" in str(each.message) for each in said)
