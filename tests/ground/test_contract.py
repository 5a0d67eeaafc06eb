# SPDX-License-Identifier: Apache-2.0
"""Each file system does what every place must do. Each case is a test of its own, so that the record names it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from storage.contract import READING, WRITING
from storage.places import Place
from support.fork_server import ForkServer

from ground.mounts import Ground, Machines

# Where no file can be created and never replaced in one step; see test_one_machine.py.
_CREATES_NOTHING = {"s3fs", "rclone, writes"}


def _run(case: Callable[[Place], None], path: Path) -> None:
    case(Place(str(path)))


def _test_of(case: Callable[[Place], None]) -> Callable[..., None]:
    def test(ground: Ground, machines: Machines, path: Path) -> None:
        if case.__name__ == "a_save_that_may_not_overwrite_is_refused" and ground.kind in _CREATES_NOTHING:
            pytest.skip("a save that may not overwrite is refused at its begin, which another test shows")
        machine: ForkServer = machines[0]
        machine.run(_run, case, path).unwrap()

    return test


for _case in (*READING, *WRITING):
    globals()[f"test_{_case.__name__}"] = _test_of(_case)
