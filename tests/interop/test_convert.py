# SPDX-License-Identifier: Apache-2.0
"""Conversions to safetensors: any source, cast, renamed, by several processes, killed and resumed, refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from support.killed_conversions import SHARD_BYTES, kill_a_conversion
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from bytecheckpoint import LoadSpec, load_state_dict, save_state_dict
from bytecheckpoint.cli.app import bcp
from bytecheckpoint.convert import convert
from bytecheckpoint.convert.conversion import Format, parsed_size
from bytecheckpoint.errors import (
    CheckpointBusyError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    UnsupportedError,
)
from bytecheckpoint.native import _core
from bytecheckpoint.transforms import Stack, Transpose


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(9)
    return {
        "embed": torch.randn(1000, 300, generator=generator),
        "half": torch.randn(64, 3, generator=generator).to(torch.bfloat16),
        "int": torch.arange(17),
        "flag": torch.tensor([True, False]),
        "e.0": torch.randn(5, 7, generator=generator),
        "e.1": torch.randn(5, 7, generator=generator),
        "scalar": torch.tensor(1.5),
        "empty": torch.zeros(0, 4),
    }


def all_in(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def read(path: Path) -> dict[str, torch.Tensor]:
    """Loads all tensors of anything through the reader."""
    got = {
        name: torch.zeros(shape, dtype=getattr(torch, dtype))
        for name, dtype, shape, *_ in _core.Checkpoint.open(str(path)).contents()
        if dtype is not None
    }
    load_state_dict(path, got, no_dist=True, spec=LoadSpec(include=[*got]))
    return got


def assert_same(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for key, value in wanted.items():
        assert got[key].dtype == value.dtype, key
        assert torch.equal(got[key], value), key


def save_sharded(path: str, columns: bool) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state: dict[str, Any] = tensors()
    state["embed"] = distribute_tensor(state["embed"], mesh, [Shard(1 if columns else 0)])
    save_state_dict(path, state)


@pytest.mark.parametrize("columns", [False, True])
def test_a_sharded_checkpoint_of_ours(tmp_path: Path, columns: bool) -> None:
    run_ranks(3, save_sharded, str(tmp_path / "ckpt"), columns)
    told: list[tuple[int, int]] = []
    report = convert(tmp_path / "ckpt", tmp_path / "hf", verify=True, progress=lambda *now: told.append(now))
    assert_same(all_in(tmp_path / "hf"), tensors())
    assert [*(tmp_path / "hf").iterdir()] == [tmp_path / "hf/model.safetensors"]
    assert report.num_tensors == len(tensors())
    assert report.is_verified
    assert told[-1] == (report.num_bytes, report.num_bytes)
    assert report.num_bytes == (tmp_path / "hf/model.safetensors").stat().st_size


def test_stock_dcp_and_back_again(tmp_path: Path) -> None:
    dcp.save(tensors(), storage_writer=dcp.FileSystemWriter(tmp_path / "stock"), no_dist=True)
    convert(tmp_path / "stock", tmp_path / "hf", shard_size="1MB")
    assert len([*(tmp_path / "hf").glob("*.safetensors")]) == 3
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors().keys()
    assert_same(all_in(tmp_path / "hf"), tensors())
    convert(tmp_path / "hf", tmp_path / "again", dtype="float16")
    wanted = {k: v.half() if v.is_floating_point() else v for k, v in tensors().items()}
    assert_same(all_in(tmp_path / "again"), wanted)
    got = {key: torch.zeros_like(value) for key, value in wanted.items()}
    load_state_dict(tmp_path / "again", got, no_dist=True)
    assert_same(got, wanted)


def test_a_spec_and_several_workers(tmp_path: Path) -> None:
    save_state_dict(tmp_path / "ckpt", {"model": tensors(), "step": 3}, no_dist=True)
    spec = LoadSpec(
        include="model",
        rename={"model": ""},
        transforms=[Stack("model.e.{i}", "model.e"), Transpose("model.embed")],
    )
    told: list[int] = []
    report = convert(
        tmp_path / "ckpt", tmp_path / "hf", spec=spec, dtype="bfloat16", shard_size=200_000, workers=2,
        verify=True, progress=lambda done, total: told.append(done),
    )  # fmt: skip
    wanted = {k: v for k, v in tensors().items() if not k.startswith("e.")}
    wanted |= {"e": torch.stack([tensors()["e.0"], tensors()["e.1"]]), "embed": tensors()["embed"].T}
    assert_same(
        all_in(tmp_path / "hf"), {k: v.bfloat16() if v.dtype == torch.float32 else v for k, v in wanted.items()}
    )
    assert report.num_files > 1
    assert report.num_cast == 4
    assert told == sorted(told)


@pytest.mark.parametrize("to", ["safetensors", "bcp", "dcp", "torch"])
def test_some_tensors_have_a_dtype_of_their_own(tmp_path: Path, to: Format) -> None:
    """A router's bias stays float32 in an export in bfloat16; the first pattern that matches counts."""
    state = {
        "h": {str(i): {"w": torch.randn(6), "router": {"bias": torch.randn(3)}} for i in range(2)},
        "A_log": torch.randn(4, dtype=torch.float64),
        "ids": torch.arange(5),
    }
    save_state_dict(tmp_path / "ckpt", state, no_dist=True)
    casts = {"layers.*.bias": "float32", "*.bias": "float16", "A_log": torch.float32}
    spec = LoadSpec(rename={"h": "layers"}, cast=casts)
    with pytest.raises(ConfigError, match="no tensor of 16 to 64-bit floats has a name like it, or an earlier pattern"):
        convert(tmp_path / "ckpt", tmp_path / "out", to=to, spec=spec, dtype="bfloat16")
    spec = LoadSpec(rename=spec.rename, cast={"layers.*.bias": "float32", "A_log": torch.float32})
    report = convert(tmp_path / "ckpt", tmp_path / "out", to=to, spec=spec, dtype="bfloat16", verify=True)
    assert (report.num_cast, report.num_values_cast) == (3, 2 * 6 + 4)
    assert "3 cast: 16 values" in report.summary()
    got = {
        name: torch.zeros_like(value, dtype=dtype)
        for i in range(2)
        for name, value, dtype in (
            (f"layers.{i}.w", state["h"][str(i)]["w"], torch.bfloat16),
            (f"layers.{i}.router.bias", state["h"][str(i)]["router"]["bias"], torch.float32),
            ("A_log", state["A_log"], torch.float32),
            ("ids", state["ids"], torch.int64),
        )
    }
    load_state_dict(tmp_path / "out", got, no_dist=True)  # refuses other dtypes
    assert torch.equal(got["layers.1.router.bias"], state["h"]["1"]["router"]["bias"])
    assert torch.equal(got["layers.1.w"], state["h"]["1"]["w"].bfloat16())
    assert torch.equal(got["A_log"], state["A_log"].float())
    with pytest.raises(ConfigError, match="dtype 'int8': must be one of"):
        convert(tmp_path / "ckpt", tmp_path / "other", to=to, spec=LoadSpec(cast={"ids": "int8"}))


@pytest.mark.parametrize("to", ["safetensors", "bcp", "dcp"])
def test_a_killed_conversion_goes_on_where_it_was(tmp_path: Path, to: Format) -> None:
    wanted = {f"w{i}": torch.full((50,), float(i)) for i in range(4)}
    save_state_dict(tmp_path / "ckpt", wanted, no_dist=True)
    target = tmp_path / "hf"
    kill_a_conversion(tmp_path / "ckpt", target, to)
    with pytest.raises(CheckpointExistsError, match="--resume"):
        convert(tmp_path / "ckpt", target, to=to, shard_size=SHARD_BYTES)
    with pytest.raises(ConfigError, match="other arguments"):
        convert(tmp_path / "ckpt", target, to=to, shard_size=SHARD_BYTES, dtype="bfloat16", resume=True)
    report = convert(tmp_path / "ckpt", target, to=to, shard_size=SHARD_BYTES, resume=True, verify=True)
    assert report.num_resumed == 2
    assert_same(read(target), wanted)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt", "hf"]
    with pytest.raises(CheckpointExistsError, match="in place"):
        convert(tmp_path / "ckpt", target, resume=True)


@pytest.mark.parametrize("was_verified", [False, True])
def test_files_of_an_earlier_run_are_verified_or_written_again(tmp_path: Path, was_verified: bool) -> None:
    wanted = {f"w{i}": torch.full((50,), float(i)) for i in range(4)}
    save_state_dict(tmp_path / "ckpt", wanted, no_dist=True)
    kill_a_conversion(tmp_path / "ckpt", tmp_path / "hf", verify=was_verified)
    written = sorted((tmp_path / ".hf.converting").glob("*.safetensors"))
    content = bytearray(written[0].read_bytes())
    content[-2] ^= 1
    written[0].write_bytes(content)
    report = convert(tmp_path / "ckpt", tmp_path / "hf", shard_size=SHARD_BYTES, resume=True, verify=True)
    assert report.num_resumed == (1 if was_verified else 0)
    assert_same(read(tmp_path / "hf"), wanted)
    assert not [*(tmp_path / "hf").glob("*.crc")]


def test_one_that_is_interrupted_while_it_is_published_is_not_taken_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("one", 1.0), ("two", 2.0)):
        save_state_dict(tmp_path / name, {"w": torch.full((3,), value)}, no_dist=True)

    def interrupt(path: Path) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("bytecheckpoint.convert.local_destination.made_folder", interrupt)
        with pytest.raises(KeyboardInterrupt):
            convert(tmp_path / "one", tmp_path / "hf")
    for again in (False, True):
        with pytest.raises((CheckpointExistsError, ConfigError)):
            convert(tmp_path / "two", tmp_path / "hf", resume=again)
    (tmp_path / ".hf.converting/conversion.json").unlink()
    with pytest.raises(ConfigError, match="another source"):
        convert(tmp_path / "two", tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def convert_together(folder: str, fails: bool) -> None:
    """All ranks convert; a rank that finds damage makes all of them fail."""
    group = dist.group.WORLD
    if fails:
        with pytest.raises(CorruptCheckpointError):
            convert(f"{folder}/ckpt", f"{folder}/hf", shard_size=300_000, process_group=group)
        assert not Path(folder, "hf").exists()
        return
    report = convert(f"{folder}/ckpt", f"{folder}/hf", shard_size=300_000, process_group=group, verify=True)
    assert report.num_files == 5
    with pytest.raises(CheckpointExistsError):
        convert(f"{folder}/ckpt", f"{folder}/hf", process_group=group)


@pytest.mark.parametrize("fails", [False, True])
def test_ranks_share_the_files(tmp_path: Path, fails: bool) -> None:
    wanted = {f"w{i}": torch.full((250, 300), float(i)) for i in range(5)}
    save_state_dict(tmp_path / "ckpt", wanted, no_dist=True)
    if fails:
        (file,) = (tmp_path / "ckpt").glob("*.distcp")
        content = bytearray(file.read_bytes())
        content[-400_000] ^= 1
        file.write_bytes(content)
    run_ranks(3, convert_together, str(tmp_path), fails)
    if not fails:
        assert_same(all_in(tmp_path / "hf"), wanted)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt", "hf"]


def test_torchrun(tmp_path: Path) -> None:
    wanted = {f"w{i}": torch.full((250, 300), float(i)) for i in range(5)}
    save_state_dict(tmp_path / "ckpt", wanted, no_dist=True)
    command = ["--standalone", "--nproc-per-node=2", "-m", "bytecheckpoint", "convert", "--shard-size", "300kB"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *command, tmp_path / "ckpt", tmp_path / "hf"],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("5 tensors") == 1
    assert_same(all_in(tmp_path / "hf"), wanted)


def test_two_at_a_time_do_not_mix(tmp_path: Path) -> None:
    save_state_dict(tmp_path / "ckpt", {"w": torch.ones(3)}, no_dist=True)
    errors: list[Exception] = []

    def again(done: int, total: int) -> None:
        try:
            convert(tmp_path / "ckpt", tmp_path / "hf")
        except CheckpointBusyError as error:
            errors.append(error)

    convert(tmp_path / "ckpt", tmp_path / "hf", progress=again)
    assert errors
    assert_same(all_in(tmp_path / "hf"), {"w": torch.ones(3)})


def test_what_cannot_be_converted_is_said_before_anything_is_written(tmp_path: Path) -> None:
    save_state_dict(
        tmp_path / "ckpt",
        {"w": torch.ones(3), "step": 3, "c": torch.ones(2, dtype=torch.complex128), "n": {"o": [1]}},
        no_dist=True,
    )
    with pytest.raises(ConfigError, match=r"objects: 'n\.o', 'step'"):
        convert(tmp_path / "ckpt", tmp_path / "hf")
    with pytest.raises(UnsupportedError, match="'c' is complex128"):
        convert(tmp_path / "ckpt", tmp_path / "hf", spec=LoadSpec(exclude=["step", "n"]))
    with pytest.raises(ConfigError, match="matches no key"):
        convert(tmp_path / "ckpt", tmp_path / "hf", spec=LoadSpec(include="modle"))
    with pytest.raises(ConfigError, match="dtype 'float'"):
        convert(tmp_path / "ckpt", tmp_path / "hf", spec=LoadSpec(include="w"), dtype="float")
    with pytest.raises(ConfigError, match="nothing to convert"):
        convert(tmp_path / "ckpt", tmp_path / "hf", spec=LoadSpec(exclude="*"))
    with pytest.raises(CheckpointNotFoundError):
        convert(tmp_path / "absent", tmp_path / "hf")
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


@pytest.mark.parametrize("workers", [1, 2])
def test_damage_of_the_source_leaves_no_target(tmp_path: Path, workers: int) -> None:
    save_state_dict(tmp_path / "ckpt", {f"w{i}": torch.randn(1000, 300) for i in range(3)}, no_dist=True)
    (data,) = (tmp_path / "ckpt").glob("*.distcp")
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    with pytest.raises(CorruptCheckpointError, match="CRC"):
        convert(tmp_path / "ckpt", tmp_path / "hf", shard_size="1MB", workers=workers)
    assert not (tmp_path / "hf").exists()
    assert not [*tmp_path.glob(".hf.converting/*.part")]


def test_memory_does_not_grow_with_a_tensor(tmp_path: Path) -> None:
    save_file({"w": torch.ones(256, 1 << 20, dtype=torch.uint8)}, tmp_path / "w.safetensors")
    script = """
import resource, sys
from bytecheckpoint.convert import convert
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
convert(sys.argv[1], sys.argv[2])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    added = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "w.safetensors", tmp_path / "hf"], check=True, capture_output=True
    )
    assert int(added.stdout) < 72 << 10


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("1.5 MiB", 3 << 19), (7, 7), ("12", 12), ("3kb", 3000)]
)
def test_sizes(text: int | str, size: int) -> None:
    assert parsed_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1", 0, "5XB", "nan"])
def test_what_is_no_size(text: int | str) -> None:
    with pytest.raises(ConfigError, match="size"):
        parsed_size(text)


def test_the_command(tmp_path: Path) -> None:
    save_state_dict(tmp_path / "ckpt", {"model": tensors(), "step": 3}, no_dist=True)
    arguments = ["convert", str(tmp_path / "ckpt"), str(tmp_path / "hf"), "--include", "model", "--rename", "model="]
    looked = CliRunner().invoke(bcp, [*arguments, "--dry-run"])
    assert looked.exit_code == 0, looked.output
    assert looked.output.startswith("would write ")
    assert not (tmp_path / "hf").exists()
    done = CliRunner().invoke(bcp, [*arguments, "--json", "--verify"])
    assert json.loads(done.output)["is_verified"]
    assert_same(all_in(tmp_path / "hf"), tensors())
    for more, part in ((["--rename", "x"], "PATTERN=NAME"), (["--spec", "s.toml"], "not both"), ([], "in place")):
        failed = CliRunner().invoke(bcp, [*arguments, *more])
        assert failed.exit_code == 2
        assert part in failed.output


def test_from_pretrained_reads_it(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=99,
    )
    model = transformers.LlamaForCausalLM(config)
    save_state_dict(tmp_path / "ckpt", {"model": model.state_dict()}, no_dist=True)
    convert(tmp_path / "ckpt", tmp_path / "hf", spec=LoadSpec(include="model", rename={"model": ""}), shard_size="50KB")
    config.save_pretrained(tmp_path / "hf")
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "hf")
    assert_same(loaded.state_dict(), model.state_dict())
