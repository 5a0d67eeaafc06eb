# SPDX-License-Identifier: Apache-2.0
"""Shows what torch's functions for optimizer states leave out, as docs/training_state.md says, and the ways out.

The optimizers here do what those of schedulefree, apollo-torch and pytorch_optimizer do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)

import bytecheckpoint
from bytecheckpoint import load_state_dict, save_state_dict
from bytecheckpoint.errors import UnsupportedError


class WithOwnEntry(torch.optim.Adam):
    """Has an entry of its own beside ``state`` and ``param_groups``, as Ranger21 and StableSPAM do."""

    total_step = 0

    def step(self, closure: Any = None) -> Any:
        self.total_step += 1
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "total_step": self.total_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        own = dict(state_dict)
        self.total_step = own.pop("total_step", 0)
        super().load_state_dict(own)


class WithOtherState(torch.optim.Adam):
    """Keeps state under a key that is no parameter, as SPAM does."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.state["total_step"] = 1
        return loss


class WithMode(torch.optim.Adam):
    """Makes entries in its state when it is switched to training, and needs that, as schedulefree does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        for group in self.param_groups:
            group["train_mode"] = False

    def train(self) -> None:
        for group in self.param_groups:
            group["train_mode"] = True
            for parameter in group["params"]:
                self.state[parameter]  # a look-up in a defaultdict

    def step(self, closure: Any = None) -> Any:
        if not self.param_groups[0]["train_mode"]:
            raise RuntimeError("not in train mode")
        return super().step(closure)


def stepped(kind: Any, before: Any = lambda optimizer: None) -> tuple[torch.nn.Linear, Any]:
    model = torch.nn.Linear(3, 2)
    optimizer = kind(model.parameters())
    before(optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(3)).sum().backward()
        optimizer.step()
    return model, optimizer


def test_entries_of_its_own_are_left_out_of_the_save(tmp_path: Path) -> None:
    model, optimizer = stepped(WithOwnEntry)
    assert {*get_optimizer_state_dict(model, optimizer)} == {"state", "param_groups"}
    with pytest.raises(UnsupportedError, match="total_step"):
        bytecheckpoint.save(tmp_path / "refused", {"model": model, "optimizer": optimizer}, "ddp")
    save_state_dict(tmp_path / "ck", {"optimizer": optimizer.state_dict()}, no_dist=True)
    _, other = stepped(WithOwnEntry)
    other.total_step = 0
    state = {"optimizer": other.state_dict()}
    load_state_dict(tmp_path / "ck", state, no_dist=True)
    other.load_state_dict(state["optimizer"])
    assert other.total_step == 3


def test_state_under_another_key_is_an_error(tmp_path: Path) -> None:
    model, optimizer = stepped(WithOtherState)
    with pytest.raises(KeyError, match="total_step"):
        get_optimizer_state_dict(model, optimizer)
    with pytest.raises(UnsupportedError, match="total_step"):
        bytecheckpoint.save(tmp_path, {"model": model, "optimizer": optimizer}, "ddp")


def test_an_optimizer_with_a_mode(tmp_path: Path) -> None:
    model, optimizer = stepped(WithMode, WithMode.train)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    save_state_dict(tmp_path / "ck", {"model": model_state, "optimizer": optimizer_state}, no_dist=True)

    def load(prepare: Any) -> WithMode:
        fresh = torch.nn.Linear(3, 2)
        new = WithMode(fresh.parameters())
        prepare(new)
        model_state, optimizer_state = get_state_dict(fresh, new)
        state = {"model": model_state, "optimizer": optimizer_state}
        load_state_dict(tmp_path / "ck", state, no_dist=True)
        set_state_dict(fresh, new, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        return new

    with pytest.raises(RuntimeError, match="not in train mode"):
        load(lambda new: None)
    with pytest.warns(RuntimeWarning, match=r"only a part of 'optimizer'.*only while optimizer\.state is empty"):
        load(WithMode.train)
    loaded = load(lambda new: new.param_groups[0].update(train_mode=True)).state_dict()["state"]
    saved = optimizer.state_dict()["state"]
    assert all(torch.equal(loaded[n][name], saved[n][name]) for n in saved for name in saved[n])


def test_keys_that_are_not_text_are_taken_apart_if_flattened() -> None:
    model, optimizer = stepped(torch.optim.SGD)
    for parameter in model.parameters():
        optimizer.state[parameter] = {"buffer": {0.9: torch.ones(2)}}
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    assert "state.weight.buffer.0.9" in get_optimizer_state_dict(model, optimizer, options=options)
    assert [*get_optimizer_state_dict(model, optimizer)["state"]["weight"]["buffer"]] == [0.9]
