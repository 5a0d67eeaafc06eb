# SPDX-License-Identifier: Apache-2.0
"""Tests the names that a user finds in the package, and the repr of its objects."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.pausing_planner import PausingPlanner

import bytecheckpoint
from bytecheckpoint import (
    BcpLoadPlanner,
    BcpReader,
    BcpSavePlanner,
    BcpStager,
    BcpWriter,
    Config,
    Retention,
    async_save_state_dict,
    load_state_dict,
    save_state_dict,
    shutdown,
)
from bytecheckpoint.errors import InvalidPlanError

LIMIT_S = 60.0


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    shutdown(LIMIT_S)


def test_public_modules_are_attributes_and_torch_is_not_imported_for_them() -> None:
    program = """
import sys, bytecheckpoint
assert bytecheckpoint.errors.CheckpointError is bytecheckpoint.CheckpointError
assert bytecheckpoint.report.LoadReport is bytecheckpoint.LoadReport
bytecheckpoint.config
from bytecheckpoint.checkpoint import retention, steps, verification
assert "torch" not in sys.modules
assert {"errors", "config", "save"} <= set(dir(bytecheckpoint))
for name in dir(bytecheckpoint):
    getattr(bytecheckpoint, name)
try:
    bytecheckpoint.nothing
except AttributeError as error:
    assert "nothing" in str(error)
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=LIMIT_S)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (BcpWriter("/ckpt/5"), "BcpWriter('/ckpt/5')"),
        (
            BcpWriter("/ckpt/5", overwrite=False, thread_count=4, user_metadata={"token": "secret"}),
            "BcpWriter('/ckpt/5', overwrite=False, config=Config(io_threads=4))",
        ),
        (BcpReader("/ckpt/5", config=Config(verify=False)), "BcpReader('/ckpt/5', config=Config(verify=False))"),
        (BcpSavePlanner(), "BcpSavePlanner()"),
        (BcpSavePlanner(dedup_save_to_lowest_rank=True), "BcpSavePlanner(dedup_save_to_lowest_rank=True)"),
        (BcpLoadPlanner(allow_partial_load=True), "BcpLoadPlanner(allow_partial_load=True)"),
        (
            BcpStager(True, config=Config(staging_threads=3)),
            "BcpStager(overlap=True, config=Config(staging_threads=3))",
        ),
    ],
)
def test_objects_say_what_they_are(value: object, text: str) -> None:
    assert repr(value) == text
    assert repr(Retention("/run", keep_latest=3)).startswith("Retention(root='/run', keep_latest=3")


def test_a_handle_says_how_far_its_save_is(tmp_path: Path) -> None:
    planner = PausingPlanner()
    handle = async_save_state_dict(tmp_path / "a", {"w": torch.ones(10)}, planner=planner)
    assert planner.arrived.wait(LIMIT_S)
    assert repr(handle) == f"SaveHandle('{tmp_path / 'a'}', saving)"
    planner.go_on.set()
    handle.committed.result(LIMIT_S)
    assert repr(handle) == f"SaveHandle('{tmp_path / 'a'}', committed)"

    (tmp_path / "file").write_text("")
    failing = async_save_state_dict(tmp_path / "file" / "b", {"w": torch.ones(10)})
    with pytest.raises(bytecheckpoint.CheckpointError):
        shutdown(LIMIT_S)
    assert repr(failing) == f"SaveHandle('{tmp_path / 'file' / 'b'}', failed: StorageError)"

    planner = PausingPlanner()
    cancelled = async_save_state_dict(tmp_path / "c", {"w": torch.ones(10)}, planner=planner)
    assert planner.arrived.wait(LIMIT_S)
    cancelled._give_up()
    planner.go_on.set()
    assert cancelled.cancel(LIMIT_S)
    assert repr(cancelled) == f"SaveHandle('{tmp_path / 'c'}', cancelled)"


def test_a_state_that_is_no_dict_is_told_by_its_type(tmp_path: Path) -> None:
    wrong: Any = [torch.ones(3)]
    for call in (save_state_dict, async_save_state_dict, load_state_dict):
        with pytest.raises(InvalidPlanError, match=rf"{call.__name__}\({tmp_path}.*must be a dict .*, got a list"):
            call(tmp_path / "ck", wrong)
    with pytest.raises(InvalidPlanError, match="got a Linear"):
        save_state_dict(tmp_path / "ck", torch.nn.Linear(2, 2))  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
