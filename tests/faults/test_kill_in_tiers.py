# SPDX-License-Identifier: Apache-2.0
"""Tests SIGKILL while a step of ``Tiers`` goes on to the durable place: the next process goes on with it."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import pytest
import torch
from support.fork_server import ForkServer

from bytecheckpoint import Tiers, latest, load_state_dict, read, save_state_dict, scan_steps, shutdown, verify
from bytecheckpoint.checkpoint.keeping import note_drain, pins_of
from faults.points_of_copies import COMMITTED, POINTS

pytestmark = pytest.mark.filterwarnings("ignore:.*it is on one device with:RuntimeWarning")


def save(path: Path, value: float) -> None:
    save_state_dict(path, {"w": torch.full((3 << 18,), value)}, no_dist=True)


def value_at(path: Path) -> float:
    verify(path).raise_if_damaged()
    (value,) = set(read(path)["w"].tolist())
    return float(value)


def go_on(run: str) -> None:
    warnings.simplefilter("ignore")
    tiers = Tiers(near=f"{run}/near", durable=f"{run}/durable")
    load_state_dict(tiers / "step-1", {"w": torch.zeros(3 << 18)}, no_dist=True)
    shutdown()


@pytest.mark.parametrize("is_old_there", [False, True])
@pytest.mark.parametrize("point", POINTS)
def test_kill(failpoint_server: ForkServer, tmp_path: Path, point: str, is_old_there: bool) -> None:
    near, copy = tmp_path / "near/step-1", tmp_path / "durable/step-1"
    if is_old_there:
        save(copy, 1.0)
    save(near, 2.0)
    note_drain(str(near), "waits to be drained")  # as a process leaves it that died behind its commit
    assert failpoint_server.run(go_on, str(tmp_path), env={"BCP_FAILPOINT": point}).was_killed
    is_new = POINTS.index(point) >= COMMITTED
    if is_new or is_old_there:
        assert value_at(copy) == (2.0 if is_new else 1.0)
    else:
        assert not (copy / ".metadata").exists()
    tiers = Tiers(near=tmp_path / "near", durable=tmp_path / "durable")
    assert latest(tiers) == str(near)
    assert scan_steps(tiers)[0].tiers == {"near": "complete", "durable": "draining"}
    go_on(str(tmp_path))
    assert value_at(copy) == 2.0
    assert pins_of([str(near)]) == {}
    shutil.rmtree(near)
    assert latest(tiers) == str(copy)
