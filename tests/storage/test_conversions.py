# SPDX-License-Identifier: Apache-2.0
"""Conversions from URLs of object stores, of every format that is read there, and to them."""

from __future__ import annotations

import itertools
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.cli_runs import run, start
from support.equality import assert_equal, blank
from support.orbax_folder import write_orbax
from support.seaweedfs import SeaweedFS

from bytecheckpoint import Config, LoadSpec, load_state_dict, save_state_dict, verify
from bytecheckpoint.convert import convert
from bytecheckpoint.convert.conversion import Format
from bytecheckpoint.errors import (
    CheckpointChangedError,
    CheckpointExistsError,
    CheckpointSupersededError,
    ConfigError,
    CorruptCheckpointError,
    UnsupportedError,
)
from bytecheckpoint.storage.object_store.client import StoreClient
from bytecheckpoint.storage.object_store.stores import use_store

_numbers = itertools.count()


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        "embed.weight": torch.randn(300, 40, generator=generator),
        "layers.0.weight": torch.randn(40, 40, generator=generator).bfloat16(),
        "layers.0.steps": torch.arange(7),
        "head": torch.tensor(2.5),
    }


def put(client: StoreClient, path: Path, name: str) -> None:
    client.put(name, path.read_bytes())


def loaded(path: str | Path, config: Config | None = None) -> dict[str, torch.Tensor]:
    got = blank(weights())
    load_state_dict(path, got, no_dist=True, config=config)
    return got


def assert_same(found: dict[str, torch.Tensor]) -> None:
    """Whatever the order."""
    assert_equal({name: found[name] for name in weights()}, weights())
    assert len(found) == len(weights())


# Sources.


def hugging_face(client: StoreClient, tmp_path: Path) -> str:
    for number, names in enumerate((["embed.weight", "head"], ["layers.0.weight", "layers.0.steps"]), 1):
        save_file({name: weights()[name] for name in names}, tmp_path / "part")
        put(client, tmp_path / "part", f"model-0000{number}-of-00002.safetensors")
    of = {"embed.weight": 1, "head": 1, "layers.0.weight": 2, "layers.0.steps": 2}
    files = {name: f"model-0000{number}-of-00002.safetensors" for name, number in of.items()}
    client.put("model.safetensors.index.json", json.dumps({"weight_map": files}).encode())
    return client.url


def one_file(client: StoreClient, tmp_path: Path) -> str:
    save_file(weights(), tmp_path / "one")
    put(client, tmp_path / "one", "of_model.safetensors")
    return f"{client.url}/of_model.safetensors"


def torch_file(client: StoreClient, tmp_path: Path) -> str:
    torch.save(weights(), tmp_path / "model.pt")
    put(client, tmp_path / "model.pt", "model.pt")
    return f"{client.url}/model.pt"


def torch_folder(client: StoreClient, tmp_path: Path) -> str:
    torch.save(weights(), tmp_path / "bin")
    put(client, tmp_path / "bin", "pytorch_model.bin")
    return client.url


def checkpoint(client: StoreClient, tmp_path: Path) -> str:
    save_state_dict(client.url, weights(), no_dist=True)
    return client.url


def orbax(client: StoreClient, tmp_path: Path) -> str:
    folder = write_orbax(tmp_path / "orbax", weights(), (64, 16))
    for path in folder.rglob("*"):
        if path.is_file():
            put(client, path, str(path.relative_to(folder)))
    return client.url


SOURCES = [hugging_face, one_file, torch_file, torch_folder, checkpoint, orbax]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("to", ["safetensors", "bcp", "dcp", "torch"])
def test_sources_at_urls(client: StoreClient, tmp_path: Path, source: Any, to: Format) -> None:
    url = source(client, tmp_path)
    out = tmp_path / ("out.pt" if to == "torch" else "out")
    report = convert(url, out, to=to, verify=True)
    assert report.num_tensors == len(weights())
    if to == "safetensors":
        assert_same(load_file(out / "model.safetensors"))
    elif to == "torch":
        assert_same(torch.load(out, weights_only=True))
    assert_same(loaded(out))
    assert_same(loaded(url))


def test_damaged_sources_at_urls(client: StoreClient, tmp_path: Path) -> None:
    hugging_face(client, tmp_path)
    client.delete(["model-00002-of-00002.safetensors"])
    with pytest.raises(CorruptCheckpointError, match=r"names is missing: .*model-00002-of-00002\.safetensors"):
        convert(client.url, tmp_path / "out")
    torch.save(weights(), tmp_path / "model.pt")
    client.put("cut.pt", (tmp_path / "model.pt").read_bytes()[:-100])
    with pytest.raises(CorruptCheckpointError, match=r"cut\.pt"):
        convert(f"{client.url}/cut.pt", tmp_path / "out")
    torch.save(weights(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    put(client, tmp_path / "old.pt", "old.pt")
    with pytest.raises(UnsupportedError, match=r"old\.pt.*before torch 1\.6"):
        convert(f"{client.url}/old.pt", tmp_path / "out")
    assert not (tmp_path / "out").exists()


# Targets.


def names(client: StoreClient) -> list[str]:
    return sorted(each.name for each in client.everything(""))


def test_a_target_at_a_url(root: str, client: StoreClient, tmp_path: Path) -> None:
    save_file(weights(), tmp_path / "model.safetensors")
    told: list[tuple[int, int]] = []
    plan = convert(tmp_path / "model.safetensors", root, to="bcp", dry_run=True)
    assert not names(client)
    report = convert(
        tmp_path / "model.safetensors",
        root,
        to="bcp",
        shard_size=20_000,
        spec=LoadSpec(rename={"layers.{i}": "h.{i}"}),
        dtype="bfloat16",
        verify=True,
        progress=lambda now, total: told.append((now, total)),
    )
    assert (report.target, report.num_cast, report.is_verified) == (root, 2, True)
    assert plan.num_files == 1
    assert report.num_files == len(names(client)) - 1 > 1
    assert told[-1][0] == told[-1][1] == report.num_bytes
    wanted = {name.replace("layers", "h"): value for name, value in weights().items()}
    wanted = {name: value.bfloat16() if value.is_floating_point() else value for name, value in wanted.items()}
    got = blank(wanted)
    load_state_dict(root, got, no_dist=True)
    assert_equal(got, wanted)
    assert not verify(root).problems
    with pytest.raises(CheckpointExistsError, match="nothing is changed in place"):
        convert(tmp_path / "model.safetensors", root, to="bcp")
    # And from one URL to another, with objects.
    save_state_dict(f"{root}/a", {"w": torch.ones(3), "step": 7}, no_dist=True)
    convert(f"{root}/a", f"{root}/b", to="bcp")
    state = {"w": torch.zeros(3), "step": 0}
    load_state_dict(f"{root}/b", state, no_dist=True)
    assert state["step"] == 7


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({}, r"only a checkpoint of ours \(--to bcp\) can be written to a URL, not safetensors"),
        ({"to": "dcp"}, "not dcp"),
        ({"to": "torch"}, "not torch"),
        ({"to": "bcp", "resume": True}, "resume is for directories alone"),
    ],
)
def test_what_a_url_cannot_be(root: str, client: StoreClient, tmp_path: Path, arguments: Any, what: str) -> None:
    save_file(weights(), tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=what):
        convert(tmp_path / "model.safetensors", root, **arguments)
    assert not names(client)


def test_other_urls_are_refused_in_a_sentence(tmp_path: Path) -> None:
    save_file(weights(), tmp_path / "model.safetensors")
    done = run("convert", str(tmp_path / "model.safetensors"), "hdfs://there/it/is", "--to", "bcp")
    assert done.exit_code != 0
    assert "hdfs://...: unknown kind of store; known are s3" in done.stderr
    assert "Traceback" not in done.output
    with pytest.raises(UnsupportedError, match="over HTTP a checkpoint can only be read"):
        convert(tmp_path / "model.safetensors", "http://127.0.0.1:9/ckpt", to="bcp", config=Config(io_timeout_s=1.0))


@pytest.mark.parametrize("fails", ["upload", "read", "commit", "interrupt"])
def test_a_conversion_that_fails_leaves_nothing(
    root: str, client: StoreClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """The source is cut while it is read, the store refuses a file or the commit, or somebody presses Ctrl-C."""
    source = tmp_path / "model.safetensors"
    save_file(weights(), source)
    real_upload, real_put, lock, uploads = StoreClient.upload, StoreClient.put_if, threading.Lock(), itertools.count(1)

    def upload(self: StoreClient, name: str, parts: Any) -> Any:
        with lock:
            number = next(uploads)
        if number == 3 and fails == "upload":
            raise OSError(13, "no more")
        if number == 3 and fails == "read":
            source.write_bytes(source.read_bytes()[:-60_000])
        return real_upload(self, name, parts)

    def put_if(self: StoreClient, name: str, data: bytes, replaces: Any) -> None:
        if fails == "commit":
            raise OSError(13, "not this one")
        real_put(self, name, data, replaces)

    def progress(now: int, total: int) -> None:
        if fails == "interrupt" and now > total // 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(StoreClient, "upload", upload)
    monkeypatch.setattr(StoreClient, "put_if", put_if)
    with pytest.raises((OSError, CheckpointChangedError, KeyboardInterrupt)):
        convert(source, root, to="bcp", shard_size=10_000, progress=progress)
    assert not names(client)
    monkeypatch.undo()
    save_file(weights(), source)
    convert(source, root, to="bcp", shard_size=10_000)
    assert_equal(loaded(root), weights())


def test_a_save_that_commits_meanwhile_wins(
    root: str, client: StoreClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"w": torch.ones(4)}, tmp_path / "model.safetensors")

    def progress(now: int, total: int) -> None:
        if now == total:
            save_state_dict(root, {"w": torch.full((4,), 7.0)}, no_dist=True)

    with pytest.raises(CheckpointSupersededError, match="while this save ran, another one committed"):
        convert(tmp_path / "model.safetensors", root, to="bcp", progress=progress)
    state = {"w": torch.zeros(4)}
    load_state_dict(root, state, no_dist=True)
    assert state["w"].eq(7).all()
    assert len(names(client)) == 2


# A real store, with workers in processes of their own.


def test_the_command_at_a_real_store(server: SeaweedFS, tmp_path: Path) -> None:
    config = Config(storage_options=server.options)
    of = {"AWS_ENDPOINT_URL": "endpoint", "AWS_ACCESS_KEY_ID": "access_key_id", "AWS_REGION": "region"}
    of["AWS_SECRET_ACCESS_KEY"] = "secret_access_key"
    environment = {variable: server.options[option] for variable, option in of.items()}

    def bcp(*arguments: str) -> tuple[int | None, str]:
        process = start(*arguments, "--workers", "2", "--shard-size", "13MB", environment=environment)
        _, said = process.communicate(timeout=60)
        return process.returncode, said

    url = f"s3://checkpoints/conversions-{next(_numbers)}"
    large = {"w": torch.arange(6_000_000, dtype=torch.float32).reshape(1500, 4000), **weights()}  # uploads of parts
    save_file(large, tmp_path / "model.safetensors")
    put(use_store(f"{url}/hf", config), tmp_path / "model.safetensors", "model.safetensors")
    for source, target in (
        (str(tmp_path / "model.safetensors"), f"{url}/ckpt"),
        (f"{url}/ckpt", f"{url}/again"),
        (f"{url}/hf", f"{url}/of-hf"),
    ):
        code, said = bcp("convert", source, target, "--to", "bcp", "--verify")
        assert code == 0, said
        got = blank(large)
        load_state_dict(target, got, no_dist=True, config=config)
        assert_equal(got, large)
    code, said = bcp("convert", f"{url}/hf", f"{url}/ckpt", "--to", "bcp")
    assert code not in (0, None)
    assert "nothing is changed in place" in said
    assert "Traceback" not in said
    code, said = bcp("convert", f"{url}/ckpt", str(tmp_path / "out"))
    assert code == 0, said
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 1
    found = {name: value for file in files for name, value in load_file(file).items()}
    assert_equal({name: found[name] for name in large}, large)
