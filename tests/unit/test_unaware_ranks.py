# SPDX-License-Identifier: Apache-2.0
"""Ranks of a launcher that have no process group: saves are refused, unless they were told to save alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import bytecheckpoint
from bytecheckpoint import BcpReader, BcpWriter, async_save_state_dict, load_state_dict, registered, save_state_dict
from bytecheckpoint.errors import ConfigError

VALUE = torch.arange(12.0).reshape(3, 4)


def state() -> dict[str, Any]:
    return {"weight": VALUE.clone(), "step": 7}


def with_stager(path: Path, **arguments: Any) -> None:
    future: Any = dcp.async_save(state(), storage_writer=BcpWriter(path), **arguments)
    future.result(60)


def registered_save(path: Path, **arguments: Any) -> None:
    with registered():
        dcp.save(state(), checkpoint_id=path, **arguments)


def registered_async(path: Path, **arguments: Any) -> None:
    with registered():
        future: Any = dcp.async_save(state(), checkpoint_id=path, **arguments)
        future.result(60)


def of_model(path: Path, **arguments: Any) -> None:
    bytecheckpoint.save(path, {"model": torch.nn.Linear(2, 2)}, "ddp", **arguments)


SAVES: dict[str, Callable[..., Any]] = {
    "save_state_dict": lambda path, **others: save_state_dict(path, state(), **others),
    "async_save_state_dict": lambda path, **others: async_save_state_dict(path, state(), **others).committed.result(60),
    "dcp.save": lambda path, **others: dcp.save(state(), storage_writer=BcpWriter(path), **others),
    "dcp.async_save": with_stager,
    "register": registered_save,
    "register, async": registered_async,
}


@pytest.fixture(autouse=True)
def second_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes this process what ``torchrun --nproc-per-node=2`` starts as its second one."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")


@pytest.fixture
def group_of_one(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def refusal(call: Callable[[], object]) -> ConfigError:
    try:
        call()
    except ConfigError as error:
        return error
    except CheckpointException as exception:
        (error, _) = exception.failures[0]
        assert isinstance(error, ConfigError)
        return error
    raise AssertionError("nothing was raised")


def assert_saved(path: Path) -> None:
    got = {"weight": torch.zeros(3, 4), "step": 0}
    load_state_dict(path, got)  # a rank may load all of a checkpoint alone
    assert torch.equal(got["weight"], VALUE)
    assert got["step"] == 7


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("how", [*SAVES, "bytecheckpoint.save", "bytecheckpoint.save, fast"])
def test_a_rank_without_a_group_saves_nothing(tmp_path: Path, how: str) -> None:
    of_model_fast = "fast" in how
    save = SAVES.get(how) or (lambda path: of_model(path, fast_saving=of_model_fast))
    error = refusal(lambda: save(tmp_path / "ckpt"))
    text = str(error)
    assert text.startswith(f"save({tmp_path}/ckpt): this process is rank 1 of 2, as WORLD_SIZE in its environment says")
    assert "init_process_group() on every rank" in text
    assert "no_dist=True" in text
    assert not [*tmp_path.rglob(".metadata")]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("how", SAVES)
def test_a_rank_that_is_told_to_save_alone(tmp_path: Path, how: str) -> None:
    SAVES[how](tmp_path / "ckpt", no_dist=True)
    assert_saved(tmp_path / "ckpt")


@pytest.mark.parametrize("how", SAVES)
@pytest.mark.usefixtures("group_of_one")
def test_a_group_of_one_rank(tmp_path: Path, how: str) -> None:
    SAVES[how](tmp_path / "ckpt")
    assert_saved(tmp_path / "ckpt")


@pytest.mark.parametrize("size", ["1", "", "many", "0"])
def test_a_launcher_that_says_nothing_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", size)
    save_state_dict(tmp_path / "ckpt", state())
    assert_saved(tmp_path / "ckpt")


def test_a_launcher_that_does_not_number_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK")
    error = refusal(lambda: save_state_dict(tmp_path / "ckpt", state()))
    assert "this process is one of 2 ranks" in str(error)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank may load all of a state dict or a model alone. Which extra state is its own, it does not know."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    model = torch.nn.Linear(2, 2)
    bytecheckpoint.save(tmp_path / "run", {"model": model, "extra_state": {"seed": 3}}, "ddp")
    monkeypatch.setenv("WORLD_SIZE", "2")
    other = torch.nn.Linear(2, 2)
    bytecheckpoint.load(tmp_path / "run", {"model": other}, "ddp")
    assert torch.equal(other.weight, model.weight)
    got = {"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}
    dcp.load(got, storage_reader=BcpReader(tmp_path / "run" / "model"))
    assert torch.equal(got["weight"], model.weight)
    extra = {"model": other, "extra_state": {"seed": 0}}
    error = refusal(lambda: bytecheckpoint.load(tmp_path / "run", extra, "ddp"))
    assert str(error).startswith(f"load({tmp_path}/run): this process is rank 1 of 2")
