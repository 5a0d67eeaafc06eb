# SPDX-License-Identifier: Apache-2.0
"""A GlusterFS volume of three replicas loses the servers of its bricks while it is saved to."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fork_server import LIMIT_S, ForkServer
from support.glusterfs import GlusterFS
from support.mounts import fuse_mounted
from support.saves import SaveRequest, attempt, generation_on_disk

from bytecheckpoint.errors import StorageError
from ground.mounts import untested
from ground.shared_mounts import needs

OLD, NEW, LOST, NEXT = 1, 2, 3, 4
KIND = "GlusterFS"

pytestmark = pytest.mark.skipif(
    os.environ.get("BCP_GROUND") != "1", reason="GLUSTERFS IS NOT TESTED: set BCP_GROUND=1, as `make ground` does"
)


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[GlusterFS, Path]]:
    needs(KIND, GlusterFS.missing())
    root = tmp_path_factory.mktemp("bricks")
    volume = GlusterFS(root)
    with contextlib.ExitStack() as stack:
        stack.callback(volume.close)
        at = root / "mounted"
        stack.enter_context(fuse_mounted(at, *volume.mount, str(at), untested=untested(KIND)))
        yield volume, at / "ckpt"


def errors_of(request: SaveRequest) -> list[BaseException]:
    return [*attempt(request).errors.values()]


def wait_until_usable(checkpoint: Path) -> None:
    """Waits until the mount has found the bricks again, and reads and writes by plain calls."""
    until = time.monotonic() + LIMIT_S / 2
    while True:
        try:
            (checkpoint / ".metadata").read_bytes()
            (checkpoint.parent / "try").write_text("")
            (checkpoint.parent / "try").unlink()
            return
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


def test_one_brick_may_die_and_two_lose_no_checkpoint(volume: tuple[GlusterFS, Path], server: ForkServer) -> None:
    bricks, path = volume
    assert server.run(errors_of, SaveRequest(path, OLD)).unwrap() == []
    bricks.kill(0)
    assert server.run(errors_of, SaveRequest(path, NEW)).unwrap() == []
    assert server.run(generation_on_disk, path).unwrap() == NEW
    bricks.kill(1)
    (error,) = server.run(errors_of, SaveRequest(path, LOST)).unwrap()
    assert isinstance(error, StorageError), repr(error)
    for number in (0, 1):
        bricks.bricks[number] = bricks.start(number)
    server.run(wait_until_usable, path).unwrap()
    assert server.run(generation_on_disk, path).unwrap() == NEW
    assert server.run(errors_of, SaveRequest(path, NEXT)).unwrap() == []
    assert server.run(generation_on_disk, path).unwrap() == NEXT
    for number in (0, 1):
        bricks.kill(number)  # what a test starts ends with it
