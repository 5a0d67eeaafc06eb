# SPDX-License-Identifier: Apache-2.0
"""Tests staging that goes on after the call returned, with a stand-in for a tree whose tensors are on a device.

``tests/gpu`` tests what devices themselves do.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.equality import assert_loads
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from bytecheckpoint import BcpStager, BcpWriter, Config, async_save_state_dict
from bytecheckpoint.compat import private_names as _compat
from bytecheckpoint.errors import CheckpointError, DeviceError
from bytecheckpoint.native import _C
from bytecheckpoint.staging import background as _background
from bytecheckpoint.staging import staged_state as _staged

LIMIT_S = 30.0
RAISES = Config(on_staging_busy="raise")


class Device:
    """Controls the stand-in: it copies until ``goes_on`` is set, then raises ``error`` if there is one."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self.error: BaseException | None = None
        self.slow_because = ""
        self.calls: list[str] = []


class TreeOfDevice:
    """A tree of host tensors that reports that they are on device 3."""

    device: Device

    def __init__(self, state: Any, copy_other: Any, rewrap: Any, parts_of: Any) -> None:
        self._tree = _C.StagedTree(state, copy_other, rewrap, parts_of)
        self.num_bytes = self._tree.num_bytes
        self.devices = [3]
        self.tree = self._tree.tree
        self.slow_because = self.device.slow_because

    def fill(self, lease: Any, num_threads: int, streams: dict[int, int], has_hashes: bool) -> None:
        assert streams == {3: 77}
        self.device.calls.append("fill")
        self._tree.fill(lease, num_threads, {}, has_hashes)

    def wait(self) -> None:
        assert self.device.goes_on.wait(LIMIT_S)
        if self.device.error is not None:
            raise self.device.error
        self.device.calls.append("wait")

    def give_up(self) -> None:
        self.device.calls.append("give_up")

    def checksum(self, num_threads: int) -> None:
        if self.device.calls[-1] != "checksum":  # it has no effect a second time
            self.device.calls.append("checksum")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    made = Device()

    class Extension:
        StagedTree = type("TreeOfThatDevice", (TreeOfDevice,), {"device": made})

        def __getattr__(self, name: str) -> Any:
            return getattr(_C, name)

    monkeypatch.setattr(_staged, "_C", Extension())
    monkeypatch.setattr(_compat, "current_stream", lambda device: {3: 77}[device])
    yield made
    made.goes_on.set()


def test_a_save_begins_when_devices_have_copied(device: Device, tmp_path: Path) -> None:
    writer = BcpWriter(tmp_path, config=Config(overlap_staging=True))
    response = dcp.async_save({"t": torch.ones(1000)}, storage_writer=writer, no_dist=True)
    assert isinstance(response, AsyncSaveResponse)
    assert not response.staging_completion.done()
    assert device.calls == ["fill"]
    device.goes_on.set()
    response.staging_completion.result(LIMIT_S)
    response.upload_completion.result(LIMIT_S)
    assert device.calls == ["fill", "wait", "checksum"]
    assert_loads(tmp_path, {"t": torch.ones(1000)})


def test_without_overlap_the_call_waits(device: Device) -> None:
    device.goes_on.set()
    staged = BcpStager(overlap=False, config=RAISES).stage({"t": torch.ones(1000)})
    assert isinstance(staged, dict)
    assert device.calls == ["fill", "wait", "checksum"]


@pytest.mark.parametrize("error", [DeviceError("refused"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_device_that_fails_at_once_fails_both_futures(device: Device, tmp_path: Path, error: BaseException) -> None:
    device.error = error
    device.goes_on.set()
    for number in range(20):
        writer = BcpWriter(tmp_path / str(number), config=Config(overlap_staging=True, on_staging_busy="raise"))
        response = dcp.async_save({"t": torch.ones(1000)}, storage_writer=writer, no_dist=True)
        assert isinstance(response, AsyncSaveResponse)
        with pytest.raises(DeviceError):
            response.staging_completion.result(LIMIT_S)
        with pytest.raises(DeviceError):
            response.upload_completion.result(LIMIT_S)
        assert not (tmp_path / str(number) / ".metadata").exists()
    assert device.calls == ["fill", "give_up"] * 20  # the memory was given back each time


@pytest.mark.parametrize("error", [DeviceError("refused"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_device_that_fails_fails_the_call_without_overlap(device: Device, error: BaseException) -> None:
    device.error = error
    device.goes_on.set()
    for _ in range(2):
        with pytest.raises(type(error)):
            BcpStager(overlap=False, config=RAISES).stage({"t": torch.ones(1000)})
    assert device.calls == ["fill", "give_up"] * 2


def test_a_handle_says_when_it_is_staged_before_its_turn_to_be_saved(device: Device, tmp_path: Path) -> None:
    turn = threading.Event()
    before = _background.submit("before", lambda: turn.wait(LIMIT_S))
    handle = async_save_state_dict(tmp_path, {"t": torch.ones(1000)}, no_dist=True)
    assert not handle.staged.done()
    device.goes_on.set()
    handle.staged.result(LIMIT_S)
    assert not handle.committed.done()
    turn.set()
    handle.committed.result(LIMIT_S)
    assert before.result(LIMIT_S)
    assert device.calls == ["fill", "wait", "checksum"]
    assert_loads(tmp_path, {"t": torch.ones(1000)})


def test_a_handle_says_that_a_device_failed(device: Device, tmp_path: Path) -> None:
    device.error = DeviceError("refused")
    device.goes_on.set()
    handle = async_save_state_dict(tmp_path, {"t": torch.ones(1000)}, no_dist=True)
    with pytest.raises(DeviceError):
        handle.staged.result(LIMIT_S)
    with pytest.raises(CheckpointError, match="refused"):
        handle.committed.result(LIMIT_S)


def test_what_makes_copies_slow_is_said_once(
    device: Device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_staged, "_has_noted_slow_copies", False)
    device.slow_because = "cudaHostRegister: no"
    device.goes_on.set()
    with caplog.at_level(logging.WARNING, logger="bytecheckpoint"):
        for _ in range(3):
            BcpStager(overlap=False, config=RAISES).stage({"t": torch.ones(1000)})
    assert [record.message for record in caplog.records if "cudaHostRegister: no" in record.message] != []
    assert len(caplog.records) == 1


def test_a_future_of_host_tensors_is_done() -> None:
    staging = BcpStager(overlap=True, config=RAISES).stage({"t": torch.ones(1000)})
    assert isinstance(staging, Future)
    assert staging.done()
