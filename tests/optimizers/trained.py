# SPDX-License-Identifier: Apache-2.0
"""A small model, an optimizer of any class over it, and their steps."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from optimizers.exact import described, difference
from optimizers.packages import Make, makes, optimizers_of

__all__ = ["DRIVES", "Recipe", "Trained", "recipe_of", "step_of_zeros"]

WIDTH = 64
# How an optimizer steps: after a backward, with a closure, or after a backward that can be differentiated again.
DRIVES = ("backward", "closure", "graph")


class Net(nn.Module):
    """Has names that optimizers look for, and on each of two ranks enough elements for states of 8 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Linear(WIDTH, 2 * WIDTH)
        self.output = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.output(self.mlp(self.norm(self.query(inputs))).tanh())
        return outputs


class Sparse(nn.Module):
    """Has sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, WIDTH, sparse=True)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.embedding(inputs.abs().mul(10).long().clamp(max=WIDTH - 1))
        return outputs


@dataclass(frozen=True)
class Recipe:
    """How an optimizer is made, and how it steps: names of ``makes`` and ``DRIVES``."""

    name: str
    make: str
    drive: str

    def made(self, seed: int, is_sharded: bool) -> Trained:
        torch.manual_seed(seed)
        model = Sparse() if self.name == "torch.optim:SparseAdam" else Net()
        if is_sharded:
            fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
        module, _, name = self.name.partition(":")
        make: Make = makes(self.name)[self.make]
        return Trained(model, make(optimizers_of(module)[name], model), self.drive)


@dataclass
class Trained:
    """A model and its optimizer."""

    model: Any
    optimizer: Any
    drive: str

    def begin(self) -> None:
        """Switches an optimizer that has modes, as those of schedulefree, to training."""
        if callable(begin := getattr(self.optimizer, "train", None)):
            begin()

    def train(self, numbers: range) -> None:
        for number in numbers:
            torch.manual_seed(number)
            random.seed(number)
            inputs = torch.randn(8, WIDTH)

            def closure(inputs: torch.Tensor = inputs) -> torch.Tensor:
                self.optimizer.zero_grad()
                loss: torch.Tensor = self.model(inputs).pow(2).mean()
                torch.autograd.backward(loss, create_graph=self.drive == "graph")
                return loss

            self._step(closure)
        self.optimizer.zero_grad()

    def _step(self, closure: Any) -> None:
        if self.drive == "closure":
            self.optimizer.step(closure)
            return
        closure()
        self.optimizer.step()

    def described(self) -> dict[str, Any]:
        state = self.optimizer.state_dict()
        if isinstance(state.get("state"), dict):  # looking up a state makes an empty one, which is as good as none
            state = {**state, "state": {key: of_one for key, of_one in state["state"].items() if of_one != {}}}
        return {"model": described(self.model.state_dict()), "optimizer": described(state)}

    def differs_from(self, wanted: dict[str, Any]) -> str:
        return difference(self.described(), wanted)


def step_of_zeros(trained: Trained) -> None:
    """Lets the optimizer make its state by a step with a learning rate of 0 and gradients of zeros."""
    groups = trained.optimizer.param_groups
    rates = [group.get("lr") for group in groups]
    for group in groups:
        if "lr" in group:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0

    def closure() -> torch.Tensor:
        for parameter in trained.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        return torch.zeros(())

    trained._step(closure)
    trained.optimizer.zero_grad()
    for group, rate in zip(groups, rates, strict=True):
        if "lr" in group:
            group["lr"] = rate


def recipe_of(name: str) -> Recipe:
    """Returns the first recipe with which three steps change the model.

    Raises:
        RuntimeError: There is none; the message has what each of them raised.
    """
    raised: dict[str, None] = {}
    for make in makes(name):
        for drive in DRIVES:
            recipe = Recipe(name, make, drive)
            try:
                trained = recipe.made(0, is_sharded=False)
                before = described(trained.model.state_dict())
                trained.begin()
                trained.train(range(3))
            except Exception as error:
                raised[f"{type(error).__name__}: {error}".split("\n")[0][:200]] = None
                continue
            if difference(described(trained.model.state_dict()), before):
                return recipe
            raised["three steps change nothing"] = None
    raise RuntimeError("; ".join(raised))
