# SPDX-License-Identifier: Apache-2.0
"""Tests ``register``: unchanged scripts then use bytecheckpoint, explicit arguments still win, and it can be undone."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

import bytecheckpoint
from bytecheckpoint.dcp import default_storage
from bytecheckpoint.errors import UnsupportedError

LIMIT_S = 60.0
TESTS = Path(__file__).parent.parent
STEPS = ("save", "save_in_a_thread", "save_in_a_process", "explicit_arguments", "stock_checkpoint", "url", "no_path")
# In these steps the registered script writes our files. Everything else must be equal.
OURS = {"save", "save_in_a_thread", "save_in_a_process"}


def run(root: Path, who: str) -> dict[str, Any]:
    environ = {**os.environ, "PYTHONPATH": str(TESTS)}
    command = [sys.executable, "-m", "interop.trainer", str(root), who, *STEPS]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    results: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return results


def test_the_same_script_with_and_without(tmp_path: Path) -> None:
    pytest.importorskip("fsspec", reason="URLs need fsspec")
    results = {}
    for who in ("stock", "registered"):
        root = tmp_path / who
        root.mkdir()
        old = {"model": {"w": torch.full((50, 4), 9.0), "b": torch.arange(3)}, "step": 9, "lrs": [0.1, 9]}
        dcp.save(old, storage_writer=dcp.FileSystemWriter(root / "old"), no_dist=True)
        results[who] = run(root, who)
    for step in STEPS:
        stock, ours = results["stock"][step], results["registered"][step]
        if step in OURS:
            pairs = zip(stock, ours, strict=True) if step == "save_in_a_process" else [(stock, ours)]
            for (stock_is_ours, stock_values), (ours_is_ours, our_values) in pairs:
                assert (stock_is_ours, ours_is_ours) == (False, True), step
                assert stock_values == our_values
        else:
            assert stock == ours, step
    assert results["registered"]["explicit_arguments"][:2] == [False, True]
    assert len(results["registered"]["no_path"]) == 2


def names() -> dict[str, Any]:
    return {
        f"{module.__name__}.{name}": getattr(module, name)
        for module in (state_dict_saver, state_dict_loader)
        for name in dir(module)
        if not name.startswith("__")
    }


def is_ours(path: Path) -> bool:
    return (path / ".metadata").read_bytes()[-8:-1] == b"BCPMETA"


def test_everything_is_undone(tmp_path: Path) -> None:
    before = names()
    bytecheckpoint.unregister()  # no effect
    with bytecheckpoint.registered():
        changed = {name for name, value in names().items() if value is not before[name]}
        assert changed
        dcp.save({"a": 1}, checkpoint_id=tmp_path / "in", no_dist=True)
        inside = names()
        with bytecheckpoint.registered(allow_pickle=True):
            assert names() == inside, "a block in another one changes nothing"
        assert names() == inside
    assert names() == before
    dcp.save({"a": 1}, checkpoint_id=tmp_path / "out", no_dist=True)
    assert is_ours(tmp_path / "in")
    assert not is_ours(tmp_path / "out")
    with pytest.raises(ZeroDivisionError), bytecheckpoint.registered():
        _ = 1 / 0
    assert names() == before


def test_register_in_a_block_stays_and_unregister_leaves_the_block_alone() -> None:
    before = names()
    with bytecheckpoint.registered():
        inside = names()
        bytecheckpoint.register(allow_pickle=True)
        assert names() == inside, "a second register changes nothing"
    assert names() == inside
    bytecheckpoint.unregister()
    assert names() == before
    bytecheckpoint.register()
    with bytecheckpoint.registered():
        inside = names()
        bytecheckpoint.unregister()
        assert names() == inside
    assert names() == before


def test_blocks_of_several_threads(tmp_path: Path) -> None:
    """The thread that leaves its block first does not unregister for the others."""
    before = names()
    is_in, may_leave = threading.Event(), threading.Event()

    def first() -> None:
        with bytecheckpoint.registered():
            is_in.set()
            assert may_leave.wait(LIMIT_S)

    thread = threading.Thread(target=first)
    thread.start()
    assert is_in.wait(LIMIT_S)
    with bytecheckpoint.registered():
        may_leave.set()
        thread.join(LIMIT_S)
        dcp.save({"a": 1}, checkpoint_id=tmp_path, no_dist=True)
    assert is_ours(tmp_path)
    assert names() == before


def test_objects_that_need_pickle(tmp_path: Path) -> None:
    value = {"o": argparse.Namespace(a=1)}
    for allow_pickle in (False, True):
        with bytecheckpoint.registered(allow_pickle=allow_pickle):
            dcp.save(value, checkpoint_id=tmp_path, no_dist=True)
            got: dict[str, Any] = {"o": None}
            if allow_pickle:
                dcp.load(got, checkpoint_id=tmp_path, no_dist=True)
                assert got == value
            else:
                with pytest.raises(CheckpointException, match=r"argparse\.Namespace"):
                    dcp.load(got, checkpoint_id=tmp_path, no_dist=True)


def test_a_save_that_has_begun_outlives_unregister(tmp_path: Path) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with bytecheckpoint.registered():
            future = dcp.async_save({"w": torch.ones(1000, 1000)}, checkpoint_id=tmp_path)
        future.result()  # type: ignore[union-attr]
        assert is_ours(tmp_path)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("_storage_setup", lambda storage, somewhere, reader=False: None),
        ("_ThreadBasedAsyncCheckpointExecutor", type("Other", (), {"execute_save": lambda self, save: None})),
        ("_save_state_dict", lambda state_dict: None),
    ],
)
def test_another_torch_is_refused_whole(monkeypatch: pytest.MonkeyPatch, name: str, value: Any) -> None:
    monkeypatch.setattr(state_dict_saver, name, value)
    before = names()
    with pytest.raises(UnsupportedError, match=f"torch {torch.__version__.split('+')[0]}"):
        bytecheckpoint.register()
    assert names() == before


def test_settings_are_those_of_planners_too() -> None:
    with bytecheckpoint.registered(config=bytecheckpoint.Config(planner_cache_capacity=3)):
        planner: Any = state_dict_saver.DefaultSavePlanner()  # type: ignore[attr-defined]
        assert planner.config.planner_cache_capacity == 3


class Counter:
    """A Stateful object."""

    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": torch.tensor(self.count)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = int(state["count"])


class CountingTensor(torch.Tensor):
    """A tensor that is Stateful."""

    def state_dict(self) -> dict[str, Any]:
        return {"sum": torch.Tensor(self).sum()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = float(state["sum"])


def counting(count: int) -> dict[str, Any]:
    values = torch.full((3,), float(count)).as_subclass(CountingTensor)
    return {"counter": Counter(count), "values": values, "plain": torch.full((2,), float(count)), "step": count}


@pytest.mark.parametrize("is_registered", [False, True])
def test_what_has_a_state_of_its_own_is_asked_for_it(tmp_path: Path, is_registered: bool) -> None:
    with bytecheckpoint.registered() if is_registered else contextlib.nullcontext():
        dcp.save(counting(5), checkpoint_id=tmp_path, no_dist=True)
        got = counting(0)
        dcp.load(got, checkpoint_id=tmp_path, no_dist=True)
    assert (got["counter"].count, got["values"].loaded, got["plain"].tolist(), got["step"]) == (5, 15.0, [5.0, 5.0], 5)
    assert torch.equal(torch.Tensor(got["values"]), torch.zeros(3)), "it is its state that was saved"
    assert is_ours(tmp_path) == is_registered


@pytest.fixture
def unwarned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_storage, "_has_warned_of_url", False)


@pytest.mark.usefixtures("unwarned")
def test_the_first_url_of_a_process_is_told(tmp_path: Path) -> None:
    pytest.importorskip("fsspec", reason="URLs need fsspec")
    with bytecheckpoint.registered(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for name in ("a", "b"):
            dcp.save({"w": torch.ones(3)}, checkpoint_id=f"local://{tmp_path}/secret/{name}", no_dist=True)
        dcp.load({"w": torch.ones(3)}, checkpoint_id=f"local://{tmp_path}/secret/a", no_dist=True)
    (told,) = [str(warning.message) for warning in said if "register()" in str(warning.message)]
    assert told.startswith("bytecheckpoint: local://...: register() leaves URLs to DCP's own writer and reader")
    assert "secret" not in told


@pytest.mark.usefixtures("unwarned")
def test_file_urls_are_paths(tmp_path: Path) -> None:
    state = {"w": torch.ones(3)}
    with bytecheckpoint.registered(), warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        dcp.save(state, checkpoint_id=f"file://{tmp_path}/a%20b", no_dist=True)
        assert is_ours(tmp_path / "a b")
        state["w"].zero_()
        dcp.load(state, checkpoint_id=f"file://{tmp_path}/a%20b", no_dist=True)
    assert torch.equal(state["w"], torch.ones(3))
