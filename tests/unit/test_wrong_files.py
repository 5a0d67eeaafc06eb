# SPDX-License-Identifier: Apache-2.0
"""Tests what is said of a file that is no checkpoint: that it is empty, what it begins with, or what it belongs to."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.cli_runs import run, save

import bytecheckpoint
from bytecheckpoint.errors import CheckpointNotFoundError

CALLS: list[Callable[[str], object]] = [
    bytecheckpoint.read,
    bytecheckpoint.verify,
    bytecheckpoint.digest,
    lambda path: bytecheckpoint.load_state_dict(path, {}),
]


@pytest.mark.parametrize("name", ["model.pt", "model.bin", "model"])
@pytest.mark.parametrize("call", CALLS)
def test_an_empty_file(tmp_path: Path, name: str, call: Callable[[str], object]) -> None:
    path = tmp_path / name
    path.touch()
    with pytest.raises(CheckpointNotFoundError) as raised:
        call(str(path))
    assert str(raised.value) == f"open({path}): the file is empty (0 bytes)"
    assert raised.value.path == str(path)


@pytest.mark.parametrize("call", CALLS)
def test_a_file_of_something_else(tmp_path: Path, call: Callable[[str], object]) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(CheckpointNotFoundError) as raised:
        call(str(path))
    assert str(raised.value) == (
        f"open({path}): it is a file of 43 bytes that is no checkpoint: neither of torch.save nor safetensors, and it "
        "begins with b'version https://'; a checkpoint of DCP is a folder"
    )


def test_commands(tmp_path: Path) -> None:
    (tmp_path / "e.pt").touch()
    for command in (["ls"], ["verify"], ["digest"], ["du"], ["why", "KEY"], ["show", "KEY"], ["convert", "OUT"]):
        name, *others = [str(tmp_path / "out") if each == "OUT" else each for each in command]
        said = run(name, str(tmp_path / "e.pt"), *others)
        assert (said.exit_code, said.stderr) == (2, f"bcp: open({tmp_path}/e.pt): the file is empty (0 bytes)\n"), name


def test_a_file_of_a_checkpoint(tmp_path: Path) -> None:
    save(tmp_path / "ckpt", {"w": torch.ones(2)})
    (data,) = (tmp_path / "ckpt").glob("*.distcp")
    for name in (".metadata", data.name):
        with pytest.raises(CheckpointNotFoundError, match=rf"pass the folder of it, as '{tmp_path}/ckpt'$"):
            bytecheckpoint.read(tmp_path / "ckpt" / name)


def test_what_is_no_regular_file(tmp_path: Path) -> None:
    """Nothing is read of it, and nobody waits for it."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("pipe", "link", "folder"):
        with pytest.raises(CheckpointNotFoundError, match=r"/\.metadata\): no checkpoint there$"):
            bytecheckpoint.read(tmp_path / name)
