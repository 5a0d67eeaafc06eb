# SPDX-License-Identifier: Apache-2.0
"""Tests that a save of a staged state has the state at the call, and fails if staged bytes have changed since."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import planned_states
import pytest
import torch
import torch.distributed.checkpoint as dcp
from staged_states import (
    HOWS,
    LIMIT_S,
    MARKS,
    RAISES,
    frozen,
    one,
    save_async,
    spoil,
    start,
)
from support.equality import assert_loads
from support.named_values import numbers
from support.ranks import failures
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from bytecheckpoint import BcpSavePlanner, BcpStager, BcpWriter
from bytecheckpoint.errors import CorruptCheckpointError, SaveFailedError

pytestmark = MARKS


def all_tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for item in items for tensor in all_tensors(item)]


@contextlib.contextmanager
def changing(tensors: list[torch.Tensor]) -> Iterator[None]:
    """Changes the tensors over and over in another thread."""
    changed, stop = threading.Event(), threading.Event()

    def change() -> None:
        while not stop.is_set():
            for tensor in tensors:
                spoil(tensor)
            changed.set()

    thread = threading.Thread(target=change)
    thread.start()
    try:
        assert changed.wait(LIMIT_S)
        yield
    finally:
        stop.set()
        thread.join()


def large() -> dict[str, Any]:
    torch.manual_seed(1)  # some of it is random
    state = planned_states.more()
    state["large"] = [numbers("large", (700, 1500)), numbers("turned", (500, 900), torch.bfloat16).t()]
    return state


@pytest.mark.parametrize("planner", [None, DefaultSavePlanner, BcpSavePlanner])
@pytest.mark.parametrize("how", HOWS)
def test_later_changes_are_not_saved(tmp_path: Path, how: str, planner: Callable[[], Any] | None) -> None:
    state = large()
    future = start(how, state, tmp_path, planner and planner())
    with changing(all_tensors(state)):
        state["optimizer"]["lrs"].append(0.3)
        state["objects"]["nested"].clear()
        state["objects"]["set"].add(3)
        future.result(LIMIT_S)
    assert_loads(tmp_path, large())


@pytest.mark.parametrize("how", HOWS)
def test_overlap_gives_two_futures(tmp_path: Path, how: str) -> None:
    state = one(1)
    response = save_async(how, state, tmp_path, config=dataclasses.replace(RAISES, overlap_staging=True))
    assert isinstance(response, AsyncSaveResponse)
    assert response.staging_completion.result(LIMIT_S) is None
    spoil(state)
    response.upload_completion.result(LIMIT_S)
    assert_loads(tmp_path, one(1))
    second = save_async(how, one(2), tmp_path)
    assert isinstance(second, Future), "the setting is of one save"
    second.result(LIMIT_S)


def test_overlap_of_a_stager_goes_before_its_config() -> None:
    overlapping = dataclasses.replace(RAISES, overlap_staging=True)
    assert isinstance(BcpStager(False, config=overlapping).stage(one(1)), dict)
    staged = BcpStager(True, config=RAISES).stage(one(1))
    assert isinstance(staged, Future)
    assert frozen(staged.result(LIMIT_S)) == frozen(one(1))


@pytest.mark.parametrize(
    "stager", [lambda: DefaultStager(StagingOptions(False, False, False, False)), BlockingAsyncStager]
)
def test_stagers_of_dcp_with_our_writer(tmp_path: Path, stager: Callable[[], Any]) -> None:
    state = one(1)
    writer = BcpWriter(tmp_path)
    future: Any = dcp.async_save(state, storage_writer=writer, async_stager=stager(), no_dist=True)
    spoil(state)
    future.result(LIMIT_S)
    assert_loads(tmp_path, one(1))


class Halves(DefaultSavePlanner):
    """Writes each large tensor as two chunks."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        return dataclasses.replace(plan, items=[half for item in plan.items for half in halves(item)])

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            return super().resolve_data(write_item)
        assert write_item.tensor_data is not None
        chunk = write_item.tensor_data.chunk
        whole: torch.Tensor = self.state_dict[write_item.index.fqn]
        for dim, (begin, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            whole = whole.narrow(dim, begin, size)
        return whole


def halves(item: WriteItem) -> list[WriteItem]:
    if item.tensor_data is None:
        return [item]
    size = item.tensor_data.size
    items = []
    for begin, end in ((0, size[0] // 2), (size[0] // 2, size[0])):
        offsets, sizes = torch.Size([begin, *[0] * (len(size) - 1)]), torch.Size([end - begin, *size[1:]])
        chunk = ChunkStorageMetadata(offsets, sizes)
        tensor_data = dataclasses.replace(item.tensor_data, chunk=chunk)
        items.append(WriteItem(MetadataIndex(item.index.fqn, offsets), WriteItemType.SHARD, tensor_data=tensor_data))
    return items


def waiting() -> dict[str, Any]:
    """Returns a tensor of several stretches of bytes with a checksum each, and one of less than a stretch."""
    return {"model": {"large": numbers("large", (1000, 900)), "small": numbers("small", (6, 4))}, "step": 1}


@pytest.mark.parametrize("planner", [DefaultSavePlanner, BcpSavePlanner, Halves])
@pytest.mark.parametrize(
    ("name", "place"), [("large", (0, 0)), ("large", (700, 5)), ("large", (999, 899)), ("small", (5, 3))]
)
def test_staged_bytes_that_change_are_found(
    tmp_path: Path, planner: Callable[[], Any], name: str, place: tuple[int, int]
) -> None:
    staged: Any = BcpStager(config=RAISES).stage(waiting())
    dcp.save(staged, storage_writer=BcpWriter(tmp_path), planner=planner(), no_dist=True)
    assert_loads(tmp_path, waiting())
    bits = staged["model"][name].view(torch.int32)
    bits[place] ^= 1
    found = failures(lambda: dcp.save(staged, storage_writer=BcpWriter(tmp_path), planner=planner(), no_dist=True))
    failed = found[0]
    assert isinstance(failed, SaveFailedError)
    assert isinstance(failed.reasons[0], CorruptCheckpointError)
    assert f"model.{name}" in str(failed.reasons[0])
    assert_loads(tmp_path, waiting())
    bits[place] ^= 1
    dcp.save(staged, storage_writer=BcpWriter(tmp_path), planner=planner(), no_dist=True)


def test_memory_that_was_let_go_may_change(tmp_path: Path) -> None:
    staged: Any = BcpStager(config=RAISES).stage(waiting())
    staged.release()
    staged["model"]["small"].zero_()
    dcp.save(staged, storage_writer=BcpWriter(tmp_path), no_dist=True)
    wanted = waiting()
    wanted["model"]["small"].zero_()
    assert_loads(tmp_path, wanted)
