# SPDX-License-Identifier: Apache-2.0
"""What a user does on one machine, with default settings, over each file system."""

from __future__ import annotations

import contextlib
import io
import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.fork_server import LIMIT_S, ForkServer
from torch.distributed.checkpoint.api import CheckpointException

from bytecheckpoint import BcpWriter, Retention, latest, load_state_dict, save_state_dict, verify
from ground.mounts import Ground, Machines, sshfs
from ground.shared_mounts import TIMES_OF_ITS_OWN

# Whole blocks, an end that is none, and more than a request.
_NUMELS = {"blocks": 1 << 18, "odd": (1 << 16) + 3, "one": 1, "long": (3 << 18) + 77}


def state(generation: int) -> dict[str, Any]:
    values: dict[str, Any] = {name: torch.arange(float(numel)) + generation for name, numel in _NUMELS.items()}
    return values | {"generation": generation}


def check(got: dict[str, Any], generation: int) -> None:
    for name, wanted in state(generation).items():
        assert torch.equal(got[name], wanted) if isinstance(wanted, torch.Tensor) else got[name] == wanted, name


def check_stored(path: Path, generation: int) -> None:
    """Fails unless we and stock DCP read the generation, and all of it is whole."""
    for load in (
        lambda got: load_state_dict(path, got, no_dist=True),
        lambda got: dcp.load(got, checkpoint_id=path, no_dist=True),
    ):
        got = state(-1)
        load(got)
        check(got, generation)
    assert not verify(path).problems


def save_by_stock_dcp(path: Path) -> None:
    dcp.save(state(4), checkpoint_id=path, no_dist=True)
    check_stored(path, 4)


def test_a_checkpoint_of_stock_dcp(
    ground: Ground, machines: Machines, path: Path, request: pytest.FixtureRequest
) -> None:
    if ground.kind in TIMES_OF_ITS_OWN:
        request.applymarker(pytest.mark.xfail(strict=True, reason="a file that was read is said to have changed"))
    machines[0].run(save_by_stock_dcp, path).unwrap()


def save_without_overwriting(path: Path) -> list[str]:
    """Saves twice with ``overwrite=False``. Returns what each save raised, and checks what is left."""
    raised = []
    for generation in (1, 2):
        try:
            dcp.save(state(generation), storage_writer=BcpWriter(path, overwrite=False), no_dist=True)
            raised.append("nothing")
        except CheckpointException as failed:
            raised += [type(error).__name__ for error, _ in failed.failures.values()]
    if raised[0] == "nothing":
        check_stored(path, 1)
    else:
        assert not path.parent.exists()  # it was refused before anything was written
    return raised


# Where neither link nor RENAME_NOREPLACE work, so that no file can be created and never replaced in one step.
CREATES_NOTHING = {"s3fs", "rclone, writes"}


def test_a_save_that_may_not_overwrite(ground: Ground, machines: Machines, path: Path) -> None:
    raised = machines[0].run(save_without_overwriting, path / "step-1").unwrap()
    if ground.kind in CREATES_NOTHING:
        assert raised == ["UnsupportedError"] * 2
    else:
        assert raised == ["nothing", "CheckpointExistsError"]


def test_a_save_that_may_not_overwrite_where_that_cannot_be_kept(server: ForkServer, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        at, _ = sshfs("-o", "disable_hardlink")(stack, tmp_path)
        assert server.run(save_without_overwriting, at / "run" / "step-1").unwrap() == ["UnsupportedError"] * 2


# Where a file that is removed while it is open stays in its folder, under a name of the file system's own.
HIDING = {"bindfs", "bindfs, O_DIRECT forwarded", "unionfs-fuse", "sshfs", "s3fs", "NFS 4.2", "NFS 3"}
REFUSES = {
    "bindfs, O_DIRECT forwarded": [],  # aligned transfers work, and all others go through the page cache
    "mergerfs": ["save"],
    "unionfs-fuse": ["save", "load", "verify"],
}


def warnings_of(use: str, path: Path) -> list[str]:
    """Uses a checkpoint twice in this process. Returns what was logged."""
    logged = io.StringIO()
    logging.getLogger("bytecheckpoint").addHandler(logging.StreamHandler(logged))
    for _ in range(2):
        if use == "save":
            save_state_dict(path, state(1), no_dist=True)
        elif use == "load":
            load_state_dict(path, state(0), no_dist=True)
        else:
            verify(path)
    return logged.getvalue().splitlines()


def test_refused_direct_io_is_said_once(ground: Ground, machines: Machines, path: Path) -> None:
    for use in ("save", "load", "verify"):
        said = machines[0].run(warnings_of, use, path).unwrap()
        if use in REFUSES.get(ground.kind, []):
            (line,) = said
            assert line.startswith(f"{path}: the file system takes O_DIRECT")
        else:
            assert said == []


def files_of_a_large_save(path: Path) -> int:
    """Saves 144 MiB, and loads it again. Returns in how many data files it is."""
    saved = {f"w{i}": torch.full((4 << 20,), float(i)) for i in range(9)}
    save_state_dict(path, saved, no_dist=True)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    load_state_dict(path, loaded, no_dist=True)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in saved.items())
    return len(list(path.glob("*.distcp")))


def test_without_direct_io_a_large_save_has_several_files(ground: Ground, machines: Machines, path: Path) -> None:
    """They are written at once, and each is synced while others are written."""
    expected = 3 if "save" in REFUSES.get(ground.kind, []) else 1
    assert machines[0].run(files_of_a_large_save, path).unwrap() == expected


def prune_while_read(path: Path) -> list[str]:
    """Returns what is left once the reader has closed its file."""
    for step in (1, 2):
        save_state_dict(path / f"step-{step}", state(step), no_dist=True)
    (data,) = (path / "step-1").glob("*.distcp")
    with data.open("rb") as file:
        closing = threading.Timer(0.5, file.close)
        closing.start()
        assert Retention(path, keep_latest=1).prune().removed == [str(path / "step-1")]
        closing.join()
    return [folder.name for folder in path.iterdir()]


def test_a_folder_goes_when_its_last_reader_has_closed(machines: Machines, path: Path) -> None:
    """FUSE keeps a file that is removed while it is open, under another name in its folder."""
    assert machines[0].run(prune_while_read, path).unwrap() == ["step-2"]


def prune_while_held(path: Path) -> bool:
    """Returns whether the folder of a file that somebody holds is gone. It is, after that."""
    for step in (1, 2):
        save_state_dict(path / f"step-{step}", state(step), no_dist=True)
    (data,) = (path / "step-1").glob("*.distcp")
    with data.open("rb"):
        report = Retention(path, keep_latest=1).prune()
        is_gone = not (path / "step-1").exists()
        assert (report.removed, bool(report.warnings)) == ([str(path / "step-1")] if is_gone else [], not is_gone)
        assert latest(path) == str(path / "step-2")
    until = time.monotonic() + LIMIT_S - 10.0
    while [folder.name for folder in path.iterdir()] != ["step-2"]:  # sshfs goes on to list what is gone, for 20 s
        assert time.monotonic() < until, list(path.rglob("*"))
        time.sleep(0.1)
        Retention(path, keep_latest=1).prune()
    return is_gone


def test_a_folder_whose_file_is_held_is_not_called_removed(ground: Ground, machines: Machines, path: Path) -> None:
    assert machines[0].run(prune_while_held, path).unwrap() == (ground.kind not in HIDING)
