# SPDX-License-Identifier: Apache-2.0
"""What a user does on one machine, with default settings, over each file system."""

from __future__ import annotations

import contextlib
import io
import logging
import threading
import time
from errno import EOPNOTSUPP
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.fork_server import LIMIT_S, ForkServer

from bytecheckpoint import async_save_state_dict, latest, load_state_dict, prune, save_state_dict, scan_steps, verify
from bytecheckpoint.errors import CheckpointExistsError, StorageError
from ground.mounts import Ground, sshfs

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


def test_saves_overwrites_and_loads(path: Path) -> None:
    for generation in (1, 2):
        save_state_dict(path, state(generation), no_dist=True)
        check_stored(path, generation)
    async_save_state_dict(path, state(3), no_dist=True).committed.result(60.0)
    check_stored(path, 3)


# Without hard links, and without a rename that replaces nothing.
CANNOT_KEEP = {"s3fs", "rclone, writes", "sshfs without links"}


def check_that_nothing_is_replaced(kind: str, path: Path) -> None:
    save_state_dict(path, state(1), no_dist=True)
    with pytest.raises(CheckpointExistsError):
        save_state_dict(path, state(2), no_dist=True, overwrite=False)
    if kind not in CANNOT_KEEP:
        save_state_dict(path / "new", state(3), no_dist=True, overwrite=False)
        check_stored(path / "new", 3)
    else:
        with pytest.raises(StorageError, match=r"overwrite=False cannot be kept here: .* overwrite=True") as caught:
            save_state_dict(path / "new", state(3), no_dist=True, overwrite=False)
        assert caught.value.errno == EOPNOTSUPP
        assert not (path / "new").exists()  # it was refused before anything was written
    check_stored(path, 1)


def test_a_save_may_replace_nothing(ground: Ground, path: Path) -> None:
    check_that_nothing_is_replaced(ground.kind, path)


def test_a_save_may_replace_nothing_without_hard_links(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        at, _ = sshfs("-o", "disable_hardlink")(stack, tmp_path)
        check_that_nothing_is_replaced("sshfs without links", at / "ckpt")


def test_a_checkpoint_of_stock_dcp(path: Path) -> None:
    dcp.save(state(4), checkpoint_id=path, no_dist=True)
    check_stored(path, 4)


def test_retention(path: Path) -> None:
    for step in (1, 2, 3):
        save_state_dict(path / f"step-{step}", state(step), no_dist=True)
    assert latest(path) == str(path / "step-3")
    assert prune(path, keep_latest=1).removed == [str(path / f"step-{step}") for step in (1, 2)]
    assert [step.state for step in scan_steps(path)] == ["complete"]
    check_stored(path / "step-3", 3)


# Where a file that is removed while it is open stays in its folder, under a name of the file system's own.
HIDING = {"bindfs", "bindfs, O_DIRECT forwarded", "unionfs-fuse", "sshfs", "s3fs"}
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


def test_refused_direct_io_is_said_once(ground: Ground, path: Path, server: ForkServer) -> None:
    for use in ("save", "load", "verify"):
        said = server.run(warnings_of, use, path).unwrap()
        if use in REFUSES.get(ground.kind, []):
            (line,) = said
            assert line.startswith(f"{path}: the file system takes O_DIRECT")
        else:
            assert said == []


def test_a_folder_goes_when_its_last_reader_has_closed(path: Path) -> None:
    """FUSE keeps a file that is removed while it is open, under another name in its folder."""
    for step in (1, 2):
        save_state_dict(path / f"step-{step}", state(step), no_dist=True)
    (data,) = (path / "step-1").glob("*.distcp")
    with data.open("rb") as file:
        closing = threading.Timer(0.5, file.close)
        closing.start()
        assert prune(path, keep_latest=1).removed == [str(path / "step-1")]
        closing.join()
    assert [folder.name for folder in path.iterdir()] == ["step-2"]


def test_a_folder_whose_file_is_held_is_not_called_removed(ground: Ground, path: Path) -> None:
    for step in (1, 2):
        save_state_dict(path / f"step-{step}", state(step), no_dist=True)
    (data,) = (path / "step-1").glob("*.distcp")
    with data.open("rb"):
        report = prune(path, keep_latest=1)
        is_gone = not (path / "step-1").exists()
        assert (report.removed, bool(report.warnings)) == ([str(path / "step-1")] if is_gone else [], not is_gone)
        assert latest(path) == str(path / "step-2")
    assert is_gone == (ground.kind not in HIDING)
    until = time.monotonic() + LIMIT_S
    while [folder.name for folder in path.iterdir()] != ["step-2"]:  # sshfs goes on to list what is gone, for 20 s
        assert time.monotonic() < until
        time.sleep(0.1)
        prune(path, keep_latest=1)
