# SPDX-License-Identifier: Apache-2.0
"""``MemoryTier``: states are committed in the memory of the machine, and outlive the processes that saved them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.cli_runs import as_json, run
from support.ranks import run_ranks
from support.tier_runs import LIMIT_S, loaded, save, state_of, value_at, wait_until

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
from bytecheckpoint.native import _C
from bytecheckpoint.storage.memory import client
from bytecheckpoint.storage.memory.client import HolderClient, disconnect, holders, stop_holder


def in_memory(tiers: Tiers) -> list[str]:
    return [folder.name for folder in scan_steps(tiers) if folder.tiers.get("memory") == "complete"]


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[Tiers]:
    made = Tiers(memory=MemoryTier(), near=tmp_path / "near")
    HolderClient(made.in_memory).put("started", b"")  # before the first test looks at what it leaves
    yield made
    stop_holder(made.in_memory.rpartition("/")[2])


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


TRAIN = """
    import os, sys, torch, bytecheckpoint
    from bytecheckpoint import MemoryTier, Tiers
    tiers = Tiers(memory=MemoryTier(linger_s=float(sys.argv[2])), near=sys.argv[1])
    bytecheckpoint.save_state_dict(tiers / "step-1", {"w": torch.ones(1000)}, no_dist=True)
    print(tiers.in_memory.rpartition("/")[2], flush=True)
    if sys.argv[3] == "shutdown":
        bytecheckpoint.shutdown()
    if sys.argv[3] == "killed":
        os.kill(os.getpid(), 9)
"""


def train(near: Path, then: str, linger_s: float = 60) -> str:
    command = [sys.executable, "-c", textwrap.dedent(TRAIN), str(near), str(linger_s), then]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S).stdout.strip()


@pytest.mark.parametrize(("then", "stays"), [("killed", True), ("ends", True), ("shutdown", False)])
def test_the_end_of_the_process_that_saved(tmp_path: Path, then: str, stays: bool) -> None:
    name = train(tmp_path / "near", then)
    tiers = Tiers(memory=MemoryTier(), near=tmp_path / "near")
    try:
        wait_until(lambda: (name in holders()) == stays)
        assert loaded(tiers, 1) == (1, f"{tiers.in_memory if stays else tiers.near}/step-1")
    finally:
        stop_holder(name)


def test_nobody_comes_back(tmp_path: Path) -> None:
    name = train(tmp_path / "near", "killed", linger_s=0.5)
    wait_until(lambda: name not in holders())


SAVE_HALF = """
    import os, sys, bytecheckpoint
    from bytecheckpoint.storage.memory.client import HolderClient
    client = HolderClient(sys.argv[1])
    fd = os.memfd_create("half")
    os.write(fd, b"half of a save")
    client.keep("step-1/__0_0.0123456789abcdef.distcp", fd)
    assert client.folders() == ["step-1"]
    print("kept", flush=True)
    os.kill(os.getpid(), 9)
"""


def test_what_was_not_committed_goes_with_its_process(tiers: Tiers) -> None:
    command = [sys.executable, "-c", textwrap.dedent(SAVE_HALF), tiers.in_memory]
    assert subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S).stdout == "kept\n"
    wait_until(lambda: HolderClient(tiers.in_memory).folders() == [])


def test_a_holder_that_dies(tiers: Tiers, tmp_path: Path) -> None:
    """The next save starts another one; what was in memory is gone, and on disk."""
    save(tiers, 1)
    pid = HolderClient(tiers.in_memory)._asked({"op": "hello", "version": 1, "most_bytes": 0})["pid"]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{pid}").exists() or Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z")
    assert loaded(tiers, 1) == (1, f"{tmp_path}/near/step-1")
    save(tiers, 2)
    assert in_memory(tiers) == ["step-2"]


def test_a_holder_of_another_version(tiers: Tiers) -> None:
    with pytest.raises(OSError, match="it is of version 1, and this process of 2: bcp holder stop"):
        HolderClient(tiers.in_memory)._asked({"op": "hello", "version": 2, "most_bytes": 0})
    for request in ({}, {"op": "nothing"}, {"op": "get"}, {"op": "put", "name": "a", "stays": True}, {"op": "reserve"}):
        with pytest.raises(OSError, match=r"does not know|Error: "):
            HolderClient(tiers.in_memory)._asked(request)
    assert HolderClient(tiers.in_memory).get("started") == b""


def test_a_holder_that_is_of_no_use(tiers: Tiers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another version, or of another user: nothing is taken from it, and the disk is as good as without memory."""
    save(tiers, 1)
    for name, value in (("VERSION", 2), ("is_of_this_user", lambda peer: False)):
        disconnect(tiers.in_memory.rpartition("/")[2])
        monkeypatch.setattr(client, name, value)
        assert loaded(tiers, 1) == (1, f"{tmp_path}/near/step-1")
        with pytest.warns(RuntimeWarning, match="taking .*near/step-1: .*(of version 1|of another user)"):
            assert latest(tiers) == f"{tmp_path}/near/step-1"
        assert save(tiers, 1).tier == "near"
        monkeypatch.undo()


def test_a_save_that_fails_leaves_nothing(tiers: Tiers, tmp_path: Path) -> None:
    save(tiers, 1)
    held = HolderClient(tiers.in_memory)
    mine = HolderClient(f"{tiers.in_memory}/step-2")
    fd = os.memfd_create("half")
    mine.keep("__0_0.0123456789abcdef.distcp", fd)
    os.close(fd)
    mine.reserve("__0_1.0123456789abcdef.distcp", 10)
    assert held.folders() == ["step-1", "step-2"]
    mine.discard()
    assert held.folders() == ["step-1"]
    (tmp_path / "near" / "step-3").write_text("no folder")
    with pytest.raises(CheckpointError):
        save(tiers, 3)
    assert loaded(tiers, 3)[1] == f"{tiers.in_memory}/step-3"  # it is committed there, and nowhere else


def test_memory_is_used_again(tiers: Tiers) -> None:
    """The files of an older state are written over, unless somebody reads them."""
    tiers = Tiers(memory=MemoryTier(keep=1), near=tiers.near)

    def inode() -> int:
        held = HolderClient(tiers.in_memory)
        (name,) = (each.name for each in held.everything("") if each.name.endswith(".distcp"))
        fd = held.descriptor(name)
        try:
            return os.fstat(fd).st_ino
        finally:
            os.close(fd)

    inodes = []
    for step in (1, 2, 3, 4):
        save(tiers, step, numel=100_000 - 20_000 * step)
        inodes.append(inode())
        assert value_at(f"{tiers.in_memory}/step-{step}") == step
        verify(f"{tiers.in_memory}/step-{step}").raise_if_damaged()
    assert (len({*inodes}), inodes[0]) == (2, inodes[2])
    reader = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(READ), tiers.in_memory], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == b"opened\n"
        for step in (5, 6, 7):
            save(tiers, step, 9)
            assert value_at(f"{tiers.in_memory}/step-{step}") == 9
        said, _ = reader.communicate(b"\n", LIMIT_S)
    assert said == b"True\n"
    assert inode() != inodes[3]


READ = """
    import os, sys
    from bytecheckpoint.storage.memory.client import HolderClient
    held = HolderClient(sys.argv[1] + "/step-4")
    (name,) = (name for name in held.names() if name.endswith(".distcp"))
    fd = held.descriptor(name)
    before = os.pread(fd, 1 << 20, 0)
    print("opened", flush=True)
    sys.stdin.readline()
    print(os.pread(fd, 1 << 20, 0) == before, flush=True)
"""


def test_a_clock_that_goes_back(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of commits in memory is that in which they came, though their ids say another one."""
    alone = Tiers(memory=MemoryTier(), near=tiers.near, near_every=9)
    draw = _C.draw_save_id
    an_hour_ago = int((time.time() - 3600) * 1000)
    save(alone, 1)
    monkeypatch.setattr(_C, "draw_save_id", lambda: f"{an_hour_ago:012x}{draw()[12:]}")
    save(alone, 2)
    save(alone, 3)
    assert latest(alone) == f"{tiers.in_memory}/step-3"
    assert in_memory(alone) == ["step-2", "step-3"]


def test_many_objects(tiers: Tiers) -> None:
    """A listing that is too long for a message."""
    held = HolderClient(tiers.in_memory)
    for number in range(500):
        held.put(f"{'long-' * 20}{number}", b"1")
    assert len(held.entries()) == 501
    held.delete([each.name for each in held.entries()] * 2)
    assert held.entries() == []


def test_command(tiers: Tiers) -> None:
    save(tiers, 1)
    name = tiers.in_memory.rpartition("/")[2]
    (listed,) = as_json("holder", "list", name)["runs"]
    assert (listed["run"], [step["name"] for step in listed["steps"]]) == (name, ["step-1"])
    assert run("steps", tiers.in_memory).output.splitlines()[-1].endswith("1 step folder: 1 complete")
    assert run("verify", f"{tiers.in_memory}/step-1").exit_code == 0
    assert "step-1 (" in run("holder").output
    assert run("holder", "stop", name).output == f"held://{name}: stopped\n"
    wait_until(lambda: name not in holders())


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
