# SPDX-License-Identifier: Apache-2.0
"""``MemoryTier``: states are committed in the memory of the machine, and outlive the processes that saved them."""

from __future__ import annotations

import dataclasses
import gc
import shutil
import threading
import time
import uuid
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.memory_runs import in_memory, tiers
from support.pretended_hosts import pretend_host
from support.ranks import run_ranks
from support.tier_runs import LIMIT_S, loaded, save, state_of, wait_until

import bytecheckpoint
from bytecheckpoint import (
    Config,
    MemoryTier,
    Tiers,
    async_save_state_dict,
    latest,
    load_state_dict,
    registered,
    resume,
    save_state_dict,
    scan_steps,
    shutdown,
    verify,
)
from bytecheckpoint.dcp import memory_first
from bytecheckpoint.errors import CheckpointError, CheckpointExistsError, ConfigError, SaveFailedError
from bytecheckpoint.storage import far_looks
from bytecheckpoint.storage import tiers as tiers_module
from bytecheckpoint.storage.memory.client import HolderClient
from bytecheckpoint.storage.memory.connection import stop_holder

__all__ = ["tiers"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"memory": MemoryTier()}, "near or durable must be given.*or MemoryTier"),
        ({"memory": 1, "near": "a"}, "must be a MemoryTier, or None"),
        ({"near": "a", "near_every": 2}, "the other saves would be nowhere: pass memory"),
        ({"near": "a", "memory": MemoryTier(), "near_every": 0}, "must be an int >= 1"),
    ],
)
def test_arguments_out_of_range(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Tiers(**arguments)


@pytest.mark.parametrize("wrong", [{"keep": 0}, {"keep": True}, {"max_bytes": -1}, {"linger_s": -1.0}])
def test_settings_out_of_range(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="must be"):
        MemoryTier(**wrong)


def test_memory_comes_first(tiers: Tiers, tmp_path: Path) -> None:
    handle = async_save_state_dict(tiers / "step-1", state_of(1), no_dist=True)
    assert handle.memory is not None
    in_memory = handle.memory.result(LIMIT_S)
    assert (in_memory.tier, in_memory.path) == ("memory", f"{tiers.in_memory}/step-1")
    report = handle.committed.result(LIMIT_S)
    assert (report.tier, report.path, report.save_id) == ("near", f"{tmp_path}/near/step-1", in_memory.save_id)
    assert report.memory_s > 0
    assert latest(tiers) == f"{tiers.in_memory}/step-1"
    assert loaded(tiers, 1) == (1, f"{tiers.in_memory}/step-1")
    verify(f"{tiers.in_memory}/step-1").raise_if_damaged()
    assert [dict(folder.tiers) for folder in scan_steps(tiers)] == [{"memory": "complete", "near": "complete"}]


def test_what_may_not_be_replaced_is_looked_for_on_the_disk(tiers: Tiers) -> None:
    """A refused save has changed nothing, in memory neither, whose own state is gone."""
    save(tiers, 1)
    for where in ("in memory", "on the disk alone"):
        with pytest.raises(CheckpointExistsError):
            save_state_dict(tiers / "step-1", state_of(2), no_dist=True, overwrite=False)
        assert loaded(tiers, 1)[0] == 1, where
        stop_holder(tiers.in_memory.rpartition("/")[2])
    report = save_state_dict(tiers / "step-2", state_of(2), no_dist=True, overwrite=False)
    assert (report.tier, loaded(tiers, 2)) == ("near", (2, f"{tiers.in_memory}/step-2"))
    (folder,) = (folder for folder in scan_steps(tiers) if folder.step == 2)
    assert folder.save_ids == (report.save_id,)
    assert dict(folder.tiers) == {"memory": "complete", "near": "complete"}
    alone = Tiers(memory=MemoryTier(), near=tiers.near, near_every=9)
    assert save_state_dict(alone / "step-3", state_of(3), no_dist=True, overwrite=False).tier == "near"
    model = {"model": torch.nn.Linear(2, 2)}
    saved = bytecheckpoint.save(tiers, model, "ddp", global_steps=4, overwrite=False).committed.result()
    assert saved.parts["model"].tier == "near"
    with pytest.raises(CheckpointExistsError):
        bytecheckpoint.save(tiers, model, "ddp", global_steps=4, overwrite=False)


def test_a_load_of_what_is_in_memory_does_not_wait(
    tiers: Tiers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a near place saves go from memory to the durable one, which is asked for a newer save of the step."""
    memory = MemoryTier(name=str(tiers.near))
    tiers = dataclasses.replace(tiers, memory=memory, near="", durable=tmp_path / "durable")
    save(tiers, 1)
    monkeypatch.setattr(far_looks, "_MOST_LOOK_S", 0.2)
    has_mark, released = tiers_module.has_mark, threading.Event()

    def held(place: Any) -> bool:
        assert str(place) != f"{tiers.durable}/step-1" or released.wait(LIMIT_S)
        return has_mark(place)

    monkeypatch.setattr(tiers_module, "has_mark", held)
    value, path = loaded(tiers, 1)
    assert (value, path.partition("://")[0]) == (1, "held")
    released.set()
    for thread in threading.enumerate():
        if thread.name == "bytecheckpoint-look":
            thread.join(LIMIT_S)


def test_an_older_save_of_a_step_is_not_taken_for_the_newer(tiers: Tiers, tmp_path: Path) -> None:
    save(tiers, 1)
    save_state_dict(tmp_path / "near/step-1", state_of(11), no_dist=True, config=Config(journal="off"))
    assert loaded(tiers, 1)[0] == 11
    stop_holder(tiers.in_memory.rpartition("/")[2])
    full = Tiers(memory=MemoryTier(max_bytes=20_000), near=tiers.near)
    save(full, 1, 12)
    save(full, 1, 13, numel=10_000)  # it does not fit, and what is in memory is older
    state = state_of(0, 10_000)
    assert load_state_dict(full / "step-1", state, no_dist=True).path == f"{tmp_path}/near/step-1"
    assert state["w"].eq(13).all()


def test_a_cancelled_save_is_not_in_memory(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tiers, 1)
    handles: list[Any] = []
    in_memory = threading.Event()

    def wait(run: str, keep: int) -> None:
        in_memory.set()
        wait_until(lambda: handles and handles[0]._cancelled.is_set())

    monkeypatch.setattr(memory_first, "keep_newest", wait)
    handle = async_save_state_dict(tiers / "step-2", state_of(2), no_dist=True)
    assert in_memory.wait(LIMIT_S)
    give_up = handle._give_up
    handle._cancelled = threading.Event()  # type: ignore[attr-defined]
    handle._give_up = lambda: (give_up(), handle._cancelled.set())[0]  # type: ignore[attr-defined]
    handles.append(handle)
    assert handle.cancel(LIMIT_S)
    assert latest(tiers) == f"{tiers.in_memory}/step-1"
    assert [each.name for each in HolderClient(tiers.in_memory).everything("step-2")] == []


def test_memory_of_a_run_whose_folder_is_gone(tiers: Tiers) -> None:
    save(tiers, 1)
    shutil.rmtree(tiers.near)
    with pytest.warns(RuntimeWarning, match="step-1 is in memory alone; bcp holder stop .* forgets it"):
        assert latest(tiers) == f"{tiers.in_memory}/step-1"


def test_the_newest_stay(tiers: Tiers) -> None:
    for step in (1, 2, 3, 4):
        save(tiers, step)
        assert in_memory(tiers) == [f"step-{n}" for n in range(max(1, step - 1), step + 1)]
    assert loaded(tiers, 1)[1] == f"{tiers.near}/step-1"
    save(tiers, 3, 33)  # the run went back
    assert in_memory(tiers) == ["step-3", "step-4"]
    assert loaded(tiers, 3) == (33, f"{tiers.in_memory}/step-3")
    assert HolderClient(tiers.in_memory).folders() == ["step-3", "step-4"]


def test_some_saves_are_in_memory_alone(tiers: Tiers, tmp_path: Path) -> None:
    tiers = Tiers(memory=MemoryTier(), near=tiers.near, near_every=2)
    reports = [save(tiers, step) for step in (1, 2, 3)]
    assert [report.tier for report in reports] == ["memory", "near", "memory"]
    assert [path.name for path in (tmp_path / "near").iterdir()] == ["step-2"]
    assert latest(tiers) == f"{tiers.in_memory}/step-3"
    stop_holder(tiers.in_memory.rpartition("/")[2])  # the machine is lost
    assert latest(tiers) == f"{tmp_path}/near/step-2"
    state = state_of(0)
    resumed = resume(tiers, state, no_dist=True)
    assert resumed is not None
    assert (resumed.step, float(state["w"][0])) == (2, 2)


def test_memory_alone(tmp_path: Path) -> None:
    tiers = Tiers(memory=MemoryTier(name=f"test-{uuid.uuid4().hex}", keep=1))
    HolderClient(tiers.in_memory).put("started", b"")
    assert save(tiers, 1).tier == "memory"
    assert loaded(tiers, 1) == (1, f"{tiers.in_memory}/step-1")
    assert latest(tiers) == f"{tiers.in_memory}/step-1"
    shutdown()
    stop_holder(tiers.in_memory.rpartition("/")[2])
    assert latest(tiers) is None


def test_what_does_not_fit_is_refused_with_the_numbers(tiers: Tiers, caplog: pytest.LogCaptureFixture) -> None:
    """The save goes on to the disk; a save to memory alone fails."""
    tiers = Tiers(memory=MemoryTier(max_bytes=100_000), near=tiers.near, near_every=2)
    with pytest.raises(
        SaveFailedError, match=r"bytes more would be above the limit of 100,000: it holds [\d,]+, and 0 "
    ):
        save(tiers, 1, numel=100_000)
    handle = async_save_state_dict(tiers / "step-2", state_of(2, 100_000), no_dist=True)
    assert handle.committed.result(LIMIT_S).tier == "near"
    assert handle.memory is not None
    assert "limit of 100,000" in str(handle.memory.exception(LIMIT_S))
    assert "step-2 is not in memory: " in caplog.text
    assert in_memory(tiers) == []
    assert save(tiers, 3).tier == "memory"


def test_a_state_that_does_not_fit_is_not_kept(tiers: Tiers) -> None:
    """A process that has no memory left must not keep what it has saved until Python looks for cycles."""
    assert tiers.memory is not None
    tiers = dataclasses.replace(tiers, memory=dataclasses.replace(tiers.memory, max_bytes=1000))
    state = state_of(1)
    kept = weakref.ref(state["w"])
    gc.disable()
    try:
        assert save_state_dict(tiers / "step-1", state, no_dist=True).memory_s == 0
        del state
        assert kept() is None
    finally:
        gc.enable()


def test_live_models(tiers: Tiers, tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    state = {"model": model, "extra_state": {"v": 1}}
    handle = bytecheckpoint.save(tiers, state, "ddp", global_steps=5, fast_saving=True, role="actor")
    assert handle.memory is not None
    assert handle.memory.result(LIMIT_S).tier == "memory"
    handle.committed.result(LIMIT_S)
    found = latest(tiers, "actor")
    assert found == f"{tiers.in_memory}/actor/global_step_5"
    weight = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.zero_()
    bytecheckpoint.load(tiers / "global_step_5", state, "ddp", role="actor")
    assert model.weight.equal(weight)
    assert (tmp_path / "near/actor/latest_checkpointed_iteration.txt").read_text() == "5"
    for step in (6, 7, 8):
        bytecheckpoint.save(tiers, state, "ddp", global_steps=step, role="actor")
    assert HolderClient(tiers.in_memory).folders("actor") == ["global_step_7", "global_step_8"]


def test_live_models_of_which_a_part_does_not_fit(tiers: Tiers) -> None:
    """Then none of it is in memory."""
    tiers = Tiers(memory=MemoryTier(max_bytes=60_000), near=tiers.near)
    model = torch.nn.Linear(100, 100)
    for values, stays in ((10, True), (200_000, False)):
        state = {"model": model, "extra_state": {"v": torch.ones(values // 4)}}
        handle = bytecheckpoint.save(tiers, state, "ddp", global_steps=5, fast_saving=True)
        handle.committed.result(LIMIT_S)
        assert handle.memory is not None
        error = handle.memory.exception(LIMIT_S)
        assert (error is None) == stays
        assert HolderClient(tiers.in_memory).folders() == (["global_step_5"] if stays else [])
        bytecheckpoint.load(tiers / "global_step_5", state, "ddp")
    assert "extra_state is not in memory" in str(error)


def test_dcps_own_calls(tiers: Tiers) -> None:
    with registered(tiers=tiers):
        dcp.save(state_of(1), checkpoint_id="step-1")
        saving: Any = dcp.async_save(state_of(2), checkpoint_id="step-2")
        saving.result()
        assert in_memory(tiers) == ["step-1", "step-2"]
        assert len({id_ for folder in scan_steps(tiers) for id_ in folder.save_ids}) == 2
        state = state_of(0)
        dcp.load(state, checkpoint_id="step-2")
    assert state["w"].eq(2).all()


def _on_ranks(near: str) -> tuple[str, list[float], str]:
    tiers = Tiers(memory=MemoryTier(), near=near, near_every=2)
    rank = dist.get_rank()
    state = {"w": torch.ones(10), f"r{rank}": torch.full((3,), float(rank))}
    for step in (1, 2, 3):
        handle = async_save_state_dict(tiers / f"step-{step}", state)
        handle.committed.result(LIMIT_S)
    into = {"w": torch.zeros(10), f"r{1 - rank}": torch.zeros(3)}
    report = load_state_dict(tiers / "step-3", into)
    return report.path, into[f"r{1 - rank}"].tolist(), handle.committed.result().tier


def test_on_ranks(tiers: Tiers) -> None:
    path = f"{tiers.in_memory}/step-3"
    results = run_ranks(2, _on_ranks, str(tiers.near))
    assert results == [(path, [1.0] * 3, "memory"), (path, [0.0] * 3, "memory")]
    assert run_ranks(1, _found_by_one, str(tiers.near)) == [(path, [[0.0] * 3, [1.0] * 3])]


def _on_two_machines(near: str) -> tuple[list[str], str, str, str]:
    rank = dist.get_rank()
    pretend_host(f"node{rank}")
    tiers, saved = Tiers(memory=MemoryTier(), near=near), []
    for step in (1, 2):
        handle = async_save_state_dict(tiers / f"step-{step}", {"w": torch.ones(10)})
        saved.append(handle.committed.result(LIMIT_S).tier)
        if step == 1:
            assert handle.memory is not None
            why = str(handle.memory.exception(LIMIT_S))
    assert handle.memory is None  # it is not tried again
    alone = Tiers(memory=MemoryTier(name=f"{near}-alone"), near=f"{near}-2", near_every=2)
    with pytest.raises(CheckpointError) as refused:
        save_state_dict(alone / "step-1", {"w": torch.ones(10)})
    return saved, why, str(refused.value), load_state_dict(tiers / "step-2", {"w": torch.zeros(10)}).path


def test_ranks_of_several_machines(tmp_path: Path) -> None:
    for saved, why, refused, loaded_from in run_ranks(2, _on_two_machines, str(tmp_path / "near")):
        assert saved == ["near", "near"]
        for text in (why, refused):
            assert "rank 0 is on node0, and rank 1 on node1" in text
        assert loaded_from == f"{tmp_path}/near/step-2"


def test_a_state_of_which_a_part_is_not_here_is_partial(tiers: Tiers, tmp_path: Path) -> None:
    save(tiers, 1)
    save(tiers, 2)
    held = HolderClient(f"{tiers.in_memory}/step-2")
    held.delete([each.name for each in held.everything("") if each.name.endswith(".distcp")])
    assert [step.tiers["memory"] for step in scan_steps(tiers)] == ["complete", "partial"]
    assert load_state_dict(tiers / "step-2", state_of(0), no_dist=True).path == f"{tmp_path}/near/step-2"
    assert resume(tiers, state_of(0), no_dist=True).path == f"{tmp_path}/near/step-2"  # type: ignore[union-attr]


def _with_different_replicas(near: str) -> list[str]:
    said = []
    for replicas in (dist.get_rank(), 1):
        tiers = Tiers(memory=MemoryTier(replicas=replicas), near=near)
        with pytest.raises(ConfigError) as refused:
            save_state_dict(tiers / "step-1", {"w": torch.ones(10)})
        said.append(str(refused.value))
    return said


def test_ranks_that_want_different_replicas(tmp_path: Path) -> None:
    for different, too_many in run_ranks(2, _with_different_replicas, str(tmp_path / "near")):
        assert "MemoryTier(replicas=) is 0 on rank 0, and 1 on rank 1: it must be the same on all ranks" in different
        assert "MemoryTier(replicas=1): the ranks that are known are on one machine" in too_many


def _found_by_one(near: str) -> tuple[str | None, list[list[float]]]:
    """Both ranks have died, and the job goes on with one."""
    tiers = Tiers(memory=MemoryTier(), near=near, near_every=2)
    into = {"w": torch.zeros(10), "r0": torch.ones(3) * 9, "r1": torch.ones(3) * 9}
    resumed = resume(tiers, into)
    return resumed and resumed.path, [into["r0"].tolist(), into["r1"].tolist()]


def test_time_of_a_restart_is_not_that_of_the_disk(tiers: Tiers) -> None:
    """A holder answers within a moment, also when many ask."""
    begin = time.monotonic()
    held = HolderClient(tiers.in_memory)
    for _ in range(1000):
        held.head("started")
    assert time.monotonic() - begin < 10
