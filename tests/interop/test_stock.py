# SPDX-License-Identifier: Apache-2.0
"""Tests that there is no lock-in: our files are an ordinary DCP checkpoint, byte for byte where DCP reads."""

from __future__ import annotations

import dataclasses
import io
import pickle
import subprocess
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.equality import without_strides
from support.ranks import run_ranks
from support.sharded_states import full
from support.sharded_states import state as sharded_state
from support.training import Training
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from bytecheckpoint import BcpReader, BcpWriter, Config

SCRIPT = Path(__file__).with_name("no_bytecheckpoint.py")


def plain_state() -> dict[str, Any]:
    return {
        "z": full("z", (300, 7)),
        "a": full("a", (5, 3), torch.bfloat16).t(),
        "nested": {"deep": {"er": [full("list", (2, 2)), {"x": full("x", ())}]}, "n": 3},
        "empty": torch.empty(0, 4, dtype=torch.int16),
        "parameter": torch.nn.Parameter(full("parameter", (4,))),
        "large": full("large", (600_000,)),
        "channels_last": full("cl", (2, 3, 4, 5)).contiguous(memory_format=torch.channels_last),
        "objects": [1, 2.5, "text", None, True, b"bytes", (1, (2, "x")), {"k": [1]}, torch.Size([3])],
        "optimizer": {"param_groups": [{"lr": 0.1, "betas": (0.9, 0.95), "params": ["a", "b"]}]},
    }


def odd_keys() -> dict[str, Any]:
    """Returns keys that DCP flattens. Among them are int keys of nested dicts, which DCP cannot load back in place."""
    return {
        "state": {0: {"step": full("s0", ()), "m": full("m0", (3,))}, 10: {"step": 5}, 2: full("s2", (2,))},
        "tuple": (full("t0", (2,)), 1, "two"),
        "list of dicts": [{"x": 1}, {"y": full("y", (1,))}],
        "empty dict": {},
        "empty list": [],
        "\u00e4.\U0001f600": full("u", (2,)),
        "ordered": OrderedDict([("q", full("q", (1,))), ("p", 1)]),
        "a.b": 1,
    }


def save_fsdp(path: str, reference: str) -> None:
    training = Training(seed=3)
    training.step(2)
    dcp.save(training.state(), storage_writer=BcpWriter(path))
    whole = training.full_state()
    if dist.get_rank() == 0:
        torch.save(whole, reference)


def read_without_us(path: Path, reference: Path, scratch: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(path), str(reference), str(scratch)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_stock_reads_it_without_us(tmp_path: Path) -> None:
    state = plain_state()
    dcp.save(state, storage_writer=BcpWriter(tmp_path / "ckpt"))
    torch.save({k: v.detach() if k == "parameter" else v for k, v in state.items()}, tmp_path / "reference.pt")
    read_without_us(tmp_path / "ckpt", tmp_path / "reference.pt", tmp_path / "scratch.pt")


def test_stock_reads_fsdp_without_us(tmp_path: Path) -> None:
    run_ranks(4, save_fsdp, str(tmp_path / "ckpt"), str(tmp_path / "reference.pt"))
    read_without_us(tmp_path / "ckpt", tmp_path / "reference.pt", tmp_path / "scratch.pt")


def stock_part(path: Path) -> Any:
    with (path / ".metadata").open("rb") as file:
        return pickle.load(file)


def look_at(metadata: Metadata) -> None:
    """Reads every field: large ones are built on first access, and once all are built it is a plain Metadata."""
    for field in dataclasses.fields(metadata):
        getattr(metadata, field.name)


def assert_same_metadata(ours: Metadata, theirs: Metadata) -> None:
    """Compares every field except those that must differ: save id, file names, offsets and lengths."""
    look_at(ours)
    without_strides(theirs)
    assert ours.storage_data is not None
    assert type(ours) is Metadata
    assert vars(ours).keys() == vars(theirs).keys()
    assert list(ours.state_dict_metadata) == list(theirs.state_dict_metadata), "order of the keys"
    for key, wanted in theirs.state_dict_metadata.items():
        got = ours.state_dict_metadata[key]
        assert typed(got) == typed(wanted), key
    assert typed(ours.planner_data) == typed(theirs.planner_data)
    assert ours.storage_data.keys() == theirs.storage_data.keys()
    for index, wanted in theirs.storage_data.items():
        mine = next(key for key in ours.storage_data if key == index)
        theirs_index = next(key for key in theirs.storage_data if key == index)
        assert typed(mine) == typed(theirs_index)
        got = ours.storage_data[index]
        assert type(got) is type(wanted)
        blank = {"relative_path": "", "offset": 0, "length": 0}
        assert typed(dataclasses.replace(got, **blank)) == typed(dataclasses.replace(wanted, **blank)), index
        for name in blank:
            assert type(getattr(got, name)) is type(getattr(wanted, name))
    assert ours.storage_meta is not None
    assert ours.storage_meta.save_id is not None
    assert ours.storage_meta.save_id.startswith("bcp1-")
    assert typed(dataclasses.replace(ours.storage_meta, save_id="", load_id=None)) == typed(
        dataclasses.replace(theirs.storage_meta, save_id="")  # type: ignore[type-var]
    )
    assert ours.version == theirs.version


def typed(value: Any) -> Any:
    """Returns a value with the types of all its parts: 1 == True and torch.Size([1]) == (1,) would hide differences."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value), [(field.name, typed(getattr(value, field.name))) for field in dataclasses.fields(value)]
    if isinstance(value, dict):
        return type(value), [(typed(key), typed(part)) for key, part in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [typed(part) for part in value]
    return type(value), value


def assert_published(returned: Metadata, path: Path) -> None:
    """Fails unless both readers read what ``dcp.save`` returned."""
    for reader in (BcpReader(path), dcp.FileSystemReader(path)):
        read = reader.read_metadata()
        assert read.storage_meta is not None
        read.storage_meta.load_id = None  # each load has its own
        assert typed_metadata(read) == typed_metadata(without_strides(returned))


def typed_metadata(metadata: Metadata) -> Any:
    assert metadata.storage_data is not None
    look_at(metadata)
    fields = {**vars(metadata), "storage_data": None}
    places = {(index, index.index): typed(info) for index, info in metadata.storage_data.items()}
    return {name: typed(value) for name, value in fields.items()}, places


@pytest.mark.parametrize("make", [plain_state, odd_keys])
def test_metadata_of_one_process(tmp_path: Path, make: Any) -> None:
    path = tmp_path / "ckpt"
    dcp.save(make(), storage_writer=dcp.FileSystemWriter(path))
    theirs = stock_part(path)
    returned = dcp.save(make(), storage_writer=BcpWriter(path))
    assert_same_metadata(stock_part(path), theirs)
    assert_same_metadata(BcpReader(path).read_metadata(), theirs)
    assert_published(returned, path)


def save_by_both(path: str, kind: str) -> tuple[bytes, bytes]:
    if kind == "fsdp":
        training = Training(seed=3)
        training.step(1)
        state = training.state()
        assert any(isinstance(value, DTensor) for value in state["model"].values())
    else:
        state = {
            **sharded_state("saved", filled=True),
            "odd": odd_keys(),
            "mine": {str(dist.get_rank()): full("r", (2,))},
        }
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path))
    theirs = (Path(path) / ".metadata").read_bytes()
    dist.barrier()
    returned = dcp.save(state, storage_writer=BcpWriter(path, config=Config(planning="as given")))
    assert_published(returned, Path(path))
    return theirs, (Path(path) / ".metadata").read_bytes()


@pytest.mark.parametrize(("num_ranks", "kind"), [(2, "fsdp"), (4, "fsdp"), (3, "layouts"), (4, "layouts")])
def test_metadata_of_many_ranks(tmp_path: Path, num_ranks: int, kind: str) -> None:
    theirs, ours = run_ranks(num_ranks, save_by_both, str(tmp_path / "ckpt"), kind)[0]
    assert_same_metadata(pickle.loads(ours), pickle.loads(theirs))
    assert_same_metadata(BcpReader(tmp_path / "ckpt").read_metadata(), pickle.loads(theirs))
    assert_records_stand_alone(tmp_path / "ckpt")


def assert_records_stand_alone(path: Path) -> None:
    """Fails unless each tensor record, cut out of its file, is an archive; offsets and lengths mean what DCP means."""
    metadata = stock_part(path)
    for index, info in metadata.storage_data.items():
        with (path / info.relative_path).open("rb") as file:
            file.seek(info.offset)
            raw = file.read(info.length)
        entry = metadata.state_dict_metadata[index.fqn]
        if not isinstance(entry, TensorStorageMetadata):
            torch.load(io.BytesIO(raw), weights_only=True)
            continue
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            assert archive.testzip() is None
        tensor = torch.load(io.BytesIO(raw), weights_only=True)
        (chunk,) = [chunk for chunk in entry.chunks if chunk.offsets == index.offset and chunk.sizes == tensor.shape]
        assert type(tensor) is torch.Tensor
        assert tensor.dtype == entry.properties.dtype
        assert tensor.is_contiguous()
        assert not tensor.requires_grad
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize
        assert index == dataclasses.replace(index, offset=chunk.offsets)


def test_records_stand_alone(tmp_path: Path) -> None:
    dcp.save(plain_state(), storage_writer=BcpWriter(tmp_path))
    assert_records_stand_alone(tmp_path)
    metadata = stock_part(tmp_path)
    tensor_offsets = [
        info.offset for index, info in metadata.storage_data.items() if index.fqn in ("z", "large", "parameter")
    ]
    assert all(offset % 64 == 0 for offset in tensor_offsets)


def test_user_metadata_does_not_disturb_stock(tmp_path: Path) -> None:
    note = {"run": "x", "steps": [1, 2.5, None, "\u00e4"]}
    dcp.save({"a": torch.arange(3)}, storage_writer=BcpWriter(tmp_path, user_metadata=note))
    assert BcpReader(tmp_path).user_metadata == note
    got = {"a": torch.zeros(3, dtype=torch.int64)}
    dcp.load(got, storage_reader=dcp.FileSystemReader(tmp_path))
    assert torch.equal(got["a"], torch.arange(3))
