# SPDX-License-Identifier: Apache-2.0
"""Tests that every keyword of the stock FileSystemWriter is honoured, or refused by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.equality import assert_loads
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import SerializationFormat

from bytecheckpoint import BcpReader, BcpWriter, Config, load_state_dict, verify
from bytecheckpoint.errors import CheckpointError, ConfigError

MIB = 1 << 20


def state() -> dict[str, Any]:
    return {"a": torch.arange(1000), "b": {"c": torch.full((3, 3), 2.5)}, "empty": torch.empty(0), "n": 3, "s": "x"}


def data_files(path: Path) -> list[Path]:
    return sorted(path.glob("*.distcp"))


def test_the_stock_writers_keywords_come_first_and_in_its_order() -> None:
    theirs = inspect.signature(FileSystemWriter).parameters
    ours = inspect.signature(BcpWriter).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    for name, parameter in theirs.items():
        assert ours[name].kind == parameter.kind, name
        assert ours[name].default == parameter.default, name
    readers = inspect.signature(FileSystemReader).parameters
    assert list(inspect.signature(BcpReader).parameters)[: len(readers)] == list(readers)


@pytest.mark.parametrize(
    "arguments",
    [
        {"single_file_per_rank": True},
        {"sync_files": False},
        {"thread_count": 2},
        {"thread_count": 16},
        {"per_thread_copy_ahead": 1},
        {"cache_staged_state_dict": True},
        {"overwrite": False},
        {"_extensions": None},
        {"_extensions": []},
        {"serialization_format": SerializationFormat.TORCH_SAVE},
        {"config": Config(io_threads=2, direct_io=False, ring_bytes=16 * MIB)},
    ],
    ids=str,
)
def test_honoured(tmp_path: Path, arguments: dict[str, Any]) -> None:
    dcp.save(state(), storage_writer=BcpWriter(tmp_path / "ckpt", **arguments))
    assert_loads(tmp_path / "ckpt", state())
    assert len(data_files(tmp_path / "ckpt")) == 1


@pytest.mark.parametrize("threads", [1, 3])
def test_a_file_a_record(tmp_path: Path, threads: int) -> None:
    writer = BcpWriter(tmp_path, single_file_per_rank=False, thread_count=threads)
    for _ in range(2):
        metadata = dcp.save(state(), storage_writer=writer)
        assert metadata.storage_data is not None
        files = [info.relative_path for info in metadata.storage_data.values()]
        assert len(set(files)) == len(files) == 5
        assert sorted(files) == [file.name for file in data_files(tmp_path)]
        assert_loads(tmp_path, state())
    assert writer.last_report is not None
    assert writer.last_report.num_records == 5
    assert writer.last_report.files_swept == 5
    assert writer.last_report.bytes_written == sum(file.stat().st_size for file in data_files(tmp_path))


def test_without_sync_files_nothing_is_synced(tmp_path: Path) -> None:
    writer = BcpWriter(tmp_path, sync_files=False)
    dcp.save(state(), storage_writer=writer)
    assert writer.last_report is not None
    assert writer.last_report.warnings == []
    assert_loads(tmp_path, state())


def test_thread_count_overrides_the_config_only_upwards(tmp_path: Path) -> None:
    config = Config(io_threads=3, verify=False)
    assert BcpWriter(tmp_path, config=config).config == config
    assert BcpWriter(tmp_path, thread_count=2, config=config).config == Config(io_threads=2, verify=False)


@pytest.mark.parametrize("count", [0, -1, 17, 1.0, "2", None])
def test_wrong_thread_counts(tmp_path: Path, count: Any) -> None:
    with pytest.raises(ConfigError, match="thread_count"):
        BcpWriter(tmp_path, thread_count=count)


def test_what_cannot_be_honoured(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="_extensions"):
        BcpWriter(tmp_path, _extensions=[object()])
    with pytest.raises(ValueError, match="TORCH_SAVE"):
        BcpWriter(tmp_path, serialization_format=SerializationFormat.SAFETENSORS)
    with pytest.raises(ValueError, match="_extension_registry"):
        BcpReader(tmp_path, _extension_registry=object())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "note",
    [
        {},
        {"run": "x", "nested": {"list": [1, 2.5, None, True], "text": "\u00e4\U0001f600\0\n"}},
        {"long": "x" * 300_000},  # more than a block of the manifest
        {"numbers": [0.1, -1e300, 2**53, -(2**63)]},
    ],
    ids=["empty", "nested", "long", "numbers"],
)
def test_user_metadata(tmp_path: Path, note: dict[str, Any]) -> None:
    dcp.save(state(), storage_writer=BcpWriter(tmp_path, user_metadata=note))
    assert BcpReader(tmp_path).user_metadata == note
    assert_loads(tmp_path, state())


def test_no_user_metadata(tmp_path: Path) -> None:
    dcp.save(state(), storage_writer=BcpWriter(tmp_path))
    assert BcpReader(tmp_path).user_metadata is None


def test_user_metadata_that_is_no_json(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        BcpWriter(tmp_path, user_metadata={"x": object()})


def test_paths(tmp_path: Path) -> None:
    for path in (str(tmp_path / "text"), tmp_path / "path", tmp_path / "deep" / "er" / "\u00e4 b"):
        dcp.save(state(), storage_writer=BcpWriter(path))
        assert_loads(Path(path), state())
    for validate in (BcpWriter.validate_checkpoint_id, BcpReader.validate_checkpoint_id):
        assert validate("/x")
        assert validate("x/y")
        assert validate(Path("x"))
        assert validate("s3://bucket/x")
        assert not validate("hdfs://host/x")


@pytest.mark.parametrize(
    "url", ["s3://key:secret@bucket/run?token=secret", "hdfs:///secret", "x://[secret", "://secret"]
)
def test_urls(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A URL is refused, and does not become a directory of that name. Errors do not repeat what may be secret in it."""
    monkeypatch.chdir(tmp_path)
    writer, reader = BcpWriter("here"), BcpReader("here")
    calls: list[Callable[[], object]] = [
        lambda: BcpWriter(url),
        lambda: BcpReader(url),
        lambda: verify(url),
        lambda: load_state_dict(url, state()),
        lambda: dcp.save(state(), storage_writer=writer, checkpoint_id=url),
        lambda: dcp.load(state(), storage_reader=reader, checkpoint_id=url),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match=r"unknown kind of store|storage_options") as caught:
            call()
        assert "secret" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    dcp.save(state(), storage_writer=BcpWriter("here"))
    assert_loads(tmp_path / "here", state())


def test_hooks_out_of_order(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"dcp\.save"):
        BcpWriter(tmp_path).set_up_storage_writer(True)


def test_the_report(tmp_path: Path) -> None:
    writer = BcpWriter(tmp_path)
    assert writer.last_report is None
    metadata = dcp.save(state(), storage_writer=writer)
    report = writer.last_report
    assert report is not None
    assert metadata.storage_meta is not None
    assert f"bcp1-{report.save_id}" == metadata.storage_meta.save_id
    assert (report.path, report.num_records, report.files_swept) == (str(tmp_path), 5, 0)
    assert report.bytes_written == sum(file.stat().st_size for file in data_files(tmp_path))
    assert report.commit_s > 0


def test_public_attributes_of_the_stock_classes_are_there(tmp_path: Path) -> None:
    """Only the transforms of streams are missing; they cannot be honoured. Our stager says whether to synchronize."""
    others = {"transforms", "fs", "save_id", "load_id", "should_synchronize_after_execute"}
    for ours, theirs in (
        (BcpWriter(tmp_path), FileSystemWriter(tmp_path)),
        (BcpReader(tmp_path), FileSystemReader(tmp_path)),
    ):
        names = {name for name in (*vars(theirs), *dir(type(theirs))) if not name.startswith("_")}
        assert {name for name in names if not hasattr(ours, name)} == {"transforms"}
        for name in names - others:
            value = getattr(theirs, name)
            assert callable(value) or getattr(ours, name) == value, name
        assert type(ours.fs) is type(theirs.fs)


def test_ids_are_those_of_the_last_call(tmp_path: Path) -> None:
    writer = BcpWriter(tmp_path)
    first = writer.save_id
    dcp.save(state(), storage_writer=writer)
    reader = BcpReader(tmp_path)
    assert reader.storage_data == {}
    metadata = reader.read_metadata()
    assert metadata.storage_meta is not None
    assert (metadata.storage_meta.save_id, metadata.storage_meta.load_id) == (writer.save_id, reader.load_id)
    assert reader.storage_data == metadata.storage_data != {}
    saved, loaded = writer.save_id, reader.load_id
    assert saved != first
    writer.reset()
    reader.reset()
    assert saved != writer.save_id
    assert loaded != reader.load_id
    assert reader.storage_data == {}


@pytest.mark.parametrize("writer", [FileSystemWriter, BcpWriter])
def test_a_checkpoint_that_is_not_overwritten(tmp_path: Path, writer: Any) -> None:
    """The error has the words that tests of users match."""
    dcp.save(state(), storage_writer=writer(tmp_path))
    with pytest.raises(dcp.api.CheckpointException, match="Checkpoint already exists"):
        dcp.save(state(), storage_writer=writer(tmp_path, overwrite=False))
