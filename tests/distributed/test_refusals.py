# SPDX-License-Identifier: Apache-2.0
"""A save refuses wrong paths and values before it has written a byte."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.equality import assert_equal
from support.ranks import failures, run_ranks

from bytecheckpoint import BcpReader, BcpWriter
from bytecheckpoint.errors import CheckpointExistsError, InvalidPlanError, SaveFailedError, StorageError

NOBODY = 65534


def state(number: int = 1) -> dict[str, Any]:
    return {"a": torch.full((10,), number), "number": number}


def listing(path: str) -> dict[str, tuple[int, int, int]]:
    return {
        entry.name: (entry.stat().st_ino, entry.stat().st_mtime_ns, entry.stat().st_size)
        for entry in Path(path).iterdir()
    }


def refuse(writer: BcpWriter, kind: type[Exception], values: dict[str, Any] | None = None) -> BaseException:
    """Returns the error with which the coordinator refused the save. It reached every rank."""
    found = failures(lambda: dcp.save(values or state(2), storage_writer=writer))
    assert {r: type(e) for r, e in found.items()} == {0: kind}, found
    return found[0]


def do_not_overwrite(path: str) -> None:
    dcp.save(state(), storage_writer=BcpWriter(path, overwrite=False))
    dist.barrier()
    before = listing(path)
    dist.barrier()
    for _ in range(2):
        error = refuse(BcpWriter(path, overwrite=False), CheckpointExistsError)
        assert isinstance(error, FileExistsError)
        assert getattr(error, "path", "") == path
        assert listing(path) == before
    got = state(0)
    dcp.load(got, storage_reader=BcpReader(path))
    assert_equal(got, state())
    dist.barrier()
    dcp.save(state(2), storage_writer=BcpWriter(path))


def no_directory_there(root: str) -> None:
    if dist.get_rank() == 0:
        Path(f"{root}/file").write_text("not a directory")
        Path(f"{root}/taken/.metadata").mkdir(parents=True)
    dist.barrier()
    for path in (f"{root}/file", f"{root}/file/below", "/proc/bytecheckpoint"):
        error = refuse(BcpWriter(path), StorageError)
        assert isinstance(error, OSError)
        assert error.errno
        assert getattr(error, "path", "").startswith(path.removesuffix("/below"))
    refuse(BcpWriter(f"{root}/taken"), StorageError)
    assert Path(f"{root}/file").read_text() == "not a directory"
    assert [entry.name for entry in Path(f"{root}/taken").iterdir()] == [".metadata"]


def no_permission(path: str) -> None:
    dcp.save(state(), storage_writer=BcpWriter(path))
    dist.barrier()
    before = listing(path)
    dist.barrier()
    os.seteuid(NOBODY)
    try:
        error = refuse(BcpWriter(path), StorageError)
        assert "denied" in str(error)
        refuse(BcpWriter(f"{path}/below"), StorageError)
    finally:
        os.seteuid(0)
    assert listing(path) == before
    got = state(0)
    dcp.load(got, storage_reader=BcpReader(path))
    assert_equal(got, state())


def what_cannot_be_stored(path: str) -> None:
    dcp.save(state(), storage_writer=BcpWriter(path))
    dist.barrier()
    before = listing(path)
    dist.barrier()
    for value in (torch.ones(2, 2).to_sparse(), torch.empty(3, device="meta")):
        found = failures(partial(dcp.save, {"odd": value}, storage_writer=BcpWriter(path)))
        assert found
        for error in found.values():
            reasons = error.reasons.values() if isinstance(error, SaveFailedError) else [error]
            assert all(type(reason) is InvalidPlanError and "'odd'" in str(reason) for reason in reasons), found
        assert listing(path) == before
        dist.barrier()


def test_overwrite_false(tmp_path: Path) -> None:
    run_ranks(2, do_not_overwrite, str(tmp_path / "ckpt"))


def test_paths_that_cannot_be_directories(tmp_path: Path) -> None:
    run_ranks(2, no_directory_there, str(tmp_path))


@pytest.mark.skipif(os.geteuid() != 0, reason="changes its user id, which root alone may")
def test_no_permission(tmp_path: Path) -> None:
    for directory in (tmp_path, *tmp_path.parents[:2]):
        directory.chmod(0o755)  # other users may enter
    run_ranks(2, no_permission, str(tmp_path / "ckpt"))


def test_tensors_that_cannot_be_stored(tmp_path: Path) -> None:
    run_ranks(2, what_cannot_be_stored, str(tmp_path / "ckpt"))
