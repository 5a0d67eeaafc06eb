# SPDX-License-Identifier: Apache-2.0
"""``Tiers``: saves commit near by, and go on to the durable place; loads take the nearest."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.cli_runs import run
from support.tier_runs import BIG, LIMIT_S, loaded, save, state_of, tiers, value_at, wait_until

import bytecheckpoint
from bytecheckpoint import (
    Config,
    MemoryTier,
    Retention,
    Tiers,
    async_save_state_dict,
    latest,
    registered,
    resume,
    save_state_dict,
    scan_steps,
    shutdown,
)
from bytecheckpoint.checkpoint import draining
from bytecheckpoint.checkpoint.keeping import note_drain, pins_of
from bytecheckpoint.checkpoint.tier_drains import drain_of
from bytecheckpoint.errors import CheckpointError, CheckpointNotFoundError, ConfigError
from bytecheckpoint.observability.journal import read_drains
from bytecheckpoint.storage.object_store.stores import use_store

pytestmark = pytest.mark.filterwarnings("ignore:.*it is on one device with:RuntimeWarning")

__all__ = ["tiers"]


def block(tiers: Tiers) -> Path:
    """Makes the durable place refuse whatever comes; ``unlink`` ends it."""
    Path(tiers.durable).write_text("no folder")
    return Path(tiers.durable)


# Places, and what is none.


def test_places_of_a_step(tiers: Tiers, tmp_path: Path) -> None:
    step = tiers / "step-7"
    assert (str(step), os.fspath(step)) == (f"{tmp_path}/near/step-7",) * 2
    assert step.places == (tmp_path / "near/step-7", tmp_path / "durable/step-7")
    assert tiers / "step-7/model" == step / "model"
    assert tiers.step_of("/elsewhere/step-7/") == tiers.step_of(step) == step
    assert hash(step) == hash(tiers / "step-7")
    assert os.fspath(tiers) == f"{tmp_path}/near"
    assert Tiers(durable="memory://tiers/run").places == ("memory://tiers/run",)
    assert not (tmp_path / "near").exists()


@pytest.mark.parametrize("name", ["", "foo", "step-", "step-1/..", "../step-1", "step-1//model", "/step-1", "."])
def test_what_is_no_step(tiers: Tiers, name: str) -> None:
    with pytest.raises(ConfigError, match="must be the name of a step, such as 'step-100'"):
        tiers / name


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "near or durable must be given"),
        ({"near": "a", "durable": "./a"}, "near and durable are one folder"),
        ({"near": "s3://bucket/run"}, "must be a directory; a store goes to durable"),
        ({"near": "a", "durable": "https://host/run"}, "over HTTP a checkpoint can only be read"),
        ({"near": "a", "durable_every": 0}, "must be an int >= 1"),
        ({"near": "a", "durable_every": True}, "must be an int >= 1"),
        ({"near": "a", "most_waiting": 0}, "must be an int >= 1"),
        ({"near": "a", "drain_bytes_per_s": -1}, "must be an int >= 0"),
        ({"near": "a", "drain": "process"}, "must be 'thread' or 'command'"),
        ({"near": "a", "durable": "ftp://host/run"}, "unknown kind of store"),
    ],
)
def test_arguments_out_of_range(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Tiers(**arguments)


def test_settings_of_a_dict(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    assert Tiers.of({"durable": "memory://t/run"}, run) == Tiers(near=run, durable="memory://t/run")
    assert Tiers.of({"near": tmp_path / "near"}, run) == Tiers(near=tmp_path / "near", durable=run)
    assert Tiers.of({"near": "a", "durable": "b"}, run) == Tiers(near="a", durable="b")
    assert Tiers.of(None, run) is None
    assert Tiers.of({"memory": {"keep": 3}}, run) == Tiers(memory=MemoryTier(keep=3), near=run)
    with pytest.raises(ConfigError, match="no such argument: 'nearr'; did you mean 'near'"):
        Tiers.of({"nearr": "a"}, run)
    with pytest.raises(ConfigError, match="no such argument: 'kept'"):
        Tiers.of({"memory": {"kept": 3}}, run)
    with pytest.raises(ConfigError, match="must be Tiers, or a dict"):
        Tiers.of("run", run)  # type: ignore[arg-type]


def test_one_device_is_said_once(tiers: Tiers) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        save(tiers, 1)
        save(tiers, 2)
    assert ["is on one device with" in str(each.message) for each in said] == [True]


def test_two_durable_places_of_one_run(tiers: Tiers, tmp_path: Path) -> None:
    save(tiers, 1)
    with pytest.raises(ConfigError, match=r"its steps go to .*durable, and not to .*other"):
        save(Tiers(near=tiers.near, durable=tmp_path / "other"), 2)


# Saving, and the way on.


def test_a_save_goes_on_to_the_durable_place(tiers: Tiers, tmp_path: Path) -> None:
    report = save(tiers, 1)
    assert (report.tier, report.path) == ("near", f"{tmp_path}/near/step-1")
    shutdown()
    assert (value_at(tmp_path / "near/step-1"), value_at(tmp_path / "durable/step-1")) == (1, 1)
    assert pins_of([str(tmp_path / "near/step-1")]) == {}
    lines = [json.loads(line) for line in (tmp_path / "near/step-1/.bcp/journal.jsonl").read_text().splitlines()]
    assert [(line["kind"], line["path"]) for line in lines] == [("save", "step-1"), ("drain", "step-1")]
    assert lines[0]["report"]["tier"] == "near"
    assert lines[1]["target"] == f"{tmp_path}/durable/step-1"
    assert lines[1]["save_id"] == lines[0]["save_id"] == report.save_id
    assert lines[1]["num_bytes"] == report.bytes_written
    assert lines[1]["total_s"] > 0
    state = {"w": torch.zeros(1000)}
    dcp.load(state, checkpoint_id=str(tmp_path / "durable/step-1"))  # by stock DCP
    assert state["w"].eq(1).all()


def test_futures_of_a_handle(tiers: Tiers, tmp_path: Path) -> None:
    handle = async_save_state_dict(tiers / "step-1", state_of(1), no_dist=True)
    assert handle.near is handle.committed
    assert handle.durable is not None
    assert handle.durable is handle.durable
    assert not handle.durable.cancel()
    assert handle.durable.result(LIMIT_S) == f"{tmp_path}/durable/step-1"
    assert value_at(tmp_path / "durable/step-1") == 1
    plain = async_save_state_dict(tmp_path / "plain", state_of(1), no_dist=True)
    assert (plain.near, plain.durable) == (None, None)
    plain.committed.result()
    failing = async_save_state_dict(tiers / "step-1", state_of(2), no_dist=True, overwrite=False)
    assert failing.durable is not None
    with pytest.raises(CheckpointError, match="already exists"):
        failing.durable.result(LIMIT_S)
    assert isinstance(failing.committed.exception(), CheckpointError)


def test_with_one_place_alone(tmp_path: Path) -> None:
    for name in ("near", "durable"):
        tiers = Tiers(**{name: tmp_path / name})  # type: ignore[arg-type]
        handle = async_save_state_dict(tiers / "step-1", state_of(1), no_dist=True)
        assert handle.committed.result().tier == name
        assert (handle.near is None, handle.durable is None) == (name == "durable", name == "near")
        if handle.durable is not None:
            assert handle.durable.result(LIMIT_S) == f"{tmp_path}/durable/step-1"
        assert loaded(tiers, 1) == (1, f"{tmp_path / name}/step-1")
        assert [folder.tiers for folder in scan_steps(tiers)] == [{name: "complete"}]


def test_to_a_store(tmp_path: Path) -> None:
    tiers = Tiers(near=tmp_path / "near", durable="memory://tiers/store")
    handle = async_save_state_dict(tiers / "step-1", state_of(1), no_dist=True)
    assert handle.durable is not None
    assert handle.durable.result(LIMIT_S) == "memory://tiers/store/step-1"
    shutil.rmtree(tmp_path / "near")
    assert latest(tiers) == "memory://tiers/store/step-1"
    assert loaded(tiers, 1) == (1, "memory://tiers/store/step-1")


def test_options_of_the_store_are_those_of_the_tiers(tmp_path: Path) -> None:
    """Whatever settings a save or a load has: they are of the call, and mostly without options."""
    options = {"endpoint": "http://127.0.0.1:9", "access_key_id": "of tiers", "secret_access_key": "s", "region": "r"}
    tiers = Tiers(near=tmp_path, durable="s3://tiers/of/run", config=Config(storage_options=options))
    tiers.open()
    for url in ("s3://tiers/of/run", "s3://tiers/of/run/step-1"):
        store: Any = use_store(url, Config(io_timeout_s=7.0))._store
        assert store.config["access_key_id"] == "of tiers"
    own: Any = use_store("s3://tiers/of/run/step-1", Config(storage_options={**options, "access_key_id": "own"}))._store
    assert own.config["access_key_id"] == "own"
    other: Any = use_store("s3://tiers/of/runs", Config())._store
    assert "access_key_id" not in other.config


def test_every_third_save(tmp_path: Path) -> None:
    tiers = Tiers(near=tmp_path / "near", durable=tmp_path / "durable", durable_every=3)
    handles = [async_save_state_dict(tiers / f"step-{n}", state_of(n), no_dist=True) for n in range(1, 7)]
    left_out = [handle.durable and handle.durable.exception(LIMIT_S) for handle in handles]
    assert [error is None for error in left_out] == [False, False, True, False, False, True]
    assert "durable_every=3 takes another save" in str(left_out[0])
    shutdown()
    assert sorted(path.name for path in (tmp_path / "durable").iterdir()) == ["step-3", "step-6"]


def test_live_models_with_their_tracker(tiers: Tiers, tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    state = {"model": model, "extra_state": {"v": 1}}
    handle = bytecheckpoint.save(tiers, state, "ddp", global_steps=5, fast_saving=True, role="actor")
    assert handle.durable is not None
    assert handle.durable.result(LIMIT_S) == f"{tmp_path}/durable/actor/global_step_5"
    shutdown()
    assert (tmp_path / "durable/actor/latest_checkpointed_iteration.txt").read_text() == "5"
    with torch.no_grad():
        model.weight.zero_()
    shutil.rmtree(tmp_path / "near")
    found = latest(tiers, "actor")
    assert found == f"{tmp_path}/durable/actor/global_step_5"
    bytecheckpoint.load(tiers / "global_step_5", state, "ddp", role="actor")
    assert model.weight.ne(0).any()
    resumed = resume(tiers, state, framework="ddp", role="actor")
    assert resumed is not None
    assert resumed.path == found
    with pytest.raises(CheckpointNotFoundError, match="durable/actor has the steps 5"):
        bytecheckpoint.load(tiers / "global_step_6", state, "ddp", role="actor")


def test_register(tiers: Tiers, tmp_path: Path) -> None:
    with registered(tiers=tiers):
        dcp.save(state_of(1), checkpoint_id="anywhere/step-1")
        saving: Any = dcp.async_save(state_of(2), checkpoint_id="step-2")
        saving.result()
        shutdown()
        shutil.rmtree(tmp_path / "near/step-1")
        state = state_of(0)
        dcp.load(state, checkpoint_id="anywhere/step-1")
        assert state["w"].eq(1).all()
        for call in (dcp.save, dcp.load):
            with pytest.raises(ConfigError, match="must be the name of a step"):
                call(state, checkpoint_id=str(tmp_path / "model"))
        dcp.save(state, storage_writer=bytecheckpoint.BcpWriter(tmp_path / "own"))  # what is passed wins
    assert (tmp_path / "own/.metadata").exists()
    assert sorted(path.name for path in (tmp_path / "durable").iterdir()) == ["step-1", "step-2"]
    assert not Path("anywhere").exists()


# A durable place that hangs, refuses, is full.


@pytest.fixture
def hangs(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Is set when the first copy has begun; no copy goes on before the end of the test, unless it is stopped."""
    copy, begun, released = draining.copy_checkpoint, threading.Event(), threading.Event()

    def held(*args: Any, progress: Any, **options: Any) -> Any:
        begun.set()
        while not released.wait(0.01):
            progress(0, 1)
        return copy(*args, progress=progress, **options)

    monkeypatch.setattr(draining, "copy_checkpoint", held)
    yield begun
    released.set()


def test_a_backlog_is_bounded_and_said(tiers: Tiers, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    refusing = block(tiers)
    handles = {}
    with caplog.at_level(logging.WARNING, "bytecheckpoint"):
        for step in range(1, 6):
            handles[step] = async_save_state_dict(tiers / f"step-{step}", state_of(step), no_dist=True)
            handles[step].committed.result()
        found = drain_of(f"{tiers.near}/step-1")
        assert found is not None
        dropped = {int(name[-1]) for name in found[0].left_out}
        assert (len(dropped), {4, 5} & dropped) == (2, set())  # of the older ones, one may be tried right now
        for step in dropped:
            assert "newer steps wait" in str((handles[step].durable or handles[step].committed).exception(LIMIT_S))
            assert f"step-{step} is dropped, and not copied to" in caplog.text
        wait_until(lambda: "it is tried again" in caplog.text)
    noted = read_drains(tiers.near)  # one line a step, however often it is tried
    assert sorted(line["step"] for line in noted if "dropped" in line) == sorted(dropped)
    failed = [line["path"] for line in noted if "failed" in line]
    assert failed
    assert len({*failed}) == len(failed)
    kept = [step for step in range(1, 6) if step not in dropped]
    waiting = [f"{tiers.near}/step-{step}" for step in kept]
    assert [*pins_of(waiting)] == waiting
    states = {folder.step: folder.tiers.get("durable", "") for folder in scan_steps(tiers)}
    assert {states[step] for step in kept} <= {"waits", "draining"}  # one may be tried right now
    assert Retention(tiers, keep_latest=1).prune().kept == kept  # what waits is not removed
    with pytest.raises(CheckpointError, match=r"shutdown\(\): .*step-5.* are near by, and not in durable storage"):
        shutdown()
    refusing.unlink()
    save(tiers, 6)  # the next save goes on with what waits
    shutdown()
    assert {"step-5", "step-6"} < {path.name for path in (tmp_path / "durable").iterdir()}
    assert handles[5].durable is not None
    assert handles[5].durable.result(LIMIT_S) == f"{tmp_path}/durable/step-5"


def test_a_step_under_way_is_not_dropped(tiers: Tiers, hangs: threading.Event) -> None:
    """A durable place that hangs keeps one step, and the newest wait."""
    tiers = dataclasses.replace(tiers, most_waiting=1)
    save(tiers, 1)
    assert hangs.wait(LIMIT_S)
    for step in (2, 3, 4):
        save(tiers, step)
    assert [path[-1] for path in pins_of([f"{tiers.near}/step-{step}" for step in (1, 2, 3, 4)])] == ["1", "4"]
    found = drain_of(f"{tiers.near}/step-1")
    assert found is not None
    assert [*found[0].left_out] == ["step-2", "step-3"]


def test_damage_near_by_is_not_tried_for_ever(tiers: Tiers, tmp_path: Path) -> None:
    save_state_dict(tmp_path / "near/step-1", state_of(1), no_dist=True)
    (file,) = (tmp_path / "near/step-1").glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-2000] + bytes(2000))
    note_drain(str(tmp_path / "near/step-1"), "waits to be drained")
    save(tiers, 2)
    shutdown()
    assert [path.name for path in (tmp_path / "durable").iterdir()] == ["step-2"]
    assert pins_of([str(tmp_path / "near/step-1")]) == {}


def test_training_does_not_wait(tiers: Tiers, hangs: threading.Event, tmp_path: Path) -> None:
    save(tiers, 1)
    assert hangs.wait(LIMIT_S)
    save(tiers, 2)
    with pytest.raises(TimeoutError, match="is still being copied to durable storage"):
        shutdown(0.05)
    assert [folder.tiers["durable"] for folder in scan_steps(tiers)] == ["draining", "waits"]
    found = drain_of(f"{tiers.near}/step-1")
    assert found is not None
    found[0].stop()
    assert found[0].wait(time.monotonic() + LIMIT_S)
    assert not (tmp_path / "durable").exists()
    assert [folder.tiers["durable"] for folder in scan_steps(tiers)] == ["waits", "waits"]


TRAIN = """
    import sys, torch, warnings, bytecheckpoint
    warnings.simplefilter("ignore")
    near, durable, then = sys.argv[1:]
    rate = 1 << 20 if then == "raise" else 0  # a copy takes a minute
    tiers = bytecheckpoint.Tiers(near=near, durable=durable, drain_bytes_per_s=rate)
    if then == "resume":
        bytecheckpoint.load_state_dict(tiers / "step-1", {"w": torch.zeros(16 << 20)}, no_dist=True)
        bytecheckpoint.shutdown()
        sys.exit()
    bytecheckpoint.save_state_dict(tiers / "step-1", {"w": torch.ones(16 << 20)}, no_dist=True)
    if then == "raise":
        raise RuntimeError("training")
"""


def train(tmp_path: Path, then: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(TRAIN), str(tmp_path / "near"), str(tmp_path / "durable"), then]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)


def test_the_end_of_a_process_waits_for_copies(tmp_path: Path) -> None:
    assert train(tmp_path, "end").returncode == 0
    assert value_at(tmp_path / "durable/step-1") == 1


def test_after_an_error_the_next_process_goes_on(tmp_path: Path) -> None:
    begin = time.monotonic()
    assert "RuntimeError: training" in train(tmp_path, "raise").stderr
    assert time.monotonic() - begin < 40
    assert not (tmp_path / "durable/step-1/.metadata").exists()
    assert len(pins_of([str(tmp_path / "near/step-1")])) == 1
    assert train(tmp_path, "resume").returncode == 0
    assert value_at(tmp_path / "durable/step-1") == 1
    assert pins_of([str(tmp_path / "near/step-1")]) == {}


def test_two_processes_that_copy(tiers: Tiers, tmp_path: Path) -> None:
    """One copies a step, and the other finds it there."""
    save_state_dict(tmp_path / "near/step-1", state_of(1, BIG), no_dist=True)
    note_drain(str(tmp_path / "near/step-1"), "waits to be drained")
    threads = [threading.Thread(target=train, args=(tmp_path, "resume")) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert value_at(tmp_path / "durable/step-1") == 1
    assert pins_of([str(tmp_path / "near/step-1")]) == {}


def test_copied_by_a_command(tmp_path: Path) -> None:
    """The future looks at the durable place, whoever copies."""
    tiers = Tiers(near=tmp_path / "near", durable=tmp_path / "durable", drain="command")
    handles = [async_save_state_dict(tiers / f"step-{step}", state_of(step), no_dist=True) for step in (1, 2, 3)]
    futures = [handle.durable for handle in handles]
    assert handles[2].committed.result()
    assert not (tmp_path / "durable").exists()
    assert run("drain", str(tiers.near), str(tiers.durable), "--every", "2").exit_code == 0
    assert futures[1] is not None
    assert futures[1].result(LIMIT_S) == f"{tmp_path}/durable/step-2"
    assert futures[0] is not None
    assert "step-2 is there, which was saved later" in str(futures[0].exception(LIMIT_S))
    assert futures[2] is not None
    assert not futures[2].done()
    run("drain", str(tiers.near), str(tiers.durable))
    assert futures[2].result(LIMIT_S) == f"{tmp_path}/durable/step-3"
