# SPDX-License-Identifier: Apache-2.0
"""Tests that what DCP pickles survives: it gathers exceptions from ranks, and async_save sends writers to a process."""

from __future__ import annotations

import copy
import errno
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.equality import without_strides
from support.failing_hooks import Unpicklable, Unspeakable

from bytecheckpoint import BcpReader, BcpStager, BcpWriter, Config, errors

MIB = 1 << 20


def realistic() -> list[errors.CheckpointError]:
    """Returns an error of each class, as the code makes them."""
    odd = ("LoadFailedError", "OutOfStepError", "RankLostError", "SaveFailedError")
    kinds = [getattr(errors, name) for name in errors.__all__ if name not in odd]
    plain = [kind(f"save(/ckpt): {kind.__name__} happened", "/ckpt/7/.metadata") for kind in kinds]
    reasons = {1: errors.StorageError("full", "/ckpt/7", errno.ENOSPC), 3: ValueError("odd", 3), 4: KeyboardInterrupt()}
    failed = errors.SaveFailedError("save(/ckpt) failed and was undone: rank 1: StorageError: full", reasons)
    return [
        *plain,
        errors.LoadFailedError("rank 1: StorageError: full", reasons),
        errors.StorageError("open(/ckpt): denied", "/ckpt", errno.EACCES),
        errors.CheckpointNotFoundError("open(/ckpt): none", "/ckpt", errno.ENOENT),
        errors.KeyMismatchError("'a': the checkpoint has no such key"),
        failed,
        errors.OutOfStepError("save(/ckpt): rank 1 comes with another call", {0: 3, 1: 2}, "/ckpt"),
        errors.RankLostError("save(/ckpt): rank 2 died", {2: "died"}, "/ckpt"),
    ]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("error", realistic(), ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
def test_errors(error: errors.CheckpointError, protocol: int) -> None:
    for _ in range(2):  # through a gather and a broadcast
        got = pickle.loads(pickle.dumps(error, protocol))
        assert type(got) is type(error)
        assert str(got) == str(error)
        assert got.args == error.args
        assert (got.path, got.errno) == (error.path, error.errno)
        for name in ("ranks", "calls"):
            assert getattr(got, name, None) == getattr(error, name, None)
        if isinstance(error, errors.SaveFailedError | errors.LoadFailedError):
            assert {r: (type(e), str(e)) for r, e in got.reasons.items()} == {
                r: (type(e), str(e)) for r, e in error.reasons.items()
            }
            assert got.reasons[1].errno == errno.ENOSPC
        error = got
    assert errors.sendable(error) is error


def test_notes_come_back() -> None:
    error = errors.CorruptCheckpointError("read(/ckpt): damaged", "/ckpt")
    error.add_note("while loading 'layers.0.wq'")
    got = pickle.loads(pickle.dumps(error))
    assert got.__notes__ == ["while loading 'layers.0.wq'"]


def test_every_class_is_an_error_of_ours_and_says_what_it_is() -> None:
    for name in errors.__all__:
        kind = getattr(errors, name)
        assert issubclass(kind, errors.CheckpointError)
        assert str(kind("the message")) == "the message"
    assert issubclass(errors.CheckpointNotFoundError, FileNotFoundError)
    assert issubclass(errors.CheckpointExistsError, FileExistsError)
    assert issubclass(errors.StorageError, OSError)
    assert issubclass(errors.KeyMismatchError, KeyError)
    assert issubclass(errors.UnsupportedError, NotImplementedError)


class Odd(Exception):
    def __init__(self, lock: Any) -> None:
        super().__init__("holds a lock")
        self.lock = lock


def test_what_cannot_be_sent_is_replaced() -> None:
    sent = errors.sendable(Odd(threading.Lock()))
    assert type(sent) is errors.RankError
    assert str(sent) == f"{Odd.__module__}.Odd: holds a lock"
    assert errors.sendable(ValueError("fine", 1)).args == ("fine", 1)


def test_what_is_huge_is_cut_and_says_so() -> None:
    sent = errors.sendable(ValueError("x" * (100 << 20)))
    assert type(sent) is errors.RankError
    assert str(sent).startswith("builtins.ValueError: xxx")
    assert str(sent).endswith(f"... (cut: {100 << 20} characters)")
    assert len(str(sent)) < 1 << 17
    assert type(errors.sendable(ValueError("small", b"y" * (5 << 20)))) is errors.RankError


class Elsewhere(Exception):
    """An exception that unpickles as something else."""

    def __reduce__(self) -> str:
        return "realistic"


def test_what_does_not_come_back_or_cannot_be_printed_is_replaced() -> None:
    assert type(errors.sendable(Elsewhere("text"))) is errors.RankError
    assert "__str__ raises ValueError" in str(errors.sendable(Unspeakable()))
    assert str(errors.sendable(Unpicklable("why"))) == "support.failing_hooks.Unpicklable: why"


def test_errors_of_the_extension(tmp_path: Path) -> None:
    with pytest.raises(errors.CheckpointNotFoundError) as caught:
        BcpReader(tmp_path / "none").read_metadata()
    got = pickle.loads(pickle.dumps(caught.value))
    assert (str(got), got.path, got.errno) == (str(caught.value), str(tmp_path / "none/.metadata"), errno.ENOENT)


def test_config() -> None:
    config = Config(ring_bytes=32 * MIB, verify=False, commit_deadline_s=1.5)
    assert pickle.loads(pickle.dumps(config)) == config == copy.deepcopy(config)


def test_writer_reader_and_reports(tmp_path: Path) -> None:
    state = {"a": torch.arange(10), "n": 1}
    writer: BcpWriter = BcpWriter(
        tmp_path / "unused", overwrite=False, thread_count=2, config=Config(ring_bytes=16 * MIB), user_metadata={"x": 1}
    )
    writer = pickle.loads(pickle.dumps(writer))
    dcp.save(state, storage_writer=writer, checkpoint_id=tmp_path / "1")
    # The writer can also be pickled after a save; the state of that save is not part of the pickle.
    again: BcpWriter = pickle.loads(pickle.dumps(writer))
    assert type(again) is BcpWriter
    assert again.last_report == writer.last_report
    for name in ("path", "overwrite", "config", "user_metadata", "single_file_per_rank", "sync_files"):
        assert getattr(again, name) == getattr(writer, name), name
    assert again.checkpoint_id == tmp_path / "1"
    dcp.save(state, storage_writer=again, checkpoint_id=tmp_path / "2")
    assert again.last_report != writer.last_report
    assert pickle.loads(pickle.dumps(again.last_report)) == again.last_report

    reader: BcpReader = pickle.loads(pickle.dumps(BcpReader(tmp_path / "unused", config=Config(verify=False))))
    for number in ("1", "2"):
        got = {"a": torch.zeros(10, dtype=torch.int64), "n": 0}
        dcp.load(got, storage_reader=reader, checkpoint_id=tmp_path / number)
        assert torch.equal(got["a"], state["a"])  # type: ignore[arg-type]
        assert reader.user_metadata == {"x": 1}
        assert pickle.loads(pickle.dumps(reader.last_report)) == reader.last_report
        reader = pickle.loads(pickle.dumps(reader))
        assert reader.checkpoint_id == tmp_path / number
        assert reader.user_metadata == {"x": 1}  # opens the checkpoint again
        assert not reader.config.verify


def test_metadata(tmp_path: Path) -> None:
    returned = without_strides(dcp.save({"a": torch.arange(10), "n": 1}, storage_writer=BcpWriter(tmp_path)))
    read = BcpReader(tmp_path).read_metadata()
    assert pickle.loads(pickle.dumps(read)) == read
    assert returned.storage_meta is not None
    assert read.storage_meta is not None
    returned.storage_meta.load_id = read.storage_meta.load_id
    assert pickle.loads(pickle.dumps(read)) == read == returned == pickle.loads(pickle.dumps(returned))


def test_the_metadata_is_the_callers_own(tmp_path: Path) -> None:
    """Stock code changes the metadata that it gets, so each call must return new ones."""
    dcp.save({"a": torch.arange(10), "n": 1}, storage_writer=BcpWriter(tmp_path))
    reader = BcpReader(tmp_path)
    metadata = reader.read_metadata()
    metadata.state_dict_metadata.clear()
    metadata.planner_data["other"] = ("x",)
    got = {"a": torch.zeros(10, dtype=torch.int64), "n": 0}
    dcp.load(got, storage_reader=reader)
    assert torch.equal(got["a"], torch.arange(10))  # type: ignore[arg-type]
    assert set(reader.read_metadata().state_dict_metadata) == {"a", "n"}


def test_a_stager_travels_with_its_settings() -> None:
    stager = BcpStager(True, config=Config(staging_threads=3))
    again = pickle.loads(pickle.dumps(stager))
    assert (type(again), again.overlap, again.config) == (BcpStager, True, Config(staging_threads=3))
