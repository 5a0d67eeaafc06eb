# SPDX-License-Identifier: Apache-2.0
"""Tests loads that read only the metadata they need, as they do with checkpoints of thousands of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from planned_states import more
from support.equality import assert_equal, blank
from torch.distributed.checkpoint.api import CheckpointException

from bytecheckpoint import BcpLoadPlanner, BcpReader, BcpSavePlanner, BcpWriter, Config
from bytecheckpoint.dcp import _reader_base as reader_module
from bytecheckpoint.errors import CheckpointChangedError, CorruptCheckpointError
from bytecheckpoint.native import _C


@pytest.fixture(autouse=True)
def _in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "_MAX_WHOLE_METADATA_BYTES", 0)


def save(path: Path, value: dict[str, Any], **options: Any) -> None:
    dcp.save(value, storage_writer=BcpWriter(path, **options), planner=BcpSavePlanner(), no_dist=True)


def load(path: Path, into: dict[str, Any], **options: Any) -> BcpReader:
    reader = BcpReader(path)
    dcp.load(into, storage_reader=reader, planner=BcpLoadPlanner(**options), no_dist=True)
    return reader


def is_read_in_parts(reader: BcpReader) -> bool:
    assert reader._checkpoint is not None
    return not reader._checkpoint.is_whole


def test_all_kinds_of_values_load(tmp_path: Path) -> None:
    value = more()
    save(tmp_path, value, user_metadata={"run": 7})
    got = blank(value)
    reader = load(tmp_path, got)
    assert_equal(got, value)
    assert reader.user_metadata == {"run": 7}
    assert is_read_in_parts(reader), "nothing of a load needs the whole"


def test_a_part_of_the_keys(tmp_path: Path) -> None:
    save(tmp_path, more())
    got = {"model": {"w": torch.zeros(7, 5), "new": torch.ones(3)}}
    reader = load(tmp_path, got, allow_partial_load=True)
    assert torch.equal(got["model"]["w"], more()["model"]["w"])
    assert torch.equal(got["model"]["new"], torch.ones(3))
    assert is_read_in_parts(reader)


def test_keys_that_are_missing_and_those_that_nobody_asks_for(tmp_path: Path) -> None:
    save(tmp_path, {"a": 1, "b": torch.ones(2)})
    with pytest.raises(CheckpointException, match=r"not in the checkpoint: 'c'; .* not asked for: 'b'"):
        load(tmp_path, {"a": None, "c": torch.ones(2)})


def test_another_shape(tmp_path: Path) -> None:
    save(tmp_path, {"b": torch.ones(2, 3)})
    with pytest.raises(CheckpointException, match=r"'b': stored is a tensor of \[2, 3\], .* one of \[3, 2\]"):
        load(tmp_path, {"b": torch.ones(3, 2)})


def test_dcp_s_planner_sees_all_of_it(tmp_path: Path) -> None:
    value = more()
    save(tmp_path, value)
    got = blank(value)
    reader = BcpReader(tmp_path, config=Config(planning="as given"))
    dcp.load(got, storage_reader=reader, no_dist=True)
    assert_equal(got, value)
    assert not is_read_in_parts(reader)


def test_metadata_that_are_looked_at_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, more())
    in_parts = BcpReader(tmp_path).read_metadata()
    monkeypatch.undo()
    whole = BcpReader(tmp_path).read_metadata()
    assert in_parts.storage_meta is not None
    assert whole.storage_meta is not None
    in_parts.storage_meta.load_id = whole.storage_meta.load_id
    assert in_parts == whole


def test_checkpoints_of_stock_dcp_are_read_whole(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(3), "b": 2}, checkpoint_id=tmp_path, no_dist=True)
    got = {"a": torch.zeros(3), "b": None}
    assert not is_read_in_parts(load(tmp_path, got))
    assert torch.equal(got["a"], torch.ones(3))


def test_a_newer_commit_in_between(tmp_path: Path) -> None:
    save(tmp_path, {"a": torch.ones(3)})
    checkpoint = _C.Checkpoint.open(str(tmp_path), max_whole_bytes=0)
    save(tmp_path, {"a": torch.ones(4)})
    assert not checkpoint.is_whole
    with pytest.raises(CheckpointChangedError, match="newer commit"):
        _ = checkpoint.planner_data


def test_damage_is_named(tmp_path: Path) -> None:
    save(tmp_path, {"a": torch.ones(3)})
    file = tmp_path / ".metadata"
    data = bytearray(file.read_bytes())
    data[-160] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointException) as caught:
        load(tmp_path, {"a": torch.zeros(3)})
    (reason, _), *_ = caught.value.failures.values()
    assert isinstance(reason, CorruptCheckpointError)
    assert str(file) in str(reason)
