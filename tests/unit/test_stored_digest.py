# SPDX-License-Identifier: Apache-2.0
"""Tests ``digest=True``: what a save stores is the digest of what is there, and nobody else notices it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.cli_runs import as_json, run
from torch.distributed.checkpoint.api import CheckpointException
from unit.partial_states import PARTIAL, rows

import bytecheckpoint
from bytecheckpoint import BcpReader, BcpWriter, Config, digest, save_state_dict
from bytecheckpoint.checkpoint import digests
from bytecheckpoint.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    SaveCancelledError,
    UnsupportedError,
)
from bytecheckpoint.native import _core
from bytecheckpoint.storage.stored_digest import stored_in, with_stored, without_stored


def state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(4)
    return {"w": torch.randn(300, 200, generator=generator), "b": torch.zeros(0), "step": 7, "list": [1, {"a": 2.5}]}


def test_what_is_stored(tmp_path: Path) -> None:
    report = save_state_dict(tmp_path / "a", state(), digest=True, user_metadata={"run": 1})
    save_state_dict(tmp_path / "b", state(), user_metadata={"run": 1})
    a, b = digest(tmp_path / "a"), digest(tmp_path / "b")
    assert (a.total, a.keys) == (b.total, b.keys)
    assert report.digest == a.stored == a.total
    assert report.digest_s > 0
    assert "digest" in report.summary()
    assert a.is_as_saved
    assert (b.stored, b.differing, b.is_as_saved) == (None, (), True)
    assert digest(tmp_path / "a", spec=bytecheckpoint.LoadSpec(include="w")).stored is None
    for path in (tmp_path / "a", tmp_path / "b"):
        assert BcpReader(path).user_metadata == {"run": 1}
    assert run("digest", str(tmp_path / "a")).output.startswith("equal to the digest that the save stored\n")


def test_nobody_else_notices(tmp_path: Path) -> None:
    save_state_dict(tmp_path, state(), digest=True)
    assert BcpReader(tmp_path).user_metadata is None
    assert bytecheckpoint.verify(tmp_path).is_whole
    for reader in (BcpReader(tmp_path), dcp.FileSystemReader(tmp_path)):
        got: dict[str, Any] = {"w": torch.zeros(300, 200), "b": torch.zeros(0), "step": 0, "list": [0, {"a": 0.0}]}
        dcp.load(got, storage_reader=reader, no_dist=True)
        assert torch.equal(got["w"], state()["w"])
        assert got["list"] == state()["list"]


def test_every_way_to_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dcp.save(state(), storage_writer=BcpWriter(tmp_path / "dcp", digest=True), no_dist=True)
    bytecheckpoint.async_save_state_dict(tmp_path / "async", state(), digest=True).committed.result()
    with bytecheckpoint.registered(config=Config(digest=True)):
        dcp.save(state(), checkpoint_id=tmp_path / "registered", no_dist=True)
    monkeypatch.setenv("BYTECHECKPOINT_DIGEST", "1")
    save_state_dict(tmp_path / "env", state())
    save_state_dict(tmp_path / "off", state(), digest=False)
    wanted = digest(tmp_path / "env").total
    for name in ("dcp", "async", "registered", "env"):
        assert digest(tmp_path / name).stored == wanted, name
    assert digest(tmp_path / "off").stored is None


def test_parts_of_a_step(tmp_path: Path) -> None:
    step = tmp_path / "step_3"
    model = torch.nn.Linear(3, 2)
    bytecheckpoint.save(step, {"model": model, "extra_state": {"epoch": 3}}, "ddp", digest=True)
    told = as_json("digest", str(step))
    assert {part["stored"]["equal"] for part in told["parts"].values()} == {True}
    objects: dict[str, Any] = {"model": torch.nn.Linear(3, 2), "extra_state": {}}
    bytecheckpoint.load(step, objects, "ddp")
    assert torch.equal(objects["model"].weight, model.weight)
    assert run("steps", str(tmp_path)).exit_code == 0


def test_a_difference_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here another value goes into the digest, as if what is there had been made anew, checksums and all."""
    real = digests.digest_of

    def other(*arguments: Any, **options: Any) -> Any:
        found = real(*arguments, **options)
        keys = {**found.keys, "w": "0" * 64}
        total = digests.combined({name: bytes.fromhex(value) for name, value in keys.items()})
        return digests.Digest(path=found.path, total=total.hex(), keys=keys)

    monkeypatch.setattr("bytecheckpoint.dcp._save_digest.digest_of", other)
    save_state_dict(tmp_path, state(), digest=True)
    found = digest(tmp_path)
    assert (found.differing, found.is_as_saved) == (("w",), False)
    told = as_json("digest", str(tmp_path), code=1)
    assert told["stored"] == {"total": found.stored, "equal": False, "differing": ["w"]}
    shown = run("digest", str(tmp_path))
    assert shown.exit_code == 1
    assert "differs from the digest that the save stored: w\n" in shown.output


def fails(path: Path, value: dict[str, Any], **options: Any) -> CheckpointError:
    """Saves over a checkpoint, which must fail and leave it as it was. Returns the error."""
    save_state_dict(path, {"before": 1})
    before = sorted(path.iterdir())
    with pytest.raises(CheckpointError) as caught:
        save_state_dict(path, value, digest=True, **options)
    assert sorted(path.iterdir()) == before
    assert [*digest(path).keys] == ["before"]
    return caught.value


def test_a_save_that_fails_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = torch.quantize_per_tensor(torch.arange(24.0).reshape(4, 6), 0.5, 3, torch.quint8)
    error = fails(tmp_path, {"q": odd})
    assert isinstance(error, UnsupportedError)
    assert "'q': it is not stored as plain elements" in str(error)
    assert isinstance(fails(tmp_path, {"w": rows(0, 4)}, config=PARTIAL), UnsupportedError)
    assert isinstance(fails(tmp_path, {"w": 1}, user_metadata=[1]), ConfigError)
    real = digests.digest_of

    def damaging(written: Any, directory: str, **options: Any) -> Any:
        for name, *_ in written.files():
            data = bytearray((Path(directory) / name).read_bytes())
            data[len(data) // 2] ^= 1
            (Path(directory) / name).write_bytes(data)
        return real(written, directory, **options)

    monkeypatch.setattr("bytecheckpoint.dcp._save_digest.digest_of", damaging)
    error = fails(tmp_path, state())
    assert isinstance(error, CorruptCheckpointError)
    assert f"save({tmp_path}): it cannot be read back" in str(error)


def test_cancelling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = digests.digest_of
    writer = BcpWriter(tmp_path, digest=True)

    def cancelling(*arguments: Any, **options: Any) -> Any:
        writer.cancel()
        return real(*arguments, **options)

    monkeypatch.setattr("bytecheckpoint.dcp._save_digest.digest_of", cancelling)
    with pytest.raises(CheckpointException) as caught:
        dcp.save(state(), storage_writer=writer, no_dist=True)
    assert isinstance(caught.value.failures[0][0], SaveCancelledError)
    with pytest.raises(CheckpointNotFoundError):
        digest(tmp_path)


@pytest.mark.parametrize(
    "stored",
    [3, {}, {"total": "0" * 64}, {"total": "0" * 64, "keys": "!"}, {"total": "0" * 64, "keys": ""}, {"total": 3}, []],
)
def test_what_no_save_stores(tmp_path: Path, stored: Any) -> None:
    save_state_dict(tmp_path, {"w": torch.ones(2)}, user_metadata={"bytecheckpoint.digest": stored, "a": 1})
    with pytest.raises(CorruptCheckpointError, match="the stored digest is none that a save writes"):
        digest(tmp_path)
    assert BcpReader(tmp_path).user_metadata == {"a": 1}


def test_stored_and_back() -> None:
    keys = {"a": "01" * 32, "\u00e9": "ab" * 32}
    for before in (None, {"x": [1]}):
        stored = json.loads(json.dumps(with_stored(before, "cd" * 32, keys)))
        assert stored_in(stored, [*reversed(keys)], "") == ("cd" * 32, keys)
        assert without_stored(stored) == before
    for other in (None, [], "x", {"x": 1}):
        assert stored_in(other, [], "") is None
        assert without_stored(other) == other


def test_many_keys_take_little_room(tmp_path: Path) -> None:
    many = {f"key.{number}": number for number in range(3000)}
    save_state_dict(tmp_path / "a", many)
    save_state_dict(tmp_path / "b", many, digest=True)
    sizes = [(tmp_path / name / ".metadata").stat().st_size for name in "ab"]
    assert 0 < sizes[1] - sizes[0] < 3000 * 44 + 200
    assert digest(tmp_path / "b").is_as_saved
    assert len(_core.Checkpoint.open(str(tmp_path / "b")).names()) == 3000
