# SPDX-License-Identifier: Apache-2.0
"""Optimizer states that lie otherwise than their parameters: a load gives them back as they were.

Their class, mesh, placements and order of dims, and training goes on bit for bit as without a break.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

import bytecheckpoint
from bytecheckpoint.storage.parts import description_of
from bytecheckpoint.training_state.layouts import Layout, parsed_layouts


class Odd(torch.optim.Optimizer):
    """Keeps for a parameter what real optimizers keep: statistics of rows, column-major bases, lists, plain tensors."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self._step(parameter, self.state[parameter], group["lr"])

    def _step(self, parameter: Any, state: dict[str, Any], lr: float) -> None:
        gradient = parameter.grad
        rows = gradient.abs().flatten(1).amax(1)
        if not state:
            state["step"] = 0
            state["rows"] = torch.zeros_like(rows)
            state["columns"] = replicated(torch.zeros_like(gradient.sum(0)))
            state["average"] = transposed(torch.zeros_like(parameter))
            state["nothing"] = None
            state["plain"] = torch.zeros(parameter.shape[1], 3).t()  # the same on all ranks
            state["list"] = [torch.zeros_like(rows), torch.zeros(())]
            state["dict"] = {"whole": {"basis": torch.eye(parameter.shape[1]).t().contiguous().t(), "mode": "left"}}
        state["step"] += 1
        state["rows"].lerp_(rows, 0.1)
        state["list"][0].add_(rows)
        state["list"][1].add_(1)
        state["plain"].add_(state["step"])
        state["average"].lerp_(gradient, 0.1)
        parameter.sub_(state["average"] / state["rows"].add(1.0).unsqueeze(-1), alpha=lr)


def replicated(tensor: Any) -> Any:
    return (
        tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)
        if isinstance(tensor, DTensor)
        else tensor
    )


def transposed(tensor: Any) -> Any:
    """Returns the same tensor in column-major order of each local tensor."""
    if not isinstance(tensor, DTensor):
        return tensor.t().contiguous().t()
    local = tensor.to_local().t().contiguous().t()
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=(1, tensor.shape[0])
    )


def made(shape: tuple[int, ...] | None) -> tuple[nn.Module, Odd]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False))
    if shape is not None:
        fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("copies", "shards")[-len(shape) :]))
    return model, Odd(model.parameters())


def train(model: nn.Module, optimizer: Odd, steps: range) -> None:
    for number in steps:
        torch.manual_seed(number)
        optimizer.zero_grad()
        model(torch.randn(6, 8)).pow(2).mean().backward()
        optimizer.step()


def described(value: Any) -> Any:
    """Returns all that must be equal of a state, with the elements as bytes."""
    if isinstance(value, dict):
        return {key: described(each) for key, each in value.items()}
    if isinstance(value, list):
        return [described(each) for each in value]
    if not isinstance(value, torch.Tensor):
        return value
    how = (value.device_mesh, value.placements, value.stride()) if isinstance(value, DTensor) else ()
    local = value.detach().to_local() if isinstance(value, DTensor) else value.detach()
    return type(value), how, value.shape, value.dtype, local.stride(), local.tolist()


def of(model: nn.Module, optimizer: Odd) -> list[Any]:
    return [(described(parameter), described(optimizer.state[parameter])) for parameter in model.parameters()]


def framework(shape: tuple[int, ...] | None) -> str:
    return "ddp" if shape is None else "fsdp2"


def saved(path: str, shape: tuple[int, ...] | None, fast: bool) -> tuple[nn.Module, Odd]:
    model, optimizer = made(shape)
    train(model, optimizer, range(3))
    state = {"model": model, "optimizer": optimizer}
    bytecheckpoint.save(path, state, framework(shape), fast_saving=fast).committed.result()
    return model, optimizer


def comes_back(path: str, shape: tuple[int, ...] | None, fast: bool) -> None:
    model, optimizer = saved(path, shape, fast)
    other, its = made(shape)
    bytecheckpoint.load(path, {"model": other, "optimizer": its}, framework(shape))
    assert of(other, its) == of(model, optimizer)
    for each in ((model, optimizer), (other, its)):
        train(*each, range(3, 6))
    assert of(other, its) == of(model, optimizer)
    # Into an optimizer that has all of it: filled in place where it lies alike.
    kept = {id(value) for state in its.state.values() for value in state.values() if isinstance(value, torch.Tensor)}
    bytecheckpoint.load(path, {"model": other, "optimizer": its}, framework(shape))
    assert all(id(state["rows"]) in kept and id(state["average"]) in kept for state in its.state.values())


@pytest.mark.parametrize("fast", [False, True])
def test_of_one_process(tmp_path: Path, fast: bool) -> None:
    comes_back(str(tmp_path), None, fast)


def on_all_meshes(folder: str) -> None:
    for name, shape in {"1-D": (2,), "HSDP": (2, 1)}.items():
        comes_back(f"{folder}/{name}", shape, fast=name == "HSDP")
    bytecheckpoint.shutdown()


def test_of_dtensors(tmp_path: Path) -> None:
    run_ranks(2, on_all_meshes, str(tmp_path), limit_s=200)


def into_others(folder: str) -> None:
    """Placements follow the parameter's on another mesh; values are those that a load into one process gets."""
    shapes: list[tuple[int, ...] | None] = [(4,), (2, 2), None]
    for number, shape in enumerate(shapes):
        path = f"{folder}/{number}"
        saved(path, shape, fast=False)
        whole, its = made(None)
        bytecheckpoint.load(path, {"model": whole, "optimizer": its}, "ddp")
        for other_shape in shapes:
            model, optimizer = made(other_shape)
            bytecheckpoint.load(path, {"model": model, "optimizer": optimizer}, framework(other_shape))
            for parameter, of_whole in zip(model.parameters(), whole.parameters(), strict=True):
                state, wanted = optimizer.state[parameter], its.state[of_whole]
                is_sharded = shape is not None and other_shape is not None
                for name in ("rows", "columns", "average"):
                    value = state[name]
                    assert isinstance(value, DTensor) == is_sharded or (name == "average" and other_shape is not None)
                    full = value.full_tensor() if isinstance(value, DTensor) else value
                    assert torch.equal(full, wanted[name]), name
                if is_sharded:
                    assert state["rows"].placements == parameter.placements
                    local = state["average"].to_local()
                    assert local.stride() == (1, local.shape[0])
                assert type(state["plain"]) is torch.Tensor
                assert state["plain"].stride() == (1, 3)


def test_on_another_mesh(tmp_path: Path) -> None:
    run_ranks(4, into_others, str(tmp_path), limit_s=300)


def of_stages(folder: str) -> None:
    """Each rank has parameters of its own, as stages of a pipeline do: rank 0 knows the layouts of all."""
    rank = dist.get_rank()

    def stage() -> tuple[nn.Module, Odd]:
        model = nn.Module()
        model.register_module(f"stage{rank}", nn.Linear(8, 8, bias=False))
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))["dp"])
        return model, Odd(model.parameters())

    model, optimizer = stage()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) * (rank + 1)
    optimizer.step()
    bytecheckpoint.save(folder, {"model": model, "optimizer": optimizer}, "fsdp2")
    other, its = stage()
    bytecheckpoint.load(folder, {"model": other, "optimizer": its}, "fsdp2")
    assert of(other, its) == of(model, optimizer)


def test_of_stages(tmp_path: Path) -> None:
    run_ranks(2, of_stages, str(tmp_path), limit_s=100)


def test_only_what_is_odd_is_recorded(tmp_path: Path) -> None:
    model = nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    bytecheckpoint.save(tmp_path / "usual", {"model": model, "optimizer": optimizer}, "ddp")
    saved(str(tmp_path / "odd"), None, fast=False)
    usual, odd = (description_of(tmp_path / name / "optimizer") for name in ("usual", "odd"))
    assert "layouts" not in usual
    assert {**odd, "layouts": []} == {**usual, "layouts": [], "save": odd["save"]}
    assert {key for each in odd["layouts"] for key in each["keys"]} == {
        f"state.{number}.weight.{name}" for number in (0, 1) for name in ("average", "plain", "dict.whole.basis")
    }
    keys = dcp.FileSystemReader(tmp_path / "odd" / "optimizer").read_metadata().state_dict_metadata.keys()
    assert not [key for key in keys if "layout" in key]


@pytest.mark.parametrize(
    "recorded",
    [
        None,
        7,
        [7],
        [{}],
        [{"axes": 1, "order": [], "keys": ["a"]}],
        [{"axes": [["shard 0"]], "order": [], "keys": ["a"]}],
        [{"axes": [], "order": [0, 2], "keys": ["a"]}],
        [{"axes": [], "order": ["0"], "keys": ["a"]}],
        [{"axes": [], "order": [], "keys": [7]}],
    ],
)
def test_layouts_that_are_none(recorded: Any) -> None:
    """Anybody may have written them."""
    assert parsed_layouts(recorded) == {}


def test_odd_layouts_of_others() -> None:
    (layout,) = parsed_layouts([{"axes": [["a", "b"]], "order": [1, 0], "keys": ["x"]}]).values()
    assert layout == Layout((("a", "b"),), (1, 0))
    tensor = layout.made(None, torch.ones(3), torch.Size([2, 3, 4]), torch.float32, None)  # of another number of dims
    assert tensor.shape == (2, 3, 4)
    assert tensor.is_contiguous()


def on_another_mesh_than_its_parameter(folder: str) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    layout = Layout.of(
        DTensor.from_local(torch.ones(2), mesh["a"], [Shard(0)]),
        DTensor.from_local(torch.ones(2), mesh, [Shard(0), Replicate()]),
    )
    parameter = DTensor.from_local(torch.ones(2), mesh["a"], [Shard(0)])
    with pytest.raises(bytecheckpoint.errors.InvalidPlanError, match="let it make its state before the load"):
        layout.made(None, parameter, torch.Size([4]), torch.float32, None)
    before = DTensor.from_local(torch.ones(2), mesh["a"], [Shard(0)])
    assert layout.made(before, parameter, torch.Size([4]), torch.float32, None) is before


def test_on_another_mesh_than_its_parameter(tmp_path: Path) -> None:
    run_ranks(2, on_another_mesh_than_its_parameter, str(tmp_path), limit_s=100)
