# SPDX-License-Identifier: Apache-2.0
"""Reads what Orbax writes without OCDBT: arrays of zarr 2 and 3, packed by zstd."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from support.goldens import GOLDEN
from support.orbax_folder import packed, write_orbax
from support.peak_memory import with_peak

import bytecheckpoint
from bytecheckpoint import BcpReader
from bytecheckpoint.convert import convert
from bytecheckpoint.errors import (
    CheckpointChangedError,
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsupportedError,
)

ROOT = GOLDEN / "orbax-0.12.8"
KINDS = ["zarr2", "zarr3", "chunked"]
OBJECTS = {"empty": {}, "name": "golden", "none": None}


def wanted(kind: str) -> dict[str, torch.Tensor]:
    tensors = load_file(ROOT / kind / "expected.safetensors")
    return {**tensors, "rate": torch.tensor(0.25, dtype=torch.float64), "step": torch.tensor(7)}


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_and_objects(kind: str) -> None:
    stored = bytecheckpoint.read(ROOT / kind / "checkpoint")
    tensors = wanted(kind)
    assert {*stored} == {*tensors, *OBJECTS}
    for name, value in tensors.items():
        assert stored[name].dtype == value.dtype, name
        assert torch.equal(stored[name], value), name
    assert {name: stored[name] for name in OBJECTS} == OBJECTS


@pytest.mark.parametrize("kind", KINDS)
def test_nested_states_and_any_mesh(kind: str) -> None:
    tensors = wanted(kind)
    state = {
        "params": {"dense": {"kernel": torch.zeros(8, 6)}, "half": torch.zeros(4, 6, dtype=torch.bfloat16)},
        "layers": [{"weight": torch.zeros(2, 2)}, {"weight": torch.zeros(2, 2)}],
        "name": "",
    }
    dcp.load(state, storage_reader=BcpReader(ROOT / kind / "checkpoint"), no_dist=True)
    assert torch.equal(state["params"]["dense"]["kernel"], tensors["params.dense.kernel"])
    assert torch.equal(state["params"]["half"], tensors["params.half"])
    assert torch.equal(state["layers"][1]["weight"], tensors["layers.1.weight"])
    assert state["name"] == "golden"


@pytest.mark.parametrize("kind", KINDS)
def test_conversions(kind: str, tmp_path: Path) -> None:
    source = ROOT / kind / "checkpoint"
    spec = bytecheckpoint.LoadSpec(exclude=[*OBJECTS])
    convert(source, tmp_path / "hf", to="safetensors", spec=spec)
    (written,) = (tmp_path / "hf").glob("*.safetensors")
    got, tensors = load_file(written), wanted(kind)
    assert {*got} == {*tensors}
    assert all(torch.equal(got[name], value) for name, value in tensors.items())
    convert(source, tmp_path / "ours", to="bcp")
    assert not bytecheckpoint.verify(tmp_path / "ours").problems
    assert bytecheckpoint.read(tmp_path / "ours")["name"] == "golden"


def test_verify_says_what_has_no_checksum() -> None:
    report = bytecheckpoint.verify(ROOT / "zarr3" / "checkpoint")
    assert not report.problems
    assert report.bytes_checked == 0
    assert report.bytes_unchecked == sum(value.nbytes for value in wanted("zarr3").values())


def flip_index(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-6] ^= 1
    path.write_bytes(content)


FAULTS: list[tuple[str, str, Callable[[Path], object], str]] = [
    ("zarr2", "params.half/1.0", Path.unlink, r"chunk \[1, 0\] of 'params.half' is missing"),
    ("zarr2", "params.half/.zarray", Path.unlink, "the array 'params.half' is missing"),
    ("zarr2", "params.half/1.0", lambda path: path.write_bytes(b"x" * 21), "zstd cannot unpack it"),
    (
        "zarr2",
        "params.half/1.0",
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        "unpacks it to 11 bytes, wanted 12",
    ),
    ("zarr2", "params.half/1.0", lambda path: path.write_bytes(packed(bytes(13))), "more than 12 bytes"),
    ("zarr2", "params.half/1.0", lambda path: path.write_bytes(packed(bytes(11))), "unpacks it to 11 bytes, wanted 12"),
    ("zarr3", "params.half/c/1/0", flip_index, "the index has CRC-32C"),
    ("zarr3", "params.half/c/1/0", lambda path: path.write_bytes(b"x" * 9), "too few for an index of 20"),
    ("zarr3", "_METADATA", lambda path: path.write_bytes(b"{"), "JSON"),
    ("zarr3", "_strings.json", lambda path: path.write_bytes(b"{}"), "no string 'name'"),
]


@pytest.mark.parametrize(("kind", "name", "damage", "what"), FAULTS)
def test_damage(kind: str, name: str, damage: Callable[[Path], object], what: str, tmp_path: Path) -> None:
    source = tmp_path / "checkpoint"
    shutil.copytree(ROOT / kind / "checkpoint", source)
    damage(source / name)
    with pytest.raises(CorruptCheckpointError, match=what) as error:
        convert(source, tmp_path / "out", to="bcp")
    assert name.rpartition("/")[0] in str(error.value)
    assert not (tmp_path / "out").exists()
    report = bytecheckpoint.verify(source)
    assert report.problems


@pytest.mark.parametrize("flag", [False, None])
def test_a_missing_chunk_that_may_be_of_fill_values(flag: bool | None, tmp_path: Path) -> None:
    """A checkpoint that need not store these is not damaged, but nobody can tell what is missing."""
    source = write_orbax(tmp_path / "source", {"w": torch.ones(4, 4)}, (2, 4))
    described = json.loads((source / "_METADATA").read_text())
    described["store_array_data_equal_to_fill_value"] = flag
    (source / "_METADATA").write_text(json.dumps(described))
    assert torch.equal(bytecheckpoint.read(source)["w"], torch.ones(4, 4))
    (source / "w" / "1.0").unlink()
    with pytest.raises(UnsupportedError, match=r"chunk \[1, 0\] of 'w' is missing: it is lost, or had the fill value"):
        bytecheckpoint.read(source)


def test_a_database_is_named(tmp_path: Path) -> None:
    for path in (ROOT / "ocdbt" / "checkpoint", ROOT / "manager" / "checkpoint" / "1" / "state"):
        with pytest.raises(
            CheckpointNotFoundError, match="OCDBT database, which is not read here: restore it by Orbax"
        ):
            bytecheckpoint.read(path)
    with pytest.raises(CheckpointNotFoundError, match="a step of Orbax"):
        bytecheckpoint.read(ROOT / "manager" / "checkpoint" / "1")
    shutil.copytree(ROOT / "zarr3" / "checkpoint", tmp_path / "step" / "a")
    assert "name" in bytecheckpoint.read(tmp_path / "step")
    shutil.copytree(ROOT / "zarr3" / "checkpoint", tmp_path / "step" / "b")
    with pytest.raises(UnsupportedError, match="checkpoints of Orbax in a and b: pass the folder of one"):
        bytecheckpoint.read(tmp_path / "step")


def test_chunks_that_stick_out(tmp_path: Path) -> None:
    """The last chunks of a dim are as large as all others."""
    whole = torch.arange(5 * 7, dtype=torch.float32).view(5, 7)
    source = write_orbax(tmp_path / "source", {"w": whole, "none": torch.zeros(0, 3)}, (2, 4))
    stored = bytecheckpoint.read(source)
    assert torch.equal(stored["w"], whole)
    assert stored["none"].shape == (0, 3)
    convert(source, tmp_path / "hf")
    assert torch.equal(load_file(tmp_path / "hf" / "model.safetensors")["w"], whole)


def test_a_large_chunk_takes_little_memory(tmp_path: Path) -> None:
    """Two chunks of 128 MiB beside one another: each row is in both."""
    rows, columns = 8192, 4096
    whole = torch.arange(2 * rows * columns, dtype=torch.float32).view(rows, 2 * columns)
    source = write_orbax(tmp_path / "source", {"w": whole}, (rows, columns))
    convert(source, tmp_path / "first")
    shutil.rmtree(tmp_path / "first")
    _, peak = with_peak(lambda: convert(source, tmp_path / "hf"))
    assert peak <= 64 << 20
    assert torch.equal(load_file(tmp_path / "hf" / "model.safetensors")["w"], whole)


def test_workers_and_file_systems_in_memory(tmp_path: Path) -> None:
    """Processes that share the work each unpack what they write; memory is read without a pipeline."""
    whole = torch.arange(600 * 512, dtype=torch.float32).view(600, 512)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        for folder in (tmp_path, Path(memory)):
            source = write_orbax(folder / "source", {"w": whole}, (200, 256))
            convert(source, folder / "hf", workers=2, shard_size="400KB")
            assert torch.equal(bytecheckpoint.read(folder / "hf")["w"], whole)
            assert torch.equal(bytecheckpoint.read(source)["w"], whole)


def test_a_source_that_changes(tmp_path: Path) -> None:
    """What was opened is what is read, or an error."""
    source = write_orbax(tmp_path / "source", {"w": torch.ones(4, 4)}, (2, 4))
    stored = bytecheckpoint.read(source)
    (source / "w" / "1.0").write_bytes(packed(torch.zeros(2, 4).numpy().tobytes()))
    with pytest.raises(CheckpointChangedError, match=r"w/1\.0"):
        stored["w"]


def test_another_codec(tmp_path: Path) -> None:
    """A codec that is not read is named before anything is written."""
    source = tmp_path / "checkpoint"
    shutil.copytree(ROOT / "zarr2" / "checkpoint", source)
    described = json.loads((source / "params.half" / ".zarray").read_text())
    described["compressor"] = {"id": "blosc", "cname": "lz4"}
    (source / "params.half" / ".zarray").write_text(json.dumps(described))
    with pytest.raises(CheckpointError, match="compressor 'blosc', which is not read here"):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
