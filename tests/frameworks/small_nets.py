# SPDX-License-Identifier: Apache-2.0
"""A small model and its optimizer, trained a few steps, and a record of everything that a save must not change."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from frameworks.wrapped import Net, optimizer_of, train

__all__ = ["OptimizerOf", "fingerprint", "net", "of_trainable", "train_all", "trained"]

OptimizerOf = Callable[[nn.Module], Any]


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def trained(seed: int = 0, steps: int = 2, make: OptimizerOf = optimizer_of) -> dict[str, Any]:
    model = net(seed)
    optimizer = make(model)
    train_all(model, optimizer, steps)
    return {"model": model, "optimizer": optimizer}


def train_all(model: nn.Module, optimizer: Any, steps: int) -> None:
    for each in optimizer if isinstance(optimizer, list) else [optimizer]:
        train(model, each, steps)
    model.zero_grad()


def fingerprint(state: dict[str, Any]) -> dict[str, Any]:
    """Returns copies of all state that training can see."""
    model, optimizers = state["model"], state.get("optimizer", [])
    optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
    return {
        "parameters": {name: parameter.detach().clone() for name, parameter in model.named_parameters()},
        "buffers": {name: buffer.clone() for name, buffer in model.named_buffers()},
        "grads": {
            name: None if parameter.grad is None else parameter.grad.clone()
            for name, parameter in model.named_parameters()
        },
        "requires_grad": [parameter.requires_grad for parameter in model.parameters()],
        "training": [module.training for module in model.modules()],
        "optimizers": [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers],
        "states": [len(optimizer.state) for optimizer in optimizers],
        "hooks": [
            (len(module._state_dict_hooks), len(module._load_state_dict_pre_hooks)) for module in model.modules()
        ],
        "step_hooks": [len(optimizer._optimizer_step_pre_hooks) for optimizer in optimizers],
        "random": (random.getstate(), torch.get_rng_state(), np.random.get_state()),
    }


def of_trainable(make: Callable[..., Any], **options: Any) -> OptimizerOf:
    return lambda model: make([p for p in model.parameters() if p.requires_grad], **options)
