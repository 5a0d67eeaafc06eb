# SPDX-License-Identifier: Apache-2.0
"""Loads of safetensors that the library, DCP and transformers wrote: whole, by boxes, over ranks, and damaged."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from support.ranks import failures, run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import bytecheckpoint as bcp
from bytecheckpoint import BcpReader, LoadSpec, load_state_dict
from bytecheckpoint.errors import CheckpointNotFoundError, CorruptCheckpointError, KeyMismatchError, UnsupportedError

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    torch.bool, torch.complex64,
]  # fmt: skip


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    values = {str(dtype)[6:]: torch.randn(7, 5, generator=generator).abs().to(dtype) for dtype in DTYPES}
    return values | {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 3), "big": torch.randn(700, 400)}


def zeros(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: torch.zeros_like(value) for key, value in values.items()}


def assert_same(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for key, value in wanted.items():
        assert torch.equal(got[key].reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)), key


def in_shards(folder: Path, values: dict[str, torch.Tensor], num_files: int) -> None:
    """Writes a model as Hugging Face does: numbered files and an index."""
    names = sorted(values)
    weight_map = {}
    for number in range(num_files):
        file = f"model-{number + 1:05}-of-{num_files:05}.safetensors"
        of_file = {name: values[name] for name in names[number::num_files]}
        save_file(of_file, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(of_file, file)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_a_file_with_every_dtype(tmp_path: Path) -> None:
    wanted = tensors()
    save_file(wanted, tmp_path / "model.safetensors", metadata={"format": "pt", "by": "\u00e9"})
    for path in (tmp_path, tmp_path / "model.safetensors"):
        got = zeros(wanted)
        dcp.load(got, storage_reader=BcpReader(path), no_dist=True)
        assert_same(got, wanted)
    assert BcpReader(tmp_path).user_metadata == {"format": "pt", "by": "\u00e9"}


def test_a_folder_with_an_index_by_each_of_our_calls(tmp_path: Path) -> None:
    wanted = tensors()
    in_shards(tmp_path, wanted, 3)
    got = zeros(wanted)
    report = load_state_dict(tmp_path, got, no_dist=True)
    assert_same(got, wanted)
    assert report.num_files == 3
    got = zeros(wanted)
    with bcp.registered():
        dcp.load(got, checkpoint_id=tmp_path, no_dist=True)
    assert_same(got, wanted)


@pytest.mark.parametrize("shards", ["whole", "removed", "index damaged"])
def test_one_file_beside_an_index_of_others(tmp_path: Path, shards: str) -> None:
    """Transformers takes the file. ``save_pretrained`` into a folder that had shards leaves their index."""
    wanted = {"a": torch.ones(3), "b": torch.ones(4)}
    in_shards(tmp_path, {name: 2 * value for name, value in wanted.items()}, 2)
    save_file(wanted, tmp_path / "model.safetensors")
    if shards == "removed":
        for file in tmp_path.glob("model-*"):
            file.unlink()
    if shards == "index damaged":
        (tmp_path / "model.safetensors.index.json").write_text("{")
    got = zeros(wanted)
    said = "model.safetensors is read, and not the files that model.safetensors.index.json beside it names"
    with pytest.warns(RuntimeWarning, match=said):
        load_state_dict(tmp_path, got, no_dist=True)
    assert_same(got, wanted)
    if shards == "whole":
        load_state_dict(tmp_path / "model.safetensors.index.json", got, no_dist=True)
        assert_same(got, {name: 2 * value for name, value in wanted.items()})


def test_an_index_that_names_its_namesake(tmp_path: Path) -> None:
    wanted = {"a": torch.ones(3)}
    save_file(wanted, tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model.safetensors"}}')
    got = zeros(wanted)
    load_state_dict(tmp_path, got, no_dist=True)
    assert_same(got, wanted)


def test_what_dcps_own_writer_wrote(tmp_path: Path) -> None:
    writer = pytest.importorskip("torch.distributed.checkpoint.hf_storage").HuggingFaceStorageWriter
    wanted = {key: value for key, value in tensors().items() if key in ("float32", "bfloat16", "big")}
    dcp.save(wanted, storage_writer=writer(str(tmp_path)), no_dist=True)
    got = zeros(wanted)
    load_state_dict(tmp_path, got, no_dist=True)
    assert_same(got, wanted)


def test_the_cache_of_hugging_face(tmp_path: Path) -> None:
    wanted = tensors()
    in_shards(tmp_path, wanted, 2)
    snapshot, blobs = tmp_path / "models--x/snapshots/0a1b", tmp_path / "models--x/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(tmp_path.glob("model*"))):
        if file.is_file():
            shutil.move(file, blobs / f"digest{number}")
            (snapshot / file.name).symlink_to(f"../../blobs/digest{number}")
    got = zeros(wanted)
    load_state_dict(snapshot, got, no_dist=True)
    assert_same(got, wanted)


def load_shards(path: str, expected: dict[str, torch.Tensor]) -> dict[str, int]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: dict[str, Any] = {
        "rows": distribute_tensor(torch.zeros(700, 400), mesh, [Shard(0)]),
        "columns": distribute_tensor(torch.zeros(700, 400), mesh, [Shard(1)]),
        "whole": torch.zeros(7, 5),
    }
    spec = LoadSpec(include=["big", "float32"], rename={"float32": "whole", "big": "rows"})
    load_state_dict(path, {key: state[key] for key in ("rows", "whole")}, spec=spec)
    report = load_state_dict(
        path, {"columns": state["columns"]}, spec=LoadSpec(include="big", rename={"big": "columns"})
    )
    assert torch.equal(state["rows"].full_tensor(), expected["big"])
    assert torch.equal(state["columns"].full_tensor(), expected["big"])
    assert torch.equal(state["whole"], expected["float32"])
    return {"wanted": report.bytes_wanted, "read": report.bytes_read, "received": report.bytes_received}


@pytest.mark.parametrize("num_ranks", [1, 3, 4])
def test_ranks_fill_their_shards(tmp_path: Path, num_ranks: int) -> None:
    wanted = tensors()
    in_shards(tmp_path, wanted, 2)
    figures = run_ranks(num_ranks, load_shards, str(tmp_path), wanted)
    assert sum(figure["wanted"] for figure in figures) == wanted["big"].nbytes


def damaged(whole: bytes) -> dict[str, bytes]:
    (length,) = struct.unpack("<Q", whole[:8])
    header = json.loads(whole[8 : 8 + length])
    first, second = sorted(header, key=lambda name: header[name]["data_offsets"])[:2]
    overlapping = {**header, second: {**header[second], "data_offsets": header[first]["data_offsets"]}}
    again = json.dumps(overlapping).encode().ljust(length)
    return {
        "cut": whole[:-1],
        "cut in the header": whole[:20],
        "empty": b"",
        "longer": whole + b"x",
        "header of gigabytes": struct.pack("<Q", 1 << 40) + whole[8:],
        "no JSON": whole[:8] + b"x" * length + whole[8 + length :],
        "overlap": struct.pack("<Q", len(again)) + again + whole[8 + length :],
    }


KINDS = [*damaged(struct.pack("<Q", 130) + json.dumps({k: {"data_offsets": [0, 1]} for k in "ab"}).encode().ljust(130))]


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_told_before_a_tensor_is_touched(tmp_path: Path, kind: str) -> None:
    wanted = {"a": torch.ones(300), "b": torch.ones(300)}
    path = tmp_path / "model.safetensors"
    save_file(wanted, path)
    path.write_bytes(damaged(path.read_bytes())[kind])
    got = zeros(wanted)
    with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors"):
        load_state_dict(tmp_path, got, no_dist=True)
    assert not any(value.any() for value in got.values())


def test_a_missing_file_and_a_missing_key(tmp_path: Path) -> None:
    wanted = tensors()
    in_shards(tmp_path, wanted, 3)
    with pytest.raises(KeyMismatchError, match="'absent'"):
        load_state_dict(tmp_path, {**zeros(wanted), "absent": torch.zeros(1)}, no_dist=True)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"model-00002-of-00003\.safetensors"):
        load_state_dict(tmp_path, zeros(wanted), no_dist=True)
    with pytest.raises(CheckpointNotFoundError):
        load_state_dict(tmp_path / "absent", zeros(wanted), no_dist=True)


def test_every_rank_gets_the_error(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"12345678{")
    for kind, text in run_ranks(2, try_to_load, str(tmp_path)):
        assert kind == "CorruptCheckpointError", text


def try_to_load(path: str) -> tuple[str, str]:
    failed = failures(lambda: dcp.load({"a": torch.zeros(1)}, storage_reader=BcpReader(path)))
    error = next(iter(failed.values()))
    return type(error).__name__, str(error)


def test_dtypes_that_torch_lacks(tmp_path: Path) -> None:
    header = json.dumps({"w": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}).encode()
    (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(3))
    with pytest.raises(UnsupportedError, match=r"'w'.*F6_E2M3"):
        load_state_dict(tmp_path, {"w": torch.zeros(4)}, no_dist=True)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt_oss"])
def test_models_of_transformers(tmp_path: Path, family: str) -> None:
    transformers = pytest.importorskip("transformers")
    small = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 128, "head_dim": 8,
    }  # fmt: skip
    kinds = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {}),
        "qwen3_moe": (
            transformers.Qwen3MoeConfig,
            transformers.Qwen3MoeForCausalLM,
            {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        ),
        "gpt_oss": (transformers.GptOssConfig, transformers.GptOssForCausalLM, {"num_local_experts": 4}),
    }
    config, model_class, more = kinds[family]
    model = model_class(config(**small, **more))
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len([*tmp_path.glob("*.safetensors")]) > 1
    wanted = model_class.from_pretrained(tmp_path).state_dict()
    with (tmp_path / "model.safetensors.index.json").open() as file:
        names = json.load(file)["weight_map"].keys()
    same = {name: value for name, value in wanted.items() if name in names}
    got = zeros(same)
    load_state_dict(tmp_path, got, no_dist=True)
    assert_same(got, same)
    if family == "qwen3_moe" and not same.keys() >= wanted.keys():
        check_stacked_experts(tmp_path, wanted)


def check_stacked_experts(path: Path, wanted: dict[str, torch.Tensor]) -> None:
    """The model has its experts in one tensor each, the files one by one."""
    key = "model.layers.0.mlp.experts.down_proj"
    got = torch.zeros_like(wanted[key])
    spec = LoadSpec(
        include="model.layers.0.mlp.experts.{i}.down_proj.weight",
        transforms=bcp.transforms.Stack("model.layers.0.mlp.experts.{i}.down_proj.weight", key),
    )
    load_state_dict(path, {key: got}, no_dist=True, spec=spec)
    assert torch.equal(got, wanted[key])
