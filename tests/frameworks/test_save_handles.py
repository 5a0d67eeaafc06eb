# SPDX-License-Identifier: Apache-2.0
"""Saves in the background: their order, handles, callbacks and failures."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.equality import assert_equal

from bytecheckpoint import Config, find_latest_ckpt_path, load, save, shutdown
from bytecheckpoint.errors import (
    CheckpointError,
    SaveCancelledError,
    StorageError,
)
from bytecheckpoint.staging import background as _background
from bytecheckpoint.training_state import tracker
from frameworks.holding import Gate
from frameworks.small_nets import fingerprint, net, trained
from frameworks.wrapped import train

LIMIT_S = 60.0
pytestmark = pytest.mark.usefixtures("all_is_saved")


# In the background.


def test_an_asynchronous_save_returns_before_a_byte_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch, "extra_state")
    state = {**trained(), "extra_state": {"log": ["a"], "numbers": torch.zeros(3)}}
    before = fingerprint(state)
    called = threading.Event()
    handle = save(tmp_path, state, "ddp", fast_saving=True, global_steps=1, callback=called.set)
    assert gate.arrived.wait(LIMIT_S)
    assert not handle.committed.done()
    assert handle.report is None
    assert find_latest_ckpt_path(tmp_path) is None
    assert not list(tmp_path.rglob(".metadata"))
    handle.staged.result(LIMIT_S)
    train(state["model"], state["optimizer"], 2)  # the save holds the state at the time of the call
    state["extra_state"]["log"].append("b")
    state["extra_state"]["numbers"].fill_(7)
    gate.open(monkeypatch)
    report = handle.committed.result(LIMIT_S)
    assert handle.report == report
    assert called.wait(LIMIT_S)
    assert find_latest_ckpt_path(tmp_path) == report.path
    other = {**trained(1), "extra_state": {}}
    load(report.path, other, "ddp")
    after = fingerprint(other)
    for what in ("parameters", "optimizers"):
        assert_equal(after[what], before[what])
    assert_equal(other["extra_state"], {"log": ["a"], "numbers": torch.zeros(3)})


def test_steps_are_committed_in_the_order_of_the_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch, "model")
    state = trained()
    written: list[int] = []
    write = tracker.write_tracker
    monkeypatch.setattr(
        "bytecheckpoint.training_state.saving.write_tracker",
        lambda root, step: (written.append(step), write(root, step))[1],
    )
    background = save(tmp_path, state, "ddp", fast_saving=True, global_steps=100)
    assert gate.arrived.wait(LIMIT_S)
    train(state["model"], state["optimizer"], 1)
    second = save(
        tmp_path, state, "ddp", fast_saving=True, global_steps=200, config=Config(on_staging_busy="double_buffer")
    )
    train(state["model"], state["optimizer"], 1)
    third: list[Any] = []
    thread = threading.Thread(target=lambda: third.append(save(tmp_path, state, "ddp", global_steps=300)))
    thread.start()  # it waits for the earlier saves, so the tracker never goes back
    gate.open(monkeypatch)
    thread.join(LIMIT_S)
    assert background.committed.done()
    assert second.committed.done()
    assert written == [100, 200, 300]
    latest = find_latest_ckpt_path(tmp_path)
    assert latest == third[0].path == str(tmp_path / "global_step_300")
    other = trained(1)
    load(latest, other, "ddp")
    assert_equal(fingerprint(other)["parameters"], fingerprint(state)["parameters"])


def test_a_save_within_a_callback(tmp_path: Path) -> None:
    state = {"model": net()}
    handle = save(tmp_path, state, "ddp", True, 1, lambda: save(tmp_path / "copy", state, "ddp", global_steps=1))
    handle.committed.result(LIMIT_S)
    assert find_latest_ckpt_path(tmp_path / "copy")


def test_a_save_is_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = trained()
    save(tmp_path, state, "ddp", global_steps=1)
    gate = Gate(monkeypatch, "model")
    handle = save(tmp_path, state, "ddp", fast_saving=True, global_steps=2)
    assert gate.arrived.wait(LIMIT_S)
    with pytest.raises(TimeoutError, match="has not ended"):
        handle.cancel(0.01)
    gate.open(monkeypatch)
    assert handle.cancel(LIMIT_S) is True
    with pytest.raises(SaveCancelledError):
        handle.committed.result(0)
    assert handle.report is None
    assert find_latest_ckpt_path(tmp_path) == str(tmp_path / "global_step_1")
    assert (tmp_path / tracker.TRACKER).read_text() == "1"
    assert not (tmp_path / "global_step_2" / "model" / ".metadata").exists()
    handle = save(tmp_path, state, "ddp", fast_saving=True, global_steps=2)
    handle.committed.result(LIMIT_S)
    assert handle.cancel() is False
    assert find_latest_ckpt_path(tmp_path) == str(tmp_path / "global_step_2")


@pytest.mark.parametrize("way", ["save", "fast", "shutdown"])
def test_a_failure_that_nobody_looked_at_is_raised_next(tmp_path: Path, way: str) -> None:
    state = {"model": net()}
    save("/proc/nowhere", state, "ddp", fast_saving=True, global_steps=1)
    _background.wait_for_saves(LIMIT_S)
    comes_next: dict[str, Callable[[], object]] = {
        "save": lambda: save(tmp_path, state, "ddp"),
        "fast": lambda: save(tmp_path, state, "ddp", fast_saving=True),
        "shutdown": shutdown,
    }
    with pytest.raises(CheckpointError, match=r"/proc/nowhere.* failed, and its result was not read"):
        comes_next[way]()
    save(tmp_path, state, "ddp").committed.result(0)


def test_the_handle_tells_what_failed(tmp_path: Path) -> None:
    state = {"model": net()}
    handle = save("/proc/nowhere", state, "ddp", fast_saving=True)
    with pytest.raises(StorageError, match="nowhere"):
        handle.committed.result(LIMIT_S)
    assert handle.report is None
    save(tmp_path, state, "ddp")  # does not raise, because the test has looked at the failure


# Callbacks.


def test_the_callback_comes_after_the_tracker_and_may_fail(tmp_path: Path) -> None:
    seen: list[str | None] = []

    def callback() -> None:
        seen.append(find_latest_ckpt_path(tmp_path))
        raise KeyError("mine")

    state = {"model": net()}
    with pytest.warns(RuntimeWarning, match="is committed; its callback raised KeyError: 'mine'"):
        save(tmp_path, state, "ddp", global_steps=4, callback=callback)
    assert seen == [str(tmp_path / "global_step_4")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(tmp_path, state, "ddp", True, 5, callback).committed.result(LIMIT_S)
    assert seen[1:] == [str(tmp_path / "global_step_5")]


def test_no_callback_of_a_save_that_failed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Gate(monkeypatch, "model", OSError(5, "broken"))
    called: list[int] = []
    with pytest.raises(CheckpointError):
        save(tmp_path, {"model": net()}, "ddp", global_steps=1, callback=lambda: called.append(1))
    assert called == []
    assert find_latest_ckpt_path(tmp_path) is None
