# SPDX-License-Identifier: Apache-2.0
"""Tests that objects load under torch's weights_only rules, and that all others load only if the caller allows them."""

from __future__ import annotations

import collections
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException

from bytecheckpoint import BcpReader, BcpWriter, Config, async_save_state_dict, load_state_dict, save_state_dict
from bytecheckpoint.errors import SaveFailedError, UnsafeObjectError
from bytecheckpoint.native import _C


class Schedule:
    def __init__(self, warmup: int) -> None:
        self.warmup = warmup

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schedule) and other.warmup == self.warmup

    __hash__ = None  # type: ignore[assignment]


class Harmful:
    """Unpickling it makes a directory."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def save(path: Path, value: Any) -> None:
    dcp.save({"a": torch.arange(3), "value": value}, storage_writer=BcpWriter(path))


def load(path: Path, **arguments: Any) -> Any:
    got: dict[str, Any] = {"a": torch.zeros(3, dtype=torch.int64), "value": None}
    # Without flattening a list or dict is one object, and the planner puts it into `got` itself.
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.load(got, storage_reader=BcpReader(path, **arguments), planner=planner)
    assert torch.equal(got["a"], torch.arange(3))
    return got["value"]


def refusal(path: Path) -> UnsafeObjectError:
    with pytest.raises(CheckpointException) as caught:
        load(path)
    (error,) = [wrapped[0] for wrapped in caught.value.failures.values()]
    assert isinstance(error, UnsafeObjectError)
    return error


@pytest.mark.parametrize(
    "value",
    [
        0,
        -(2**70),
        2.5,
        "text \u00e4\U0001f600",
        b"\x00bytes",
        None,
        True,
        complex(1, 2),
        (1, (2, "x")),
        [1, [2, {"k": 3}]],
        {"a": 1, 2: "b", (1, 2): [3]},
        {1, 2},
        collections.OrderedDict([("z", 1), ("a", 2)]),
        torch.Size([3, 4]),
        torch.float32,
        torch.device("cpu"),
        "x" * 1_000_000,
    ],
    ids=lambda value: type(value).__name__,
)
def test_plain_objects_come_back(tmp_path: Path, value: Any) -> None:
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.save({"a": torch.arange(3), "value": value}, storage_writer=BcpWriter(tmp_path), planner=planner)
    got = load(tmp_path)
    assert type(got) is type(value)
    assert got == value


def test_a_class_of_the_user_is_refused(tmp_path: Path) -> None:
    save(tmp_path, Schedule(5))
    text = str(refusal(tmp_path))
    assert text.startswith("'value'")
    assert "Schedule" in text
    assert "add_safe_globals" in text
    assert "allow_pickle=True" in text


def test_allow_pickle(tmp_path: Path) -> None:
    save(tmp_path, Schedule(5))
    assert load(tmp_path, config=Config(allow_pickle=True)) == Schedule(5)


def test_safe_globals(tmp_path: Path) -> None:
    save(tmp_path, Schedule(7))
    with torch.serialization.safe_globals([Schedule]):
        assert load(tmp_path) == Schedule(7)
    refusal(tmp_path)


def test_loading_runs_no_code(tmp_path: Path) -> None:
    trace = tmp_path / "ran"
    save(tmp_path / "ckpt", Harmful(str(trace)))
    refusal(tmp_path / "ckpt")
    assert not trace.exists()
    load(tmp_path / "ckpt", config=Config(allow_pickle=True))
    assert trace.exists()


def test_a_load_that_wants_other_keys_is_not_disturbed(tmp_path: Path) -> None:
    save(tmp_path, Schedule(5))
    got = {"a": torch.zeros(3, dtype=torch.int64)}
    dcp.load(got, storage_reader=BcpReader(tmp_path))
    assert torch.equal(got["a"], torch.arange(3))


def test_stock_reads_it_as_ever(tmp_path: Path) -> None:
    save(tmp_path, Schedule(5))
    got: dict[str, Any] = {"a": torch.zeros(3, dtype=torch.int64), "value": None}
    dcp.load(got, storage_reader=dcp.FileSystemReader(tmp_path))
    assert got["value"] == Schedule(5)


def test_an_object_whose_parts_are_in_many_places_is_flattened_and_saved_as_it_is(tmp_path: Path) -> None:
    in_tuples: Any = (1,)
    in_lists: Any = [2]
    depth = 60  # to look at each of the 2 ** 60 places would never end
    for _ in range(depth):
        in_tuples, in_lists = (in_tuples, in_tuples), [in_lists, in_lists]
    assert list(_C.flatten_state_dict({"t": in_tuples, "l": in_lists})[0]) == ["t", "l"]
    async_save_state_dict(tmp_path, {"t": in_tuples, "l": in_lists}).committed.result(30)
    got: dict[str, Any] = {"t": None, "l": None}
    load_state_dict(tmp_path, got)
    for value, bottom in ((got["t"], (1,)), (got["l"], [2])):
        for _ in range(depth):
            assert value[0] is value[1]
            value = value[0]
        assert value == bottom


@pytest.mark.parametrize(
    ("state", "key"),
    [
        ({"a": torch.ones(2), "lock": threading.Lock()}, "lock"),
        ({"n": {"deep": [1, {"f": lambda: 1, "t": torch.ones(1)}]}}, "n.deep.1.f"),
        ({"gen": (i for i in range(3))}, "gen"),
    ],
)
def test_what_cannot_be_pickled_is_named_by_its_key(tmp_path: Path, state: dict[str, Any], key: str) -> None:
    with pytest.raises(SaveFailedError, match=f"'{key}': the object cannot be pickled: .*leave it out of the state"):
        save_state_dict(tmp_path / "step", state, no_dist=True)
    assert not (tmp_path / "step").exists()
