# SPDX-License-Identifier: Apache-2.0
"""Tests saves on a file system that is full, or gets full during the save: they fail, and give all space back."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fork_server import ForkServer
from support.mounts import fill, free_blocks, mounted
from support.saves import SaveRequest, assert_only_own_files, generation_on_disk, names_in, save

from bytecheckpoint.errors import SaveFailedError, StorageError

OLD, NEW, NEXT = 1, 2, 3
IS_LONG = os.environ.get("BCP_LONG") == "1"
# A save takes some sixty blocks, most of them in its data file.
FREE_BLOCKS = range(0, 201) if IS_LONG else (0, 2, 20, 50, 55, 60, 200)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Returns a mounted file system of 4 MiB."""
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=4m", "none", untested="FULL DISK") as path:
        yield path


@pytest.mark.parametrize("one_file", [True, False], ids=["one file", "a file a record"])
@pytest.mark.timeout(1200)
def test_every_number_of_free_blocks(one_file: bool, server: ForkServer, small_disk: Path) -> None:
    """The new checkpoint is there, or the old one; a failed save gives back all space that it took."""
    outcomes = set()
    for blocks in FREE_BLOCKS:
        path = small_disk / "ckpt"

        def save_generation(generation: int, path: Path = path) -> dict[int, BaseException]:
            request = SaveRequest(path, generation, writer={"single_file_per_rank": one_file})
            errors: dict[int, BaseException] = server.run(save, request).unwrap().errors
            return errors

        assert save_generation(OLD) == {}
        before = names_in(path)
        make_room = fill(small_disk, blocks)
        errors = save_generation(NEW)
        outcomes.add(bool(errors))
        if errors:
            error = errors[0]
            reason = error.reasons[0] if isinstance(error, SaveFailedError) else error
            assert isinstance(reason, StorageError), repr(reason)
            assert reason.errno == errno.ENOSPC
            assert names_in(path) == before
            assert free_blocks(small_disk) == blocks
        assert generation_on_disk(path) == (OLD if errors else NEW), f"{blocks} blocks were free"
        make_room()
        assert save_generation(NEXT) == {}
        assert generation_on_disk(path) == NEXT
        assert_only_own_files(path)
        shutil.rmtree(path)
    assert outcomes == {False, True}


def test_metadata_has_room_before_data_is_written(server: ForkServer, small_disk: Path) -> None:
    """Without room for the metadata the coordinator refuses the save, and no rank has created a file."""
    path = small_disk / "ckpt"
    assert server.run(save, SaveRequest(path, OLD)).unwrap().errors == {}
    fill(small_disk, 0)
    error = server.run(save, SaveRequest(path, NEW)).unwrap().errors[0]
    assert type(error) is StorageError
    assert error.errno == errno.ENOSPC
    assert ".tmp" in error.path


def test_leftovers_make_room(server: ForkServer, small_disk: Path) -> None:
    """A save removes what a dead save left before it reserves space, so a dead save cannot block the next one."""
    path = small_disk / "ckpt"
    assert server.run(save, SaveRequest(path, OLD)).unwrap().errors == {}
    taken = (path / next(name for name in names_in(path) if name.endswith(".distcp"))).stat().st_size
    left = path / "__0_0.0123456789abcdef.distcp"
    left.write_bytes(bytes(taken))
    fill(small_disk, 8)
    assert server.run(save, SaveRequest(path, NEW)).unwrap().errors == {}
    assert generation_on_disk(path) == NEW
    assert not left.exists()
