# SPDX-License-Identifier: Apache-2.0
"""Tests that a save names the objects that will not load without opting in."""

from __future__ import annotations

import io
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException

from bytecheckpoint import BcpReader, BcpSavePlanner, BcpWriter, Config
from bytecheckpoint.contents.safe_objects import load_plain_data
from bytecheckpoint.errors import ConfigError, CorruptCheckpointError, UnsafeObjectError


class Schedule:
    pass


class Tagged(torch.Tensor):
    pass


STATE: dict[str, Any] = {
    "weight": torch.arange(3),
    "schedule": Schedule(),
    "nested": {"list": [1, Schedule()], "array": np.arange(3), "text": "x"},
}


def warnings_of_save(path: Path, state: dict[str, Any], planner: Any = None, **arguments: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dcp.save(state, storage_writer=BcpWriter(path, **arguments), planner=planner)
    return [str(warning.message) for warning in caught if "will not load" in str(warning.message)]


@pytest.mark.parametrize("planner", [None, BcpSavePlanner, DefaultSavePlanner])
def test_one_warning_names_keys_types_and_both_ways_out(tmp_path: Path, planner: Any) -> None:
    (message,) = warnings_of_save(tmp_path, STATE, planner and planner())
    module = Schedule.__module__
    assert f"'schedule' ({module}.Schedule)" in message
    assert f"'nested.list' ({module}.Schedule)" in message
    assert "'nested.array'" not in message
    assert "'weight'" not in message
    assert "Config(allow_pickle=True)" in message
    assert "add_safe_globals" in message


def test_it_is_in_the_report(tmp_path: Path) -> None:
    writer = BcpWriter(tmp_path)
    with pytest.warns(RuntimeWarning, match="'schedule'"):
        dcp.save(STATE, storage_writer=writer)
    assert writer.last_report is not None
    (warning,) = writer.last_report.warnings
    assert "'schedule'" in warning


def test_a_tensor_of_a_class_of_the_user_is_named_too(tmp_path: Path) -> None:
    (message,) = warnings_of_save(tmp_path, {"tagged": torch.arange(3.0).as_subclass(Tagged)})
    assert f"'tagged' ({Tagged.__module__}.Tagged)" in message


@pytest.mark.parametrize("arguments", [{"unsafe_objects": "allow"}, {"config": Config(allow_pickle=True)}])
def test_no_warning_for_who_opts_in(tmp_path: Path, arguments: dict[str, Any]) -> None:
    assert warnings_of_save(tmp_path, STATE, **arguments) == []


def test_no_warning_for_what_loads(tmp_path: Path) -> None:
    state = {"parameter": [torch.nn.Parameter(torch.ones(2))], "n": {1}}
    planner = DefaultSavePlanner(flatten_state_dict=False)
    assert warnings_of_save(tmp_path, {"all": state, "array": np.ones(2)}, planner) == []
    with torch.serialization.safe_globals([Schedule]):
        assert warnings_of_save(tmp_path, STATE) == []


def test_thousands_are_not_all_named(tmp_path: Path) -> None:
    (message,) = warnings_of_save(tmp_path, {str(i): Schedule() for i in range(1000)})
    assert "and maybe more" in message
    assert len(message) < 2000


@pytest.mark.parametrize("planner", [None, BcpSavePlanner, DefaultSavePlanner])
def test_an_error_comes_before_anything_is_written(tmp_path: Path, planner: Any) -> None:
    path = tmp_path / "ckpt"
    writer = BcpWriter(path, unsafe_objects="error")
    with pytest.raises(CheckpointException) as caught:
        dcp.save(STATE, storage_writer=writer, planner=planner and planner())
    ((error, *_),) = caught.value.failures.values()
    assert type(error) is UnsafeObjectError
    assert "'schedule'" in str(error)
    assert not path.exists()
    safe = {key: value for key, value in STATE.items() if key == "weight"}
    dcp.save(safe, storage_writer=writer, planner=planner and planner())
    dcp.load({"weight": torch.zeros(3, dtype=torch.int64)}, storage_reader=BcpReader(path))


def test_an_error_for_a_tensor_of_a_class_of_the_user_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match="'tagged'"):
        dcp.save(
            {"tagged": torch.arange(3.0).as_subclass(Tagged)},
            storage_writer=BcpWriter(tmp_path, unsafe_objects="error"),
        )
    assert not [*tmp_path.iterdir()]


def test_a_wrong_word_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="warn, error, allow"):
        BcpWriter(tmp_path, unsafe_objects="perhaps")


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_damaged_archives_that_torch_reads(method: int) -> None:
    """Whatever byte is damaged, the value is as it was, or the error says that it is damaged."""
    value = (torch.arange(50), "text")
    saved, packed = io.BytesIO(), io.BytesIO()
    torch.save(value, saved)
    with zipfile.ZipFile(saved) as old, zipfile.ZipFile(packed, "w", method) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    whole = packed.getvalue()
    assert load_plain_data("w", bytearray(whole), Config())[0].equal(value[0])
    num_refused = 0
    for at in range(0, len(whole), 3):
        damaged = bytearray(whole)
        damaged[at] ^= 0x10
        try:
            got = load_plain_data("w", damaged, Config())
        except (CorruptCheckpointError, UnsafeObjectError):
            num_refused += 1
        else:
            assert got[0].equal(value[0])
            assert got[1:] == value[1:]
    assert num_refused > 100
