# SPDX-License-Identifier: Apache-2.0
"""The ways in which an optimizer and its model are saved and loaded: ours, and the same with stock DCP."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import bytecheckpoint

__all__ = ["LIVE", "OWN", "TORCH", "InMemory", "Way", "stock_ways", "ways"]

LIVE = "bytecheckpoint.save"
OWN = "optimizer.state_dict()"
TORCH = "get_optimizer_state_dict"

Files = Callable[[str, dict[str, Any]], Any]  # saves or loads a state dict


class Way(Protocol):
    """One way to save and load."""

    def save(self, path: str, model: Any, optimizer: Any) -> None: ...

    def load(self, path: str, model: Any, optimizer: Any) -> None: ...


@dataclass(frozen=True)
class Live:
    """The live objects, as ``bytecheckpoint.save`` takes them."""

    framework: str

    def save(self, path: str, model: Any, optimizer: Any) -> None:
        state = {"model": model, "optimizer": optimizer}
        bytecheckpoint.save(path, state, self.framework).committed.result()

    def load(self, path: str, model: Any, optimizer: Any) -> None:
        bytecheckpoint.load(path, {"model": model, "optimizer": optimizer}, self.framework)


@dataclass(frozen=True)
class Own:
    """What ``state_dict()`` of the optimizer returns, loaded in place into that of another one."""

    save_files: Files
    load_files: Files

    def save(self, path: str, model: Any, optimizer: Any) -> None:
        self.save_files(path, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})

    def load(self, path: str, model: Any, optimizer: Any) -> None:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        self.load_files(path, state)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])


@dataclass(frozen=True)
class OfTorch:
    """What torch's functions get and set."""

    save_files: Files
    load_files: Files

    def save(self, path: str, model: Any, optimizer: Any) -> None:
        self.save_files(path, self._state(model, optimizer))

    def load(self, path: str, model: Any, optimizer: Any) -> None:
        state = self._state(model, optimizer)
        self.load_files(path, state)
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, state["optimizer"])

    @staticmethod
    def _state(model: Any, optimizer: Any) -> dict[str, Any]:
        return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


class InMemory:
    """A copy of the state dicts, without a checkpoint."""

    def save(self, path: str, model: Any, optimizer: Any) -> None:
        self._kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    def load(self, path: str, model: Any, optimizer: Any) -> None:
        model_state, optimizer_state = copy.deepcopy(self._kept)
        model.load_state_dict(model_state)
        optimizer.load_state_dict(optimizer_state)


def _dcp_save(path: str, state: dict[str, Any]) -> None:
    dcp.save(state, checkpoint_id=path)


def _dcp_load(path: str, state: dict[str, Any]) -> None:
    dcp.load(state, checkpoint_id=path)


def ways(framework: str) -> dict[str, Way]:
    """Returns our ways, by the name of what is saved."""
    save, load = bytecheckpoint.save_state_dict, bytecheckpoint.load_state_dict
    return {LIVE: Live(framework), OWN: Own(save, load), TORCH: OfTorch(save, load)}


def stock_ways() -> dict[str, Way]:
    """Returns the same with stock DCP, which knows no live optimizers."""
    return {OWN: Own(_dcp_save, _dcp_load), TORCH: OfTorch(_dcp_save, _dcp_load)}
