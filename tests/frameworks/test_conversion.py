# SPDX-License-Identifier: Apache-2.0
"""Merges checkpoints into whole tensors: torch's files, safetensors, or a dict."""

from __future__ import annotations

import json
import os
import resource
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from support.equality import assert_equal, sorted_keys
from support.ranks import run_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import bytecheckpoint
from bytecheckpoint import bytecheckpoint_ckpt_to_pytorch_ckpt
from bytecheckpoint.errors import (
    CheckpointChangedError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    StorageError,
)
from frameworks.wrapped import Net, full_state, optimizer_of, train, wrap

LIMIT_S = 90.0


def save(folder: Path, wrapping: str) -> None:
    warnings.simplefilter("ignore")
    model = wrap(wrapping)
    optimizer = optimizer_of(model)
    train(model, optimizer)
    wanted = full_state(model, optimizer)
    framework = "fsdp" if wrapping == "fsdp flat" else "fsdp2"
    bytecheckpoint.save(folder / "step", {"model": model, "optimizer": optimizer}, framework)
    if dist.get_rank() == 0:
        torch.save(wanted, folder / "wanted.pt")


@pytest.fixture(scope="module", params=["fsdp flat", "fsdp2"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(3, save, folder, request.param, limit_s=LIMIT_S)
    return folder


def wanted_of(saved: Path) -> dict[str, Any]:
    """Returns the model's state as torch gathered it."""
    wanted = torch.load(saved / "wanted.pt", weights_only=True)
    return {key.removeprefix("model."): value for key, value in wanted.items() if key.startswith("model.")}


def test_a_plain_process_loads_what_is_merged(saved: Path, tmp_path: Path) -> None:
    """torch's files load into a model and an optimizer that do not use bytecheckpoint."""
    assert bytecheckpoint_ckpt_to_pytorch_ckpt(saved / "step", tmp_path) == {}
    model = Net()
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    assert_equal(sorted_keys(state), sorted_keys(wanted_of(saved)))
    model.load_state_dict(state)
    optimizer = torch.load(tmp_path / "optimizer.pt", weights_only=True)
    wanted = torch.load(saved / "wanted.pt", weights_only=True)
    for fqn, of_parameter in optimizer["state"].items():
        for name, value in of_parameter.items():
            assert torch.equal(value, wanted[f"optimizer.state.{fqn}.{name}"])
    for group in optimizer["param_groups"]:
        for fqn in group["params"]:
            for option, value in group.items():
                assert option == "params" or value == wanted[f"optimizer.param_groups.{fqn}.{option}"]
    assert sum(len(group["params"]) for group in optimizer["param_groups"]) == len(optimizer["state"])


def test_safetensors_have_tied_parameters_once_or_twice(saved: Path, tmp_path: Path) -> None:
    """Shards come with an index. Tied parameters are one tensor, unless ``untie_embeddings`` is given."""
    wanted = wanted_of(saved)
    kwargs: dict[str, Any] = {"model_only": True, "safetensors_format": True, "max_shard_size": 600}
    bytecheckpoint_ckpt_to_pytorch_ckpt(saved / "step", tmp_path / "tied", **kwargs)
    bytecheckpoint_ckpt_to_pytorch_ckpt(saved / "step", tmp_path / "untied", untie_embeddings=True, **kwargs)
    for folder in (tmp_path / "tied", tmp_path / "untied"):
        index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        assert len(set(index.values())) > 1
        tensors = {name: load_file(folder / file)[name] for name, file in index.items()}
        lacks = {"head.weight"} if folder.name == "tied" else set()
        assert wanted.keys() - tensors.keys() in (lacks, {"embed.weight"} if lacks else set())
        assert_equal(sorted_keys(tensors), sorted_keys({key: wanted[key] for key in tensors}))
        assert not (folder / "optimizer.pt").exists()


def test_a_dict_of_another_dtype(saved: Path) -> None:
    """A merge into a dict writes no files. It converts floating-point tensors of the model and nothing else."""
    merged = bytecheckpoint_ckpt_to_pytorch_ckpt(saved / "step", None, return_dict=True, dtype=torch.bfloat16)
    assert_equal(
        sorted_keys(merged["model"]), sorted_keys({key: value.bfloat16() for key, value in wanted_of(saved).items()})
    )
    assert merged["model"]["head.weight"].data_ptr() == merged["model"]["embed.weight"].data_ptr()
    assert merged["optimizer"]["state"]["embed.weight"]["exp_avg"].dtype == torch.float32
    only = bytecheckpoint_ckpt_to_pytorch_ckpt(saved / "step", None, optimizer_only=True, return_dict=True)
    assert [*only] == ["optimizer"]


class WithExtra(nn.Linear):
    """Has containers in its state dict, which a checkpoint stores leaf by leaf."""

    extra: Any = None

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_containers_are_containers_again(tmp_path: Path) -> None:
    """Extra state of a module and the lists that LBFGS keeps are restored as they were given."""
    model = WithExtra(3, 2)
    model.extra = {"scale": torch.arange(3), "history": [torch.ones(2), 5], "name": "x"}
    optimizer = torch.optim.LBFGS([model.weight])

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model.weight**4).sum()
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    bytecheckpoint.save(tmp_path / "step", {"model": model, "optimizer": optimizer}, "ddp")
    bytecheckpoint_ckpt_to_pytorch_ckpt(tmp_path / "step", tmp_path)
    loaded = WithExtra(3, 2)
    loaded.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    assert torch.equal(loaded.extra["scale"], model.extra["scale"])
    assert (loaded.extra["history"][1], loaded.extra["name"]) == (5, "x")
    merged = torch.load(tmp_path / "optimizer.pt", weights_only=True)
    kept = optimizer.state[model.weight]
    assert [*merged["state"]] == ["weight"]
    assert len(kept["old_dirs"]) > 1
    assert all(map(torch.equal, merged["state"]["weight"]["old_dirs"], kept["old_dirs"]))


def test_groups_by_number(tmp_path: Path) -> None:
    """Groups that torch's own state dict of an optimizer numbers stay groups."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    of_model, of_optimizer = get_state_dict(model, optimizer)
    bytecheckpoint.save_state_dict(tmp_path / "model", of_model)
    bytecheckpoint.save_state_dict(tmp_path / "optimizer", of_optimizer)
    merged = bytecheckpoint_ckpt_to_pytorch_ckpt(tmp_path, None, return_dict=True)
    assert merged["optimizer"]["param_groups"] == of_optimizer["param_groups"]
    assert [*merged["optimizer"]["state"]] == ["weight", "bias"]


@pytest.mark.parametrize("safetensors_format", [False, True])
def test_a_full_disk_leaves_what_was_there(tmp_path: Path, safetensors_format: bool) -> None:
    """No partial file is left, and a full disk raises StorageError for either writer."""
    bytecheckpoint.save(tmp_path / "step", {"model": nn.Linear(200, 300)}, "ddp")
    out = tmp_path / "out"
    kwargs: dict[str, Any] = {"safetensors_format": safetensors_format, "max_shard_size": 1000}
    bytecheckpoint_ckpt_to_pytorch_ckpt(tmp_path / "step", out, **kwargs)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
        with pytest.raises(StorageError, match="File too large"):
            bytecheckpoint_ckpt_to_pytorch_ckpt(tmp_path / "step", out, **kwargs)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def link_to(theirs: Path) -> Callable[[Path], None]:
    theirs.write_bytes(b"theirs")
    return lambda path: path.symlink_to(theirs)


@pytest.mark.parametrize(
    "name", ["model.pt", ".model.pt.{pid}.tmp", "model.safetensors", "model.safetensors.index.json"]
)
def test_nothing_but_files_of_its_own_is_written_over(tmp_path: Path, name: str) -> None:
    """A link or a FIFO at the path of an output is refused. A model file with another name stays."""
    bytecheckpoint.save(tmp_path / "step", {"model": nn.Linear(200, 300)}, "ddp")
    kwargs: dict[str, Any] = {"safetensors_format": "safetensors" in name, "max_shard_size": 1000}
    for number, make in enumerate((link_to(tmp_path / "theirs"), os.mkfifo)):
        out = tmp_path / f"out{number}"
        out.mkdir()
        (out / "model_best.safetensors").write_bytes(b"mine")
        make(out / name.format(pid=os.getpid()))
        before = {path.name: path.lstat() for path in out.iterdir()}
        with pytest.raises(StorageError, match="must be a regular file"):
            bytecheckpoint_ckpt_to_pytorch_ckpt(tmp_path / "step", out, **kwargs)
        assert {path.name: path.lstat() for path in out.iterdir()} == before
        (out / name.format(pid=os.getpid())).unlink()
        bytecheckpoint_ckpt_to_pytorch_ckpt(tmp_path / "step", out, **kwargs)
        bytecheckpoint_ckpt_to_pytorch_ckpt(tmp_path / "step", out, **kwargs)
        assert (out / "model_best.safetensors").read_bytes() == b"mine"
    assert (tmp_path / "theirs").read_bytes() == b"theirs"


def test_what_does_not_fit_is_refused(saved: Path, tmp_path: Path) -> None:
    """Each error message says what to do."""
    with pytest.raises(ConfigError, match="framework='megatron': must be one of 'ddp', 'fsdp', 'fsdp2'"):
        bytecheckpoint_ckpt_to_pytorch_ckpt(saved / "step", tmp_path, framework="megatron")
    with pytest.raises(ConfigError, match="model_only and optimizer_only cannot both be True"):
        bytecheckpoint_ckpt_to_pytorch_ckpt(saved / "step", tmp_path, model_only=True, optimizer_only=True)
    with pytest.raises(ConfigError, match="the result would be lost"):
        bytecheckpoint_ckpt_to_pytorch_ckpt(saved / "step", None)
    with pytest.raises(CheckpointNotFoundError, match="pass the folder of a step"):
        bytecheckpoint_ckpt_to_pytorch_ckpt(saved, tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"file, directory.*Not a directory"):
        bytecheckpoint_ckpt_to_pytorch_ckpt(saved / "step", tmp_path / "file")


def test_damage_is_seen(tmp_path: Path) -> None:
    """A merge reads no bytes whose checksum does not match."""
    bytecheckpoint.save(tmp_path / "step", {"model": wrap("plain")}, "ddp")
    (file,) = (tmp_path / "step" / "model").glob("*.distcp")
    damaged = bytearray(file.read_bytes())
    damaged[len(damaged) // 3] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(CorruptCheckpointError):
        bytecheckpoint_ckpt_to_pytorch_ckpt(tmp_path / "step", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_save_that_takes_the_place_of_what_is_merged(tmp_path: Path) -> None:
    """Nothing is put together of two saves: neither files and the dict, nor the files among them."""

    def save_again(done: int, total: int) -> None:
        if not replaced:
            replaced.append(done)
            bytecheckpoint.save(tmp_path / "step", {"model": wrap("plain")}, "ddp")

    for kwargs in ({"return_dict": True}, {"safetensors_format": True, "max_shard_size": 1}):
        replaced: list[int] = []
        bytecheckpoint.save(tmp_path / "step", {"model": wrap("plain")}, "ddp")
        with pytest.raises(CheckpointChangedError):
            bytecheckpoint_ckpt_to_pytorch_ckpt(tmp_path / "step", tmp_path / "out", progress=save_again, **kwargs)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.pt"]
