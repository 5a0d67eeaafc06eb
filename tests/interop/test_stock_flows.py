# SPDX-License-Identifier: Apache-2.0
"""Tests the flows of DCP beside ``save`` and ``load`` with our classes, on our checkpoints and on stock ones.

Most tests have the name of DCP's function or option.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.equality import assert_equal
from support.ranks import failures, run_ranks
from support.training import Training
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.format_utils import (
    BroadcastingTorchSaveReader,
    DynamicMetaLoadPlanner,
    dcp_to_torch_save,
    torch_save_to_dcp,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict, _load_state_dict_from_keys
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from bytecheckpoint import BcpReader, BcpWriter

BOTH_WRITERS = pytest.mark.parametrize("writer", [BcpWriter, dcp.FileSystemWriter])
BOTH_READERS = pytest.mark.parametrize("reader", [BcpReader, dcp.FileSystemReader])
# Stock to stock is left out, because it does not test our code.
PAIRS = pytest.mark.parametrize(
    ("writer", "reader"),
    [(BcpWriter, BcpReader), (BcpWriter, dcp.FileSystemReader), (dcp.FileSystemWriter, BcpReader)],
)


class Trained(NamedTuple):
    """The state of a training that ran on two ranks."""

    directory: Path

    def saved_by(self, writer: Any) -> str:
        return str(self.directory / writer.__name__)

    @property
    def file(self) -> Path:
        """Returns the file of ``torch.save`` with whole tensors."""
        return self.directory / "whole.pt"

    @property
    def whole(self) -> dict[str, Any]:
        state: dict[str, Any] = torch.load(self.file, weights_only=True)
        return state


def train(directory: str) -> None:
    trained, training = Trained(Path(directory)), Training(seed=1)
    training.step(2)
    for writer in (BcpWriter, dcp.FileSystemWriter):
        dcp.save(training.state(), storage_writer=writer(trained.saved_by(writer)))
    whole = training.full_state()
    if dist.get_rank() == 0:
        torch.save(whole, trained.file)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    directory = tmp_path_factory.mktemp("trained")
    run_ranks(2, train, str(directory))
    return Trained(directory)


def zeros_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: zeros_of(item) for key, item in value.items()}
    return [zeros_of(item) for item in value] if isinstance(value, list) else None


def in_order(value: Any) -> Any:
    """Returns ``value`` with keys sorted and tuples as lists.

    What DCP builds from metadata has the order of keys of the metadata, and what it has gathered has lists for tuples.
    """
    if isinstance(value, dict):
        return {key: in_order(value[key]) for key in sorted(value)}
    return [in_order(item) for item in value] if isinstance(value, list | tuple) else value


def check_parts(got: Any, wanted: Any) -> None:
    assert_equal(in_order(got), in_order(wanted))


# Between formats.


@BOTH_WRITERS
def test_dcp_to_torch_save(trained: Trained, writer: Any, tmp_path: Path) -> None:
    """It uses the stock reader itself. The same steps with our reader give the same result."""
    path = trained.saved_by(writer)
    dcp_to_torch_save(path, tmp_path / "theirs.pt")
    check_parts(torch.load(tmp_path / "theirs.pt", weights_only=True), trained.whole)

    state: dict[str, Any] = {}
    _load_state_dict(state, storage_reader=BcpReader(path), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    torch.save(state, tmp_path / "ours.pt")
    check_parts(torch.load(tmp_path / "ours.pt", weights_only=True), trained.whole)


def test_torch_save_to_dcp(trained: Trained, tmp_path: Path) -> None:
    torch_save_to_dcp(trained.file, tmp_path / "ckpt")
    got = zeros_of(trained.whole)
    dcp.load(got, storage_reader=BcpReader(tmp_path / "ckpt"))
    assert_equal(got, trained.whole)
    run_ranks(2, resume_whole, BcpReader, str(tmp_path / "ckpt"), trained)


def resume_whole(reader: Any, path: str, trained: Trained) -> None:
    """Loads a checkpoint of whole tensors into sharded ones."""
    training = Training(seed=2)
    state = training.state()
    dcp.load(state, storage_reader=reader(path))
    training.load_state(state)
    assert_equal(training.full_state(), trained.whole)


def broadcast_and_save(trained: Trained, path: str) -> None:
    model = zeros_of(Training(seed=2).state()["model"])
    assert any(isinstance(value, DTensor) for value in model.values())
    whole = {key: torch.zeros(value.shape) for key, value in model.items()}
    dcp.load(
        {"model": whole},
        storage_reader=BroadcastingTorchSaveReader(),
        planner=DynamicMetaLoadPlanner(),
        checkpoint_id=path + ".pt",
    )
    assert_equal(whole, trained.whole["model"])
    dcp.save({"model": whole}, storage_writer=BcpWriter(path))
    for reader in (BcpReader, dcp.FileSystemReader):
        dcp.load({"model": model}, storage_reader=reader(path))
        assert_equal({key: value.full_tensor() for key, value in model.items()}, trained.whole["model"])


def test_broadcasting_torch_save_reader(trained: Trained, tmp_path: Path) -> None:
    """Turns a file of ``torch.save`` into our checkpoint. The reader needs DynamicMetaLoadPlanner.

    It broadcasts whole tensors; in torch 2.13 it hangs on DTensors.
    """
    torch.save({"model": trained.whole["model"]}, tmp_path / "ckpt.pt")
    run_ranks(2, broadcast_and_save, trained, str(tmp_path / "ckpt"))


@PAIRS
def test_load_state_dict_from_keys(trained: Trained, writer: Any, reader: Any) -> None:
    path, whole = trained.saved_by(writer), trained.whole
    check_parts(_load_state_dict_from_keys(storage_reader=reader(path)), whole)
    check_parts(_load_state_dict_from_keys("step", storage_reader=reader(path)), {"step": 3})
    for key in whole:
        check_parts(_load_state_dict_from_keys({key}, storage_reader=reader(path)), {key: whole[key]})
    got = _load_state_dict_from_keys({"model.0.weight", "optimizer.param_groups"}, storage_reader=reader(path))
    check_parts(got["model"], {"0.weight": whole["model"]["0.weight"]})
    check_parts(got["optimizer"], {"param_groups": whole["optimizer"]["param_groups"]})


# State dicts of models and optimizers.


def save_parts(writer: Any, path: str, options: StateDictOptions) -> None:
    training = Training(seed=1)
    training.step(2)
    model = get_model_state_dict(training.model, options=options)
    optimizer = get_optimizer_state_dict(training.model, training.optimizer, options=options)
    dcp.save({"model": model, "optimizer": optimizer}, storage_writer=writer(path))


def resume_parts(reader: Any, path: str, options: StateDictOptions, trained: Trained) -> None:
    training = Training(seed=2)
    model = get_model_state_dict(training.model, options=options)
    optimizer = get_optimizer_state_dict(training.model, training.optimizer, options=options)
    dcp.load({"model": model, "optimizer": optimizer}, storage_reader=reader(path))
    set_model_state_dict(training.model, model, options=options)
    set_optimizer_state_dict(training.model, training.optimizer, optimizer, options=options)
    check_parts(training.full_state(), trained.whole)


@PAIRS
@pytest.mark.parametrize(
    "options",
    [
        StateDictOptions(),
        StateDictOptions(cpu_offload=True),
        StateDictOptions(flatten_optimizer_state_dict=True),
        StateDictOptions(full_state_dict=True),
    ],
    ids=["sharded", "cpu_offload", "flatten_optimizer", "full"],
)
def test_model_and_optimizer_state_dicts(
    trained: Trained, tmp_path: Path, writer: Any, reader: Any, options: StateDictOptions
) -> None:
    """Two ranks save with ``get_model_state_dict`` and ``get_optimizer_state_dict``; four resume with ``set_...``."""
    run_ranks(2, save_parts, writer, str(tmp_path / "ckpt"), options)
    run_ranks(4, resume_parts, reader, str(tmp_path / "ckpt"), options, trained)


def resume_from_the_first_rank(reader: Any, path: str, trained: Trained) -> None:
    """One rank reads the whole model, and the others get their parts from it."""
    training = Training(seed=2)
    model: dict[str, Any] = {}
    if dist.get_rank() == 0:
        model = zeros_of(trained.whole["model"])
        dcp.load({"model": model}, storage_reader=reader(path), no_dist=True)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(training.model, model, options=options)
    assert_equal(training.full_state()["model"], trained.whole["model"])


@PAIRS
def test_broadcast_from_rank0(trained: Trained, writer: Any, reader: Any) -> None:
    run_ranks(2, resume_from_the_first_rank, reader, trained.saved_by(writer), trained)


class AppState(Stateful):
    """The whole application as one entry of the state dict, as in the DCP tutorial."""

    def __init__(self, training: Training, step: int) -> None:
        self.training = training
        self.step = step

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.training.model, self.training.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.training.model,
            self.training.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.step = state["step"]


def save_app(writer: Any, path: str) -> None:
    training = Training(seed=1)
    training.step(2)
    dcp.save({"app": AppState(training, step=3)}, storage_writer=writer(path))


def resume_app(reader: Any, path: str, trained: Trained) -> None:
    app = AppState(Training(seed=2), step=0)
    dcp.load({"app": app}, storage_reader=reader(path))
    assert app.step == 3
    assert_equal(app.training.full_state(), trained.whole)


@PAIRS
def test_stateful_app_state(trained: Trained, tmp_path: Path, writer: Any, reader: Any) -> None:
    run_ranks(2, save_app, writer, str(tmp_path / "ckpt"))
    run_ranks(4, resume_app, reader, str(tmp_path / "ckpt"), trained)


# Parts of checkpoints.


def partly(flatten: bool, *, partial: bool = True) -> dcp.DefaultLoadPlanner:
    # With flatten_sharded_tensors DCP puts objects into a dict of its own.
    return dcp.DefaultLoadPlanner(flatten, flatten, allow_partial_load=partial)


@PAIRS
@pytest.mark.parametrize("flatten", [True, False])
def test_default_load_planner_partial(tmp_path: Path, writer: Any, reader: Any, flatten: bool) -> None:
    """With ``allow_partial_load`` keys that the checkpoint lacks keep their values; without it they are an error."""
    saved = {"weight": torch.arange(6.0).reshape(2, 3), "dropped": torch.ones(2), "step": 7, "nested": {"lr": 0.5}}
    dcp.save(saved, storage_writer=writer(tmp_path), planner=dcp.DefaultSavePlanner(flatten_state_dict=flatten))
    got: dict[str, Any] = {"weight": torch.zeros(2, 3), "new": torch.full((2,), 9.0), "step": 0, "name": "kept"}
    got["nested"] = {"lr": 0.0, "decay": 0.1} if flatten else None
    dcp.load(got, storage_reader=reader(tmp_path), planner=partly(flatten))
    nested = {"lr": 0.5, "decay": 0.1} if flatten else {"lr": 0.5}
    assert_equal(
        got,
        {"weight": saved["weight"], "new": torch.full((2,), 9.0), "step": 7, "name": "kept", "nested": nested},
    )
    errors = failures(lambda: dcp.load(got, storage_reader=reader(tmp_path), planner=partly(flatten, partial=False)))
    with pytest.raises(RuntimeError, match="Missing key in checkpoint state_dict"):
        raise errors[0]


@BOTH_READERS
def test_partial_load_of_a_training(trained: Trained, reader: Any) -> None:
    run_ranks(2, add_a_layer, reader, trained)


def add_a_layer(reader: Any, trained: Trained) -> None:
    """Loads into a model that has grown since the save; the new layer keeps its values."""
    model = Training(seed=2).state()["model"]
    added = torch.full((3,), 5.0)
    state = {"model": {**model, "added": added}}
    dcp.load(state, storage_reader=reader(trained.saved_by(BcpWriter)), planner=partly(True))
    assert torch.equal(added, torch.full((3,), 5.0))
    assert_equal({key: value.full_tensor() for key, value in model.items()}, trained.whole["model"])
