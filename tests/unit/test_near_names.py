# SPDX-License-Identifier: Apache-2.0
"""Tests that an error for a name that does not exist says which one is near."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cli_runs import run, save
from torch import nn

import bytecheckpoint
from bytecheckpoint import Config, LoadSpec
from bytecheckpoint.errors import ConfigError
from bytecheckpoint.near_names import did_you_mean, nearest
from bytecheckpoint.per_rank import check_policy
from bytecheckpoint.training_state.merging import bytecheckpoint_ckpt_to_pytorch_ckpt


def test_what_is_near() -> None:
    assert nearest("fsdpp", ["ddp", "fsdp", "fsdp2"], 2) == ["fsdp", "fsdp2"]
    assert nearest("FSDP", ["ddp", "fsdp"]) == ["fsdp"]
    assert nearest("embed", ["step", "model.layers.0.embed_of_tokens.weight"]) == [
        "model.layers.0.embed_of_tokens.weight"
    ]
    assert nearest("x", ["ddp", "fsdp"]) == nearest("", ["ddp"]) == nearest(5, ["5"]) == nearest(None, ["none"]) == []
    assert did_you_mean("fsp", ["ddp", "fsdp"]) == "; did you mean 'fsdp'?"
    assert did_you_mean("quite different", ["ddp", "fsdp"]) == ""


def test_settings() -> None:
    wrong: dict[str, Any] = {"io_thread": 4}
    with pytest.raises(TypeError, match=r"^Config\(io_thread=\.\.\.\): there is no such setting; did you mean 'io_thr"):
        Config(**wrong)
    with pytest.raises(TypeError, match=r"there is no such setting$"):
        Config(**{"quite_different": 1})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"did you mean 'BYTECHECKPOINT_IO_THREADS'\?$"):
        Config.from_env({"BYTECHECKPOINT_IO_THREDS": "4"})
    with pytest.raises(ConfigError, match=r"did you mean 'BYTECHECKPOINT_ROLE_SUFFIX'\?$"):
        Config.from_env({"BYTECHECKPOINT_ROLE_SUFIX": "a"})
    with pytest.raises(ConfigError, match=r"independent; did you mean 'cooperative'\?$"):
        Config(shared_reading="cooperativ")


def test_settings_are_still_a_dataclass() -> None:
    config = Config(io_threads=3)
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config
    assert dataclasses.replace(config, io_threads=2) == Config()
    assert inspect.signature(Config).parameters.keys() == {field.name for field in dataclasses.fields(Config)}


def keys_of_loads(tmp_path: Path) -> list[tuple[Callable[[], object], str]]:
    path, model = tmp_path / "ckpt", nn.Linear(2, 2)
    save(path, {"model": {"layers": {"0": torch.ones(2)}}, "step": 3})
    state = {"model": model}
    strict: Any = "modle"
    return [
        (lambda: bytecheckpoint.read(path, spec=LoadSpec(include="modle.*")), "model"),
        (lambda: bytecheckpoint.read(path, spec=LoadSpec(exclude="model.layer.0")), "model.layers.0"),
        (lambda: bytecheckpoint.read(path, spec=LoadSpec(rename={"sep": "x"})), "step"),
        (lambda: LoadSpec(strict=strict), "model"),
        (lambda: LoadSpec(cast="wide"), "widen"),
        (lambda: bytecheckpoint.save(tmp_path / "run", state, "fsdpp"), "fsdp"),
        (lambda: bytecheckpoint.load(tmp_path / "run", state, "FSDP2"), "fsdp2"),
        (lambda: bytecheckpoint_ckpt_to_pytorch_ckpt(tmp_path / "run", framework="dpp"), "ddp"),
        (lambda: check_policy({"a": "own", "b": "replicate"}), "replicated"),
    ]


def test_arguments_and_patterns(tmp_path: Path) -> None:
    for call, near in keys_of_loads(tmp_path):
        with pytest.raises(ConfigError, match=rf"; did you mean '{near}'\?$"):
            call()


def test_commands(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    save(path, {"model": {"embed": {"weight": torch.ones(2)}}, "step": 3})
    for name in ("model.embd.weight", "embed"):
        said = run("show", str(path), name)
        assert said.exit_code == 2
        assert said.stderr == f"bcp: '{name}' is not in {path}; did you mean 'model.embed.weight'?\n"
    assert run("show", str(path), "zzz").stderr.endswith("; bcp ls lists the names\n")
    assert "; did you mean 'show'? See bcp --help" in run("shw", str(path)).stderr
    of_option = run("ls", str(path), "--jsn").stderr  # in the words of this version of click
    assert "--json" in of_option
    assert "?. See" not in of_option
