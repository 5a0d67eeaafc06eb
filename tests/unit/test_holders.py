# SPDX-License-Identifier: Apache-2.0
"""Holders of ``MemoryTier``: they outlive who saved, and end; what they are asked for, and what they keep."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from errno import ENOENT
from pathlib import Path

import pytest
from support.cli_runs import as_json, run
from support.memory_runs import in_memory, tiers
from support.tier_runs import LIMIT_S, loaded, save, value_at, wait_until

from bytecheckpoint import (
    MemoryTier,
    Tiers,
    latest,
    verify,
)
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.native import _C
from bytecheckpoint.storage.memory import connection
from bytecheckpoint.storage.memory.client import HolderClient
from bytecheckpoint.storage.memory.connection import disconnect, holders, stop_holder
from bytecheckpoint.storage.memory.messages import VERSION

__all__ = ["tiers"]


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
    pid = HolderClient(tiers.in_memory)._asked({"op": "hello", "version": VERSION, "most_bytes": 0})["pid"]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{pid}").exists() or Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z")
    assert loaded(tiers, 1) == (1, f"{tmp_path}/near/step-1")
    save(tiers, 2)
    assert in_memory(tiers) == ["step-2"]


def test_a_holder_of_another_version(tiers: Tiers) -> None:
    with pytest.raises(OSError, match=f"it is of version {VERSION}, and this process of {VERSION + 1}: bcp"):
        HolderClient(tiers.in_memory)._asked({"op": "hello", "version": VERSION + 1, "most_bytes": 0})
    for request in ({}, {"op": "nothing"}, {"op": "get"}, {"op": "put", "name": "a", "stays": True}, {"op": "reserve"}):
        with pytest.raises(OSError, match=r"does not know|Error: "):
            HolderClient(tiers.in_memory)._asked(request)
    assert HolderClient(tiers.in_memory).get("started") == b""


def test_a_holder_that_is_of_no_use(tiers: Tiers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another version, or of another user: nothing is taken from it, and the disk is as good as without memory."""
    save(tiers, 1)
    for name, value in (("VERSION", VERSION + 1), ("is_of_this_user", lambda peer: False)):
        disconnect(tiers.in_memory.rpartition("/")[2])
        monkeypatch.setattr(connection, name, value)
        assert loaded(tiers, 1) == (1, f"{tmp_path}/near/step-1")
        with pytest.warns(RuntimeWarning, match=f"taking .*near/step-1: .*(of version {VERSION}|of another user)"):
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
    verified = verify(f"{tiers.in_memory}/step-1")
    assert (len(verified.save_ids), verified.bytes_unchecked) == (1, 0)  # by the checksums of our own format
    assert "step-1 (" in run("holder").output
    assert run("holder", "stop", name).output == f"held://{name}: stopped\n"
    wait_until(lambda: name not in holders())


def test_a_checkpoint_that_is_committed_while_it_is_verified(tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mark is not there when it is looked for at first, and is when files without one are."""
    save(tiers, 1)

    def absent(self: HolderClient, name: str) -> tuple[int, str]:
        raise FileNotFoundError(ENOENT, name)

    monkeypatch.setattr(HolderClient, "open", absent)
    verified = verify(f"{tiers.in_memory}/step-1")
    assert (len(verified.save_ids), verified.bytes_unchecked, verified.problems) == (1, 0, [])
