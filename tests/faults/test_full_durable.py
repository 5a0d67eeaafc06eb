# SPDX-License-Identifier: Apache-2.0
"""A durable place of ``Tiers`` that is full: training goes on, and steps go there once it has room."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.mounts import mounted
from support.tier_runs import LIMIT_S, save, value_at, wait_until

from bytecheckpoint import Retention, Tiers, scan_steps, shutdown
from bytecheckpoint.checkpoint.tier_drains import drain_of
from bytecheckpoint.errors import CheckpointError

NUMEL = 1 << 20  # 4 MiB a step, of which two fit


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[Tiers]:
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=10M", "none", untested="FULL DURABLE PLACE") as disk:
        yield Tiers(near=tmp_path / "near", durable=disk / "run", most_waiting=2)
        found = drain_of(f"{tmp_path}/near/step-1")
        assert found is not None
        found[0].stop()
        assert found[0].wait(LIMIT_S)


def test_a_full_durable_place(tiers: Tiers, caplog: pytest.LogCaptureFixture) -> None:
    durable = Path(tiers.durable)
    with caplog.at_level(logging.WARNING, "bytecheckpoint"):
        for step in (1, 2):
            save(tiers, step, numel=NUMEL)
            shutdown()
        for step in (3, 4, 5, 6):
            save(tiers, step, numel=NUMEL)
            assert value_at(f"{tiers.near}/step-{step}") == step  # whatever the durable place does
        wait_until(lambda: "it is tried again" in caplog.text)
        with pytest.raises(CheckpointError, match=r"shutdown\(\): .*No space left on device"):
            shutdown()
    assert "No space left on device" in caplog.text
    assert "newer steps wait" in caplog.text
    whole = [step.step for step in scan_steps(durable) if step.is_complete]
    assert whole == [1, 2]
    assert {1, 2, 5, 6} <= {*Retention(tiers, keep_latest=1).prune(protect=[1, 2]).kept}  # what waits stays
    for step in (1, 2):
        shutil.rmtree(durable / f"step-{step}")
    save(tiers, 7, numel=NUMEL)
    with pytest.raises(CheckpointError, match="No space left on device"):  # three wait, and two fit
        shutdown()
    done = [step.step for step in scan_steps(durable) if step.is_complete]
    assert len(done) == 2
    assert all(value_at(durable / f"step-{step}") == step for step in done)
