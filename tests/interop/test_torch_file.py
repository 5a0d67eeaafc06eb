# SPDX-License-Identifier: Apache-2.0
"""Loads of files that torch.save wrote: nested states of real models, views, objects, over ranks, and damaged."""

from __future__ import annotations

import argparse
import collections
import json
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from safetensors.torch import load_file
from support.ranks import run_ranks
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from bytecheckpoint import BcpReader, Config, LoadSpec, load_state_dict
from bytecheckpoint.checkpoint.verification import verify
from bytecheckpoint.cli.app import bcp
from bytecheckpoint.convert import convert
from bytecheckpoint.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsafeObjectError,
    UnsupportedError,
)
from bytecheckpoint.native import _C
from bytecheckpoint.transforms import Reshape, Transpose

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.bool, torch.complex64,
]  # fmt: skip


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, 32), 2, enable_nested_tensor=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 2, 16)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def views() -> dict[str, torch.Tensor]:
    base = torch.arange(60 * 40, dtype=torch.float32).reshape(60, 40)
    cube = torch.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5)
    return {
        "base": base,
        "tied": base,
        "turned": base.t(),
        "rows": base[3:17],
        "columns": base[:, 5:9],
        "spread": base[::7, 1::3],
        "permuted": cube.permute(3, 1, 0, 2),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "scalar": base[3, 4],
        "empty": torch.empty(0, 3),
        "parameter": torch.nn.Parameter(base),
    }


def blank(values: dict[str, Any]) -> dict[str, Any]:
    return {key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None for key, value in values.items()}


def assert_same(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert got.keys() == wanted.keys()
    for key, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert got[key].dtype == value.dtype, key
            same = [x.detach().contiguous().reshape(-1).view(torch.uint8) for x in (got[key], value)]
            assert torch.equal(*same), key
        else:
            assert got[key] == value, key
            assert type(got[key]) is type(value), key


def load_whole(path: Path, wanted: dict[str, Any]) -> None:
    got = blank(wanted)
    load_state_dict(path, got, no_dist=True)
    assert_same(got, wanted)


def test_a_training_state_with_names_and_paths_of_dcp(tmp_path: Path) -> None:
    model, optimizer = trained()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "rng": torch.get_rng_state()}
    torch.save(state, tmp_path / "model.pt")
    flat, mappings = flatten_state_dict(state)
    opened = _C.Checkpoint.open(str(tmp_path / "model.pt"))
    assert opened.planner_data == mappings
    load_whole(tmp_path / "model.pt", flat)
    # Nested, as scripts have it.
    torch.manual_seed(4)
    other = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, 32), 2, enable_nested_tensor=False)
    nested = {"model": other.state_dict(), "epoch": 0}
    dcp.load(nested, storage_reader=BcpReader(tmp_path / "model.pt"), no_dist=True)
    assert nested["epoch"] == 3
    assert_same(dict(other.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    wanted = {"a": torch.randn(7, 5).abs().to(dtype), "b": torch.ones((), dtype=dtype)}
    torch.save(wanted, tmp_path / "any_name")
    load_whole(tmp_path / "any_name", wanted)


def test_views_and_tied_weights(tmp_path: Path) -> None:
    wanted = views()
    torch.save(wanted, tmp_path / "views.pt")
    assert (tmp_path / "views.pt").stat().st_size < 2 * wanted["base"].nbytes
    load_whole(tmp_path / "views.pt", wanted)
    got = {"turned": torch.zeros(60, 40)}
    load_state_dict(tmp_path / "views.pt", got, no_dist=True, spec=LoadSpec(include="turned", transforms=[
        Transpose("turned", dim0=0, dim1=1)]))  # fmt: skip
    assert torch.equal(got["turned"], wanted["base"])
    got = {"columns": torch.zeros(240)}
    spec = LoadSpec(include="columns", transforms=[Reshape("columns", shape=[-1])])
    with pytest.raises(UnsupportedError, match=r"row-major.*") as caught:
        load_state_dict(tmp_path / "views.pt", got, no_dist=True, spec=spec)
    assert "views.pt" in str(caught.value)


def test_older_layouts_of_the_archive(tmp_path: Path) -> None:
    wanted = views()
    for protocol in (2, 4, 5):
        torch.save(wanted | {"text": "x" * 300}, tmp_path / "v.pt", pickle_protocol=protocol)
        load_whole(tmp_path / "v.pt", wanted | {"text": "x" * 300})
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(wanted, tmp_path / "v.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    load_whole(tmp_path / "v.pt", wanted)
    assert verify(tmp_path / "v.pt").bytes_unchecked > 0


def test_objects_load_and_classes_are_refused_when_asked_for(tmp_path: Path) -> None:
    shared = ["x", 1.5]
    wanted: dict[str, Any] = {
        "int": 3, "long": 2**80, "none": None, "text": "\u00e9" * 200, "bytes": b"\0" * 300, "flag": True,
        "betas": (0.9, 0.999), "list": [shared, shared], "set": {1, 2}, "size": torch.Size([1, 2]),
        "dtype": torch.bfloat16, "empty": [],
    }  # fmt: skip
    state = {
        **wanted,
        "w": torch.ones(3),
        "args": argparse.Namespace(lr=1),
        "counter": collections.Counter("aab"),
        "default": collections.defaultdict(list, k=[torch.zeros(2)]),
        "pair": (torch.ones(1), 2),
        "sparse": torch.eye(3).to_sparse(),
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "conj": torch.ones(2, dtype=torch.complex64).conj(),
        "wide": torch.ones(3, 1).expand(3, 4),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of quantized tensors
        torch.save(state, tmp_path / "s.pt")
    load_whole(tmp_path / "s.pt", {**wanted, "w": state["w"], "counter.a": 2, "default.k.0": torch.zeros(2)})
    with pytest.raises(UnsafeObjectError, match=r"'args'.*argparse\.Namespace"):
        load_state_dict(tmp_path / "s.pt", {"args": None}, no_dist=True)
    trusted = {"args": None}
    load_state_dict(tmp_path / "s.pt", trusted, no_dist=True, config=Config(allow_pickle=True))
    assert trusted["args"] == state["args"]
    for key, why in {
        "pair": "it holds tensors",
        "sparse": "_rebuild_sparse_tensor",
        "quantized": "_rebuild_qtensor",
        "conj": "conjugates",
        "wide": "share memory",
    }.items():
        target = torch.zeros_like(state[key]) if key in ("conj", "wide") else None
        with pytest.raises(UnsupportedError, match=rf"s\.pt.*'{key}' cannot be read.*{why}"):
            load_state_dict(tmp_path / "s.pt", {key: target}, no_dist=True)


def load_shards(path: str) -> int:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    wanted = views()
    got: dict[str, Any] = {}
    for dim in (0, 1):
        for key in ("base", "tied", "turned", "columns", "spread"):
            got[key] = distribute_tensor(torch.zeros(wanted[key].shape), mesh, [Shard(dim)])
        got["n"] = None
        dcp.load(got, storage_reader=BcpReader(path))
        assert got.pop("n") == 7
        for key, value in got.items():
            assert torch.equal(value.full_tensor(), wanted[key]), (key, dim)
    report = load_state_dict(path, {"base": distribute_tensor(torch.zeros(60, 40), mesh, [Shard(0)])})
    return report.bytes_wanted


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_ranks_fill_their_shards(tmp_path: Path, num_ranks: int) -> None:
    torch.save(views() | {"n": 7}, tmp_path / "v.pt")
    wanted = run_ranks(num_ranks, load_shards, str(tmp_path / "v.pt"))
    assert sum(wanted) == 60 * 40 * 4


def test_convert_to_safetensors_and_the_commands(tmp_path: Path) -> None:
    wanted = views()
    torch.save({"model": wanted, "epoch": 3}, tmp_path / "m.pt")
    convert(tmp_path / "m.pt", tmp_path / "out", spec=LoadSpec(include="model", rename={"model": ""}))
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), {k: v.detach() for k, v in wanted.items()})
    listed = CliRunner().invoke(bcp, ["ls", str(tmp_path / "m.pt"), "--json"])
    assert listed.exit_code == 0, listed.output
    assert {"model.turned", "epoch"} <= {item["name"] for item in json.loads(listed.output)["items"]}
    same = CliRunner().invoke(bcp, ["diff", str(tmp_path / "m.pt"), str(tmp_path / "m.pt")])
    assert same.exit_code == 0, same.output
    whole = CliRunner().invoke(bcp, ["verify", str(tmp_path / "m.pt")])
    assert whole.exit_code == 0, whole.output


def test_a_folder_of_hugging_face(tmp_path: Path) -> None:
    wanted = {f"layer.{i}": torch.randn(5, 3) for i in range(4)}
    torch.save(wanted, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text("{}")
    torch.save({"lr": 1}, tmp_path / "training_args.bin")
    load_whole(tmp_path, wanted)
    (tmp_path / "pytorch_model.bin").unlink()
    weight_map = {}
    for number, part in enumerate([dict(list(wanted.items())[:2]), dict(list(wanted.items())[2:])]):
        file = f"pytorch_model-{number + 1:05}-of-00002.bin"
        torch.save({key: value.t().contiguous().t() for key, value in part.items()}, tmp_path / file)
        weight_map |= dict.fromkeys(part, file)
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    load_whole(tmp_path, wanted)


def test_formats_of_torch_that_are_refused_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    torch.save({"w": torch.ones(3)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(UnsupportedError, match=r"m\.pt.*before torch 1\.6.*torch\.load"):
        load_whole(path, {"w": torch.ones(3)})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), path)
    with pytest.raises(UnsupportedError, match=r"TorchScript program.*torch\.jit\.load"):
        load_whole(path, {"weight": torch.ones(2, 2)})
    torch.save(torch.nn.Linear(2, 2), path)
    with pytest.raises(UnsupportedError, match=r"torch\.nn\.modules\.linear\.Linear, not a dict"):
        load_whole(path, {"weight": torch.ones(2, 2)})
    torch.save(torch.ones(3), path)
    with pytest.raises(UnsupportedError, match="a tensor, not a dict"):
        load_whole(path, {"w": torch.ones(3)})
    path.write_bytes(b"no such thing")
    with pytest.raises(CheckpointNotFoundError):
        load_whole(path, {"w": torch.ones(3)})
    torch.save({"w": torch.ones(3)}, path)
    with zipfile.ZipFile(path) as archive:
        entries = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    for changed, message in [
        ({name: b"big" if name.endswith("byteorder") else data for name, data in entries.items()}, "byte order"),
        ({name: data for name, data in entries.items() if not name.endswith("data/0")}, "no storage '0'.*'w'"),
    ]:
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in changed.items():
                archive.writestr(name, data)
        with pytest.raises(CheckpointError, match=message):
            load_whole(path, {"w": torch.ones(3)})
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    with pytest.raises(UnsupportedError, match="compressed"):
        load_whole(path, {"w": torch.ones(3)})


def test_damage(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    wanted = {"w": torch.randn(300, 30), "v": torch.randn(5)}
    torch.save(wanted, path)
    whole = path.read_bytes()
    at = whole.find(wanted["w"].numpy().tobytes())
    path.write_bytes(whole[: at + 9] + bytes([whole[at + 9] ^ 1]) + whole[at + 10 :])
    with pytest.raises(CorruptCheckpointError, match=rf"m\.pt, offset={at}"):
        load_whole(path, wanted)
    report = verify(path)
    assert [problem.fqns for problem in report.problems] == [["w"]]
    assert report.problems[0].offset == at
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CorruptCheckpointError, match="does not end as one"):
        load_whole(path, wanted)
    assert [problem.file for problem in verify(path).problems] == ["m.pt"]


def save_replicated(path: str, values: torch.Tensor) -> None:
    mesh = init_device_mesh("cpu", (1,))
    torch.save({"model": {"w": distribute_tensor(values, mesh, [Shard(0)])}}, path)


@pytest.mark.parametrize("kind", ["dtensor", "sparse", "quantized", "conjugate", "in a tuple", "in an object"])
def test_verify_looks_at_the_bytes_of_what_no_load_can_read(tmp_path: Path, kind: str) -> None:
    path, values = tmp_path / "m.pt", torch.arange(1.0, 301.0)
    bits = values.numpy().tobytes()
    if kind == "dtensor":
        run_ranks(1, save_replicated, str(path), values)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of quantized tensors
            quantized = torch.quantize_per_tensor(values, 2.0, 0, torch.qint8)
            state = {
                "sparse": values.to_sparse(),
                "quantized": quantized,
                "conjugate": values.view(torch.complex64).conj(),
                "in a tuple": (values, 2),
                "in an object": argparse.Namespace(w=values),
            }[kind]
            torch.save({"model": {"w": state}}, path)
            bits = quantized.int_repr().numpy().tobytes() if kind == "quantized" else bits
    assert verify(path).problems == []
    whole = path.read_bytes()
    at = whole.index(bits)
    path.write_bytes(whole[: at + 9] + bytes([whole[at + 9] ^ 1]) + whole[at + 10 :])
    (problem,) = verify(path).problems
    assert (problem.file, problem.offset) == ("m.pt", at)
    done = CliRunner().invoke(bcp, ["verify", str(path)])
    assert done.exit_code == 1, done.output
    assert "m.pt" in done.output
