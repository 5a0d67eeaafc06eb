# SPDX-License-Identifier: Apache-2.0
"""Tests that whoever reads a damaged block is told which keys have bytes in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cli_runs import run, save

import bytecheckpoint
from bytecheckpoint import Config, LoadSpec, load_state_dict
from bytecheckpoint.contents.contents import open_contents
from bytecheckpoint.contents.damaged_keys import naming_keys
from bytecheckpoint.errors import CorruptCheckpointError
from bytecheckpoint.native import _core

BLOCK_BYTES = 256 * 1024
KEYS = [f"w{at}" for at in range(10)]


def state() -> dict[str, Any]:
    return {key: torch.zeros(100_000) for key in KEYS} | {"note": ["an object"]}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Returns a checkpoint with a wrong bit in the block that begins in ``w1`` and ends in ``w2``."""
    save(tmp_path / "ckpt", state())
    (data,) = (tmp_path / "ckpt").glob("*.distcp")
    content = bytearray(data.read_bytes())
    content[3 * BLOCK_BYTES + 1000] ^= 1
    data.write_bytes(content)
    return tmp_path / "ckpt"


def test_a_load(path: Path) -> None:
    with pytest.raises(CorruptCheckpointError) as raised:
        load_state_dict(path, state())
    assert str(raised.value).startswith(f"read({path}/__0_0.")
    assert f", offset={3 * BLOCK_BYTES}, {BLOCK_BYTES} bytes): the block has CRC " in str(raised.value)
    assert str(raised.value).endswith("; the block has bytes of 'w1', 'w2'")
    assert raised.value.path.startswith(f"{path}/__0_0.")


@pytest.mark.parametrize(
    ("spec", "keys"),
    [
        (LoadSpec(rename={"re:w(.*)": r"v.\1"}, strict=False), "'v.1', 'v.2'"),
        (LoadSpec(transforms=bytecheckpoint.transforms.Stack("w{i}", "all"), strict=False), "'all'"),
    ],
)
def test_a_load_under_other_names_names_these(path: Path, spec: LoadSpec, keys: str) -> None:
    wanted = {f"v.{at}": torch.zeros(100_000) for at in range(10)} | {"all": torch.zeros(10, 100_000)}
    with pytest.raises(CorruptCheckpointError, match=rf"; the block has bytes of {keys}$"):
        load_state_dict(path, wanted, spec=spec)


def test_an_undamaged_key_beside_it_loads(path: Path) -> None:
    load_state_dict(path, {"w7": torch.ones(100_000)})


@pytest.mark.parametrize(
    "arguments",
    [
        ["show", "PATH", "w1"],
        ["digest", "PATH"],
        ["diff", "PATH", "PATH"],
        ["convert", "PATH", "OUT", "--to", "safetensors", "--include", "w*"],
        ["convert", "PATH", "OUT", "--to", "torch"],
    ],
)
def test_commands(path: Path, tmp_path: Path, arguments: list[str]) -> None:
    places = {"PATH": str(path), "OUT": str(tmp_path / "out.pt")}
    said = run(*[places.get(each, each) for each in arguments])
    assert said.exit_code == 2
    assert said.stderr.endswith("; the block has bytes of 'w1', 'w2'\n")


def test_merged_training_states(tmp_path: Path) -> None:
    model = torch.nn.Linear(300, 300)
    bytecheckpoint.save(tmp_path / "run", {"model": model}, "ddp", global_steps=1)
    (data,) = (tmp_path / "run").rglob("*.distcp")
    content = bytearray(data.read_bytes())
    content[8000] ^= 1
    data.write_bytes(content)
    for is_safetensors in (False, True):
        with pytest.raises(CorruptCheckpointError, match=r"; the block has bytes of 'weight'$"):
            bytecheckpoint.bytecheckpoint_ckpt_to_pytorch_ckpt(
                tmp_path / "run" / "global_step_1", tmp_path / "out", safetensors_format=is_safetensors
            )


def test_nothing_is_looked_up_where_nothing_fails_or_no_block_is_named(path: Path) -> None:
    checkpoint: Any = open_contents(str(path), config=Config(), kind=_core.Checkpoint).parts[0].checkpoint
    looked: list[str] = []

    class Watched:
        def chunks(self) -> Any:
            looked.append("chunks")
            return checkpoint.chunks()

        contents = staticmethod(checkpoint.contents)

    def fail(error: Exception) -> Callable[[], None]:
        def raised() -> None:
            raise error

        return raised

    watched: Any = Watched()
    with naming_keys(watched):
        pass
    other = CorruptCheckpointError("open(a): it is cut", "a")
    for error in (other, ValueError("read(a, offset=0, 1 bytes)")):
        with pytest.raises(type(error)), naming_keys(watched):
            fail(error)()
    assert (str(other), looked) == ("open(a): it is cut", [])
    block = CorruptCheckpointError(f"read(a/{KEYS}, offset=0, {1 << 30} bytes): damaged", "a/no such file")
    with pytest.raises(CorruptCheckpointError, match=r"damaged$"), naming_keys(watched):
        fail(block)()
    assert looked == ["chunks"]
