# SPDX-License-Identifier: Apache-2.0
"""Optimizers with state that belongs to no parameter, their own state dict, hooks, or shared parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bytecheckpoint import bytecheckpoint_ckpt_to_pytorch_ckpt, load, save
from bytecheckpoint.errors import InvalidPlanError, UnsupportedError


def trained(optimizer_of: Any, seed: int = 0, steps: int = 2) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    optimizer = optimizer_of(model.parameters())
    for _ in range(steps):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


def momentum(parameters: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


# State that belongs to no parameter.


@pytest.mark.parametrize("value", [{"step": 3}, torch.tensor(3.0), 3])
@pytest.mark.parametrize("fast", [False, True])
def test_state_of_no_parameter_is_refused(tmp_path: Path, value: object, fast: bool) -> None:
    state = trained(momentum)
    state["optimizer"].state["shared"] = value
    with pytest.raises(UnsupportedError, match=r"SGD keeps state under 'shared', which is not a parameter"):
        save(tmp_path, state, "ddp", fast_saving=fast).committed.result(60)
    assert list(tmp_path.iterdir()) == []


def test_state_of_no_parameter_is_refused_by_a_load(tmp_path: Path) -> None:
    save(tmp_path, trained(momentum), "ddp")
    other = trained(momentum, 1)
    other["optimizer"].state["shared"] = {"step": 3}
    with pytest.raises(UnsupportedError, match="under 'shared'"):
        load(tmp_path, other, "ddp")


def test_an_empty_state_of_no_parameter_is_nothing(tmp_path: Path) -> None:
    state = trained(momentum)
    state["optimizer"].state["asked for"]  # the state dict creates an empty state for a missing key
    save(tmp_path, state, "ddp")


def test_state_of_a_parameter_that_is_in_no_group_is_refused(tmp_path: Path) -> None:
    state = trained(momentum)
    state["optimizer"].param_groups[0]["params"].pop()
    with pytest.raises(UnsupportedError, match=r"SGD keeps state under a tensor of \[1\], which is not a parameter"):
        save(tmp_path, state, "ddp")


@pytest.mark.parametrize("kind", ["state", "option"])
def test_keys_that_are_no_text_are_refused(tmp_path: Path, kind: str) -> None:
    state = trained(momentum)
    optimizer = state["optimizer"]
    kept: Any = optimizer.state[state["model"][0].weight] if kind == "state" else optimizer.param_groups[0]
    kept[0] = torch.ones(2)
    with pytest.raises(
        UnsupportedError, match=rf"{kind} 0 of '0.weight': a name in a checkpoint must be a str, got int"
    ):
        save(tmp_path, state, "ddp")
    del kept[0]
    for value in ({0: torch.ones(2), 1: torch.ones(2)}, {"a": [{0: 1}]}, [torch.ones(1), {(1, 2): 3}]):
        kept["odd"] = value
        with pytest.raises(
            UnsupportedError, match=rf"{kind} 'odd' of '0.weight' has the key .*, which would come back"
        ):
            save(tmp_path, state, "ddp")
    kept["odd"] = {"a": {}, "b": 1}
    if kind == "state":
        with pytest.raises(UnsupportedError, match=r"'odd' of '0.weight' is an empty dict, or has one"):
            save(tmp_path, state, "ddp")


def test_options_of_tensors_in_a_tuple(tmp_path: Path) -> None:
    def odd(parameters: Any) -> torch.optim.Optimizer:
        return momentum([{"params": parameters, "scales": (torch.ones(2), torch.zeros(2)), "least": float("nan")}])

    state, other = trained(odd), trained(momentum, 1, 0)
    save(tmp_path, state, "ddp")
    load(tmp_path, other, "ddp")
    assert_same(other["optimizer"].state_dict(), state["optimizer"].state_dict())


# Several optimizers over one parameter.


def test_two_optimizers_of_one_parameter_are_refused(tmp_path: Path) -> None:
    state = trained(momentum)
    adam = torch.optim.AdamW([*state["model"].parameters()][2:])
    state["optimizer"] = [state["optimizer"], adam]
    with pytest.raises(InvalidPlanError, match=r"'1.weight' is in group 0 of a SGD and in group 0 of a AdamW"):
        save(tmp_path, state, "ddp")
    assert list(tmp_path.iterdir()) == []


def test_a_parameter_twice_in_one_group(tmp_path: Path) -> None:
    def twice(parameters: Any) -> torch.optim.Optimizer:
        first, *rest = parameters
        with pytest.warns(UserWarning, match="duplicate parameters"):
            return momentum([first, first, *rest])

    state, other = trained(twice), trained(twice, 1, 0)
    save(tmp_path, state, "ddp")
    load(tmp_path, other, "ddp")
    assert_same(other["optimizer"].state_dict(), state["optimizer"].state_dict())


# Optimizers with their own state dict.


class Averaging(torch.optim.SGD):
    """Keeps averages and a count outside ``state``. Its state dict adds them to each parameter and group."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.averages = {id(p): p.detach().clone() for group in self.param_groups for p in group["params"]}
        self.count = 0

    def step(self, closure: Any = None) -> None:
        super().step()
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                self.averages[id(p)].lerp_(p.detach(), 0.5)

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        parameters = [p for group in self.param_groups for p in group["params"]]
        of_each = {n: {**state["state"].get(n, {}), "average": self.averages[id(p)]} for n, p in enumerate(parameters)}
        return {"state": of_each, "param_groups": [{**group, "count": self.count} for group in state["param_groups"]]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        parameters = [p for group in self.param_groups for p in group["params"]]
        state_dict = {**state_dict, "state": {n: dict(of_one) for n, of_one in state_dict["state"].items()}}
        for n, p in enumerate(parameters):
            self.averages[id(p)].copy_(state_dict["state"][n].pop("average"))
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            self.count = group.pop("count")


def test_a_state_dict_of_its_own_is_saved_and_loaded(tmp_path: Path) -> None:
    state = trained(Averaging)
    save(tmp_path, state, "ddp")
    for steps in (0, 1):
        other = trained(Averaging, 1, steps)
        load(tmp_path, other, "ddp")
        assert other["optimizer"].count == 2
        assert_same(other["optimizer"].state_dict(), state["optimizer"].state_dict())
        assert other["optimizer"].param_groups[0].keys() == state["optimizer"].param_groups[0].keys()


def test_hooks_of_an_optimizer_are_called(tmp_path: Path) -> None:
    calls = []

    def hooked(parameters: Any) -> torch.optim.Optimizer:
        optimizer = momentum(parameters)
        optimizer.register_state_dict_pre_hook(lambda it: calls.append("before state_dict"))
        optimizer.register_state_dict_post_hook(doubled)
        optimizer.register_load_state_dict_pre_hook(halved)
        optimizer.register_load_state_dict_post_hook(lambda it: calls.append("after load_state_dict"))
        return optimizer

    def with_buffers(state: dict[str, Any], factor: float) -> dict[str, Any]:
        scaled = {n: {"momentum_buffer": of["momentum_buffer"] * factor} for n, of in state["state"].items()}
        return {**state, "state": scaled}

    def doubled(it: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        return with_buffers(state, 2)

    def halved(it: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        return with_buffers(state, 0.5)

    state = trained(hooked)
    save(tmp_path, state, "ddp")
    assert calls == ["before state_dict"]
    other, plain = trained(hooked, 1, 0), trained(momentum, 1, 0)
    load(tmp_path, other, "ddp")
    assert calls == ["before state_dict"] * 2 + ["after load_state_dict"]
    load(tmp_path, plain, "ddp")
    for mine, others, plains in zip(*(each["optimizer"].state.values() for each in (state, other, plain)), strict=True):
        assert torch.equal(mine["momentum_buffer"], others["momentum_buffer"])
        assert torch.equal(mine["momentum_buffer"] * 2, plains["momentum_buffer"])


@pytest.mark.parametrize("key", ["slow", "state", "param_groups"])
def test_a_state_dict_that_is_not_by_parameter_is_refused(tmp_path: Path, key: str) -> None:
    def odd(it: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        changed = {
            "slow": [1, 2],
            "state": {**state["state"], "shared": {"step": 3}},
            "param_groups": state["param_groups"] * 2,
        }
        return {**state, key: changed[key]}

    state = trained(momentum)
    state["optimizer"].register_state_dict_post_hook(odd)
    with pytest.raises(UnsupportedError, match="of this optimizer into extra_state"):
        save(tmp_path, state, "ddp")
    assert list(tmp_path.iterdir()) == []


def assert_same(got: Any, wanted: Any) -> None:
    """Asserts equality. NaN equals itself, keys may be in any order, and a list equals a tuple."""
    torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


# Groups merged into the state dict of one optimizer.


def merged_groups(folder: Path, values: list[Any]) -> list[list[str]]:
    model = nn.ParameterList(torch.ones(1) for _ in values)
    groups = [{"params": [parameter], "odd": value} for parameter, value in zip(model, values, strict=True)]
    save(folder, {"model": model, "optimizer": momentum(groups)}, "ddp")
    merged = bytecheckpoint_ckpt_to_pytorch_ckpt(folder, return_dict=True)["optimizer"]
    of_parameter = {fqn: group["odd"] for group in merged["param_groups"] for fqn in group["params"]}
    assert_same([of_parameter[str(number)] for number in range(len(values))], values)
    return [group["params"] for group in merged["param_groups"]]


@pytest.mark.parametrize(
    "others",
    [
        (torch.tensor(0.001), torch.tensor(0.00100001)),
        (torch.zeros(5000), torch.arange(5000) == 2500),
        (torch.zeros(2, dtype=torch.float32), torch.zeros(2, dtype=torch.float32) - 1e-30),
        ([torch.tensor(0.5), {"a": torch.tensor(1.0)}], [torch.tensor(0.5), {"a": torch.tensor(1.00000012)}]),
    ],
)
def test_groups_whose_options_print_alike_stay_apart(tmp_path: Path, others: tuple[Any, Any]) -> None:
    first, second = others
    second = second.to(first.dtype) if isinstance(second, torch.Tensor) else second
    assert merged_groups(tmp_path, [first, second, first]) == [["0", "2"], ["1"]]


def test_groups_of_equal_options_are_joined(tmp_path: Path) -> None:
    values = [float("nan"), torch.tensor(0.5), torch.tensor(0.5), float("nan"), 1, 1.0]
    assert merged_groups(tmp_path, values) == [["0", "3"], ["1", "2"], ["4"], ["5"]]


def test_names_with_dots_are_merged(tmp_path: Path) -> None:
    state = trained(momentum)
    for of_parameter in state["optimizer"].state.values():
        of_parameter["moment.second"] = of_parameter["momentum_buffer"] * 2
    state["optimizer"].param_groups[0]["rate.least"] = 0.25
    save(tmp_path, state, "ddp")
    merged = bytecheckpoint_ckpt_to_pytorch_ckpt(tmp_path, return_dict=True)["optimizer"]
    (group,) = merged["param_groups"]
    assert group["rate.least"] == 0.25
    assert group["params"] == [*merged["state"]] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    for of_parameter in merged["state"].values():
        assert torch.equal(of_parameter["moment.second"], of_parameter["momentum_buffer"] * 2)
