# SPDX-License-Identifier: Apache-2.0
"""The ways in which an optimizer and its model are saved and loaded: ours, and the same with stock DCP."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import bytecheckpoint
from bytecheckpoint import Config

__all__ = ["LIVE", "OWN", "TORCH", "InMemory", "Way", "stock_ways", "ways"]

LIVE = "bytecheckpoint.save"
OWN = "optimizer.state_dict()"
TORCH = "get_optimizer_state_dict"

Save = Callable[[str, dict[str, Any]], Any]
Load = Callable[[str, dict[str, Any], bool], Any]


class Way(Protocol):
    """One way to save and load; ``trusted`` lets a load of ours unpickle objects of any class."""

    def save(self, path: str, model: Any, optimizer: Any) -> None: ...

    def load(self, path: str, model: Any, optimizer: Any, trusted: bool = False) -> None: ...


@dataclass(frozen=True)
class Live:
    """The live objects, as ``bytecheckpoint.save`` takes them."""

    framework: str

    def save(self, path: str, model: Any, optimizer: Any) -> None:
        state = {"model": model, "optimizer": optimizer}
        bytecheckpoint.save(path, state, self.framework).committed.result()

    def load(self, path: str, model: Any, optimizer: Any, trusted: bool = False) -> None:
        config = Config(allow_pickle=trusted)
        bytecheckpoint.load(path, {"model": model, "optimizer": optimizer}, self.framework, config=config)


@dataclass(frozen=True)
class Own:
    """What ``state_dict()`` of the optimizer returns, loaded in place into that of another one."""

    save_files: Save
    load_files: Load

    def save(self, path: str, model: Any, optimizer: Any) -> None:
        self.save_files(path, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})

    def load(self, path: str, model: Any, optimizer: Any, trusted: bool = False) -> None:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        self.load_files(path, state, trusted)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])


@dataclass(frozen=True)
class OfTorch:
    """What torch's functions get and set, under another key than that of ``Own``: we warn once for each key."""

    save_files: Save
    load_files: Load

    def save(self, path: str, model: Any, optimizer: Any) -> None:
        self.save_files(path, self._state(model, optimizer))

    def load(self, path: str, model: Any, optimizer: Any, trusted: bool = False) -> None:
        state = self._state(model, optimizer)
        self.load_files(path, state, trusted)
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, state["optim"])

    @staticmethod
    def _state(model: Any, optimizer: Any) -> dict[str, Any]:
        return {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}


class InMemory:
    """A copy of the state dicts, without a checkpoint."""

    def save(self, path: str, model: Any, optimizer: Any) -> None:
        self._kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    def load(self, path: str, model: Any, optimizer: Any, trusted: bool = False) -> None:
        model_state, optimizer_state = copy.deepcopy(self._kept)
        model.load_state_dict(model_state)
        optimizer.load_state_dict(optimizer_state)


def _dcp_save(path: str, state: dict[str, Any]) -> None:
    save(state, checkpoint_id=path)


def _dcp_load(path: str, state: dict[str, Any], trusted: bool) -> None:
    load(state, checkpoint_id=path)


def _load(path: str, state: dict[str, Any], trusted: bool) -> None:
    bytecheckpoint.load_state_dict(path, state, config=Config(allow_pickle=trusted))


def ways(framework: str) -> dict[str, Way]:
    """Returns our ways, by the name of what is saved."""
    ours = bytecheckpoint.save_state_dict
    return {LIVE: Live(framework), OWN: Own(ours, _load), TORCH: OfTorch(ours, _load)}


def stock_ways() -> dict[str, Way]:
    """Returns the same with stock DCP, which knows no live optimizers."""
    return {OWN: Own(_dcp_save, _dcp_load), TORCH: OfTorch(_dcp_save, _dcp_load)}
