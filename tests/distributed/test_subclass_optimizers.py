# SPDX-License-Identifier: Apache-2.0
"""Optimizers whose states are tensors of subclasses, as those of 8 bits: saved by parts, resharded, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.ranks import run_ranks
from support.subclasses import Int8Rows
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import bytecheckpoint
from bytecheckpoint import Config, shutdown
from bytecheckpoint.errors import InvalidPlanError
from bytecheckpoint.tensors.equality import bits

ROWS, COLUMNS = 10, 6


class Quantizing(torch.optim.Optimizer):
    """Keeps its momentum in numbers of 8 bits, with a scale for each row; a second one in a dict."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for number, parameter in enumerate(group["params"]):
                state = self.state[parameter]
                state["step"] = state.get("step", torch.tensor(0.0)) + 1
                if parameter.ndim == 2:
                    state["momentum"] = _like(parameter, seed=int(group["lr"] * 100) + number)
                    state["more"] = {"second": _like(parameter, seed=7 + int(group["lr"] * 100) + number)}


def _like(parameter: Any, seed: int) -> Any:
    """Returns the shard of this rank of the quantized tensor of a seed."""
    whole = Int8Rows.make(ROWS, COLUMNS, seed)
    if not isinstance(parameter, DTensor):
        return whole
    (chunk,) = parameter.__create_chunk_list__()  # type: ignore[attr-defined]
    local = Int8Rows(*(part.contiguous() for part in whole.narrow(0, chunk.offsets[0], chunk.sizes[0]).parts()))
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, run_check=False, shape=shape, stride=stride
    )


def _job(rate: float, is_sharded: bool = True) -> dict[str, Any]:
    model = torch.nn.Linear(COLUMNS, ROWS)
    if is_sharded:
        fully_shard(model)
    optimizer = Quantizing(model.parameters())
    optimizer.param_groups[0]["lr"] = rate
    return {"model": model, "optimizer": optimizer}


def _assert_saved_state(job: dict[str, Any], rate: float) -> None:
    optimizer = job["optimizer"]
    assert optimizer.param_groups[0]["lr"] == rate
    weight, bias = job["model"].weight, job["model"].bias
    assert {*optimizer.state[weight]} == {"step", "momentum", "more"}
    assert {*optimizer.state[bias]} == {"step"}
    found = (optimizer.state[weight]["momentum"], optimizer.state[weight]["more"]["second"])
    for value, seed in zip(found, (int(rate * 100), 7 + int(rate * 100)), strict=True):
        wanted = _like(weight, seed)
        assert type(value) is type(wanted)
        held, local = (each.to_local() if isinstance(each, DTensor) else each for each in (value, wanted))
        assert type(held) is Int8Rows
        if local.numel() == 0:
            continue
        for a, b in zip(held.parts(), local.parts(), strict=True):
            assert a.shape == b.shape
            assert torch.equal(bits(a), bits(b))


def _save(root: Path, rate: float, fast: bool) -> None:
    job = _job(rate)
    job["optimizer"].step()
    handle = bytecheckpoint.save(root, job, "fsdp2", fast_saving=fast)
    if fast:  # what is saved is the state at the call
        for part in job["optimizer"].state[job["model"].weight]["momentum"].to_local().parts():
            part.zero_()
    handle.committed.result(60)
    shutdown(60)


def _load_and_save_again(root: Path, again: Path, rate: float) -> None:
    job = _job(0.5)
    job["optimizer"].step()
    momentum = job["optimizer"].state[job["model"].weight]["momentum"]
    result = bytecheckpoint.load(root, job, "fsdp2")
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert job["optimizer"].state[job["model"].weight]["momentum"] is momentum, "filled in place"
    _assert_saved_state(job, rate)
    bytecheckpoint.save(again, job, "fsdp2")
    shutdown(60)


def _load_on_one(root: Path, rate: float) -> None:
    job = _job(0.5, is_sharded=False)
    before = [value.detach().clone() for value in job["model"].parameters()]
    with pytest.raises(InvalidPlanError, match=r"'momentum' of 'weight' was saved by .*no such tensor to fill.*lr=0"):
        bytecheckpoint.load(root, job, "ddp")
    assert all(map(torch.equal, before, job["model"].parameters()))
    job["optimizer"].step()
    bytecheckpoint.load(root, job, "ddp")
    _assert_saved_state(job, rate)


@pytest.mark.parametrize("fast", [False, True])
def test_states_reshard(tmp_path: Path, fast: bool) -> None:
    run_ranks(2, _save, tmp_path / "two", 0.25, fast)
    metadata = dcp.FileSystemReader(tmp_path / "two" / "optimizer").read_metadata().state_dict_metadata
    parts = ("qdata", "scale", "table", "__subclass__")
    for name in ("momentum", "more.second"):
        assert {f"state.weight.{name}.{part}" for part in parts} < {*metadata}
    assert [*metadata["state.weight.momentum.qdata"].size] == [ROWS, COLUMNS]
    run_ranks(4, _load_and_save_again, tmp_path / "two", tmp_path / "four", 0.25)
    run_ranks(1, _load_on_one, tmp_path / "four", 0.25)
    # Stock DCP loads the parts, and runs nothing.
    wanted = Int8Rows.make(ROWS, COLUMNS, 25)
    flat = {f"state.weight.momentum.{part}": torch.zeros_like(getattr(wanted, part)) for part in wanted.names}
    dcp.load(flat | {"state.weight.momentum.__subclass__": ""}, checkpoint_id=tmp_path / "four/optimizer", no_dist=True)
    for part in wanted.names:
        assert torch.equal(bits(flat[f"state.weight.momentum.{part}"]), bits(getattr(wanted, part)))


def _save_whole(root: Path) -> None:
    job = _job(0.25, is_sharded=False)
    job["optimizer"].step()
    with torch.serialization.safe_globals([Int8Rows]):
        bytecheckpoint.save(root, job, "ddp", config=Config(tensor_subclasses="opaque"))
    shutdown(60)


def test_whole_records_still_load(tmp_path: Path) -> None:
    run_ranks(1, _save_whole, tmp_path)
    metadata = dcp.FileSystemReader(tmp_path / "optimizer").read_metadata().state_dict_metadata
    assert "state.weight.momentum" in metadata
    job = _job(0.5, is_sharded=False)
    job["optimizer"].step()
    bytecheckpoint.load(tmp_path, job, "ddp", config=Config(allow_pickle=True))
    _assert_saved_state(job, 0.25)
