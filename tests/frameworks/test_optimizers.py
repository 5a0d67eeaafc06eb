# SPDX-License-Identifier: Apache-2.0
"""Training continues unchanged after a load, with every state that an optimizer keeps."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.equality import assert_equal
from torch import nn

from bytecheckpoint import load, save
from bytecheckpoint.errors import (
    UnsupportedError,
)
from frameworks.small_nets import OptimizerOf, fingerprint, net, of_trainable, train_all, trained

LIMIT_S = 60.0
pytestmark = pytest.mark.usefixtures("all_is_saved")


# Optimizers.


class Whitened(torch.optim.Optimizer):
    """Keeps lists and dicts for each parameter, as optimizers with preconditioners do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "scales": {"a": torch.tensor(0.5), "b": [1, 2]}})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["factors"] = [torch.zeros(size) for size in p.shape]
                    state["info"] = {"count": 0, "last": {"grad": torch.zeros_like(p)}}
                for dim, factor in enumerate(state["factors"]):
                    factor += (p.grad**2).mean([d for d in range(p.ndim) if d != dim])
                state["info"]["count"] += 1
                state["info"]["last"]["grad"].copy_(p.grad)
                scale = group["scales"]["a"] / (1 + state["info"]["count"] + sum(f.sum() for f in state["factors"]))
                p.data -= group["lr"] * scale * (p.grad + state["info"]["last"]["grad"])


def two_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [torch.optim.AdamW(parameters[::2]), torch.optim.SGD(parameters[1::2], lr=0.1, momentum=0.9)]


OPTIMIZERS: dict[str, OptimizerOf] = {
    "sgd": of_trainable(torch.optim.SGD, lr=0.1),
    "momentum": of_trainable(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": of_trainable(torch.optim.Adagrad, initial_accumulator_value=0.5),
    "adamw foreach amsgrad": of_trainable(torch.optim.AdamW, foreach=True, amsgrad=True, betas=(0.8, 0.95)),
    "adamw fused": of_trainable(torch.optim.AdamW, fused=True),
    "adam of a tensor lr": of_trainable(torch.optim.Adam, lr=torch.tensor(0.01), foreach=False),
    "rmsprop": of_trainable(torch.optim.RMSprop, momentum=0.5, centered=True),
    "adafactor": of_trainable(torch.optim.Adafactor),
    "asgd": of_trainable(torch.optim.ASGD),
    "several": two_optimizers,
    "containers": of_trainable(Whitened),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_go_on_as_they_were(tmp_path: Path, name: str) -> None:
    make = OPTIMIZERS[name]
    state = trained(make=make)
    before = fingerprint(state)
    save(tmp_path, state, "ddp")
    assert_equal(fingerprint(state), before)
    for steps in (0, 1):  # into an optimizer without state, and into one that has other state
        other = trained(3, steps, make)
        load(tmp_path, other, "ddp")
        assert_equal(fingerprint(other)["optimizers"], before["optimizers"])
        uninterrupted = copy.deepcopy(state)
        train_all(uninterrupted["model"], uninterrupted["optimizer"], 2)
        train_all(other["model"], other["optimizer"], 2)
        assert_equal(fingerprint(other)["parameters"], fingerprint(uninterrupted)["parameters"])
        assert_equal(fingerprint(other)["optimizers"], fingerprint(uninterrupted)["optimizers"])


def test_state_that_would_not_come_back_as_it_was_is_refused(tmp_path: Path) -> None:
    state = trained()
    parameter = state["optimizer"].param_groups[0]["params"][0]
    for value in ({}, (torch.ones(1), torch.ones(2))):
        state["optimizer"].state[parameter]["odd"] = value
        with pytest.raises(UnsupportedError, match=r"optimizer state 'odd' of 'layers.0.norm.weight'"):
            save(tmp_path, state, "ddp")
    assert list(tmp_path.iterdir()) == []


def test_a_learning_rate_stays_the_tensor_or_the_number_that_it_is(tmp_path: Path) -> None:
    def adam(lr: Any) -> dict[str, Any]:
        return trained(make=of_trainable(torch.optim.Adam, lr=lr, foreach=False), steps=1)

    save(tmp_path / "tensor", adam(torch.tensor(0.25)), "ddp")
    save(tmp_path / "number", adam(0.5), "ddp")
    number, tensor = adam(0.125), adam(torch.tensor(0.125))
    lr = tensor["optimizer"].param_groups[0]["lr"]
    load(tmp_path / "number", tensor, "ddp")
    assert tensor["optimizer"].param_groups[0]["lr"] is lr, "a captured graph reads it there"
    assert lr.item() == 0.5
    load(tmp_path / "tensor", number, "ddp")
    assert number["optimizer"].param_groups[0]["lr"] == 0.25
    assert type(number["optimizer"].param_groups[0]["lr"]) is float


def test_steps_of_a_capturable_optimizer(tmp_path: Path) -> None:
    """The optimizer takes steps on CUDA only. Its state is the same on every device."""

    def state_of(value: float) -> dict[str, Any]:
        model = net()
        optimizer = of_trainable(torch.optim.AdamW, capturable=True)(model)
        for p in optimizer.param_groups[0]["params"]:
            averages = {"exp_avg": torch.full_like(p, value), "exp_avg_sq": torch.full_like(p, value)}
            optimizer.state[p] = {"step": torch.tensor(value), **{k: v.detach() for k, v in averages.items()}}
        return {"model": model, "optimizer": optimizer}

    state, other = state_of(3), state_of(0)
    save(tmp_path, state, "ddp")
    step = next(iter(other["optimizer"].state.values()))["step"]
    load(tmp_path, other, "ddp")
    assert_equal(fingerprint(other)["optimizers"], fingerprint(state)["optimizers"])
    assert next(iter(other["optimizer"].state.values()))["step"] is step
