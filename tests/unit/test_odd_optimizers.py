# SPDX-License-Identifier: Apache-2.0
"""Options of optimizers that compare in odd ways, and wrappers of optimizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import bytecheckpoint
from bytecheckpoint.errors import ConfigError, KeyMismatchError
from bytecheckpoint.tensors.equality import are_equal
from bytecheckpoint.training_state.options import is_same


class Plain:
    """Has no ``==`` of its own."""

    def __init__(self, value: int) -> None:
        self.value = value


class Raising:
    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not comparable")

    __hash__ = None  # type: ignore[assignment]


NAN = float("nan")


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (np.arange(3), np.arange(3), True),
        (np.arange(3), np.arange(1, 4), False),
        (np.array([1.0, NAN]), np.array([1.0, NAN]), True),
        ({"a": [np.ones(2)]}, {"a": [np.ones(2)]}, True),
        (NAN, NAN, True),
        ((1.0, NAN), (1.0, NAN), True),
        ({NAN: 1}.values(), 1, False),
        (Plain(1), Plain(1), True),
        (Plain(1), Plain(2), False),
        (Raising(), Raising(), True),
        (lambda: 1, lambda: 1, False),
        (torch.ones(2), np.ones(2), False),
        (1, 2, False),
    ],
)
def test_what_is_equal(a: Any, b: Any, same: bool) -> None:
    assert are_equal(a, b) is same
    assert is_same(a, b) is same


def optimizer_of(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    made.param_groups[0].update(options)
    return made


def save_and_load(path: Path, option: Any, before: Any) -> Any:
    model = nn.Linear(3, 2)
    state = {"model": model, "optimizer": optimizer_of(model, odd=option)}
    bytecheckpoint.save(path, state, "ddp", global_steps=1)
    fresh = optimizer_of(model, odd=before)
    bytecheckpoint.load(path / "global_step_1", {"model": model, "optimizer": fresh}, "ddp")
    return fresh.param_groups[0]["odd"]


def test_options_come_back(tmp_path: Path) -> None:
    assert np.isnan(save_and_load(tmp_path / "nan", NAN, 0.0))
    assert save_and_load(tmp_path / "nested", {"a": [1.0, NAN]}, None)["a"][0] == 1.0
    array = save_and_load(tmp_path / "array", np.arange(3), np.zeros(3))
    assert array.tolist() == [0, 1, 2]


def test_options_that_differ_are_told(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    groups = [{"params": [model.weight], "odd": np.arange(3)}, {"params": [model.bias], "odd": np.arange(4)}]
    bytecheckpoint.save(tmp_path, {"model": model, "optimizer": torch.optim.SGD(groups, lr=0.1)}, "ddp", global_steps=1)
    with pytest.raises(KeyMismatchError, match="saved with different options"):
        bytecheckpoint.load(tmp_path / "global_step_1", {"model": model, "optimizer": optimizer_of(model)}, "ddp")


class Wrapper(torch.optim.Optimizer):
    """Passes everything on to an optimizer, and does not call the constructor of its class."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


def test_a_wrapper_without_groups_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    wrapper = Wrapper(torch.optim.SGD(model.parameters()))
    for call in (
        lambda state: bytecheckpoint.save(tmp_path, state, "ddp", global_steps=1),
        lambda state: bytecheckpoint.load(tmp_path, state, "ddp"),
    ):
        with pytest.raises(ConfigError, match=r"a Wrapper without param_groups: pass the optimizer in it, its .optim"):
            call({"model": model, "optimizer": wrapper})
