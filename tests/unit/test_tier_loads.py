# SPDX-License-Identifier: Apache-2.0
"""``Tiers``: loads take the nearest place that has a step, and the newest of all places."""

from __future__ import annotations

import dataclasses
import logging
import shutil
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.cli_runs import as_json, run
from support.ranks import run_ranks
from support.tier_runs import LIMIT_S, loaded, save, state_of, tiers

from bytecheckpoint import (
    Config,
    Tiers,
    async_save_state_dict,
    latest,
    resume,
    scan_steps,
    shutdown,
)
from bytecheckpoint.checkpoint.newest import newest_whole
from bytecheckpoint.errors import CheckpointError, CheckpointNotFoundError
from bytecheckpoint.storage import far_looks

pytestmark = pytest.mark.filterwarnings("ignore:.*it is on one device with:RuntimeWarning")

__all__ = ["tiers"]


def test_the_nearest_that_has_it(tiers: Tiers, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tiers, 1)
    shutdown()
    assert loaded(tiers, 1) == (1, f"{tmp_path}/near/step-1")
    (tmp_path / "durable").rename(tmp_path / "away")
    (tmp_path / "durable").write_text("no folder")
    with caplog.at_level(logging.WARNING, "bytecheckpoint"):
        assert loaded(tiers, 1) == (1, f"{tmp_path}/near/step-1")
    assert "cannot be looked at" not in caplog.text  # what is far away is not even asked
    (tmp_path / "durable").unlink()
    (tmp_path / "away").rename(tmp_path / "durable")
    shutil.rmtree(tmp_path / "near/step-1")
    assert loaded(tiers, 1) == (1, f"{tmp_path}/durable/step-1")
    with pytest.raises(CheckpointNotFoundError, match="near/step-9"):
        loaded(tiers, 9)


def test_the_newest_of_all_places(tiers: Tiers, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tiers, step)
    shutdown()
    assert latest(tiers) == f"{tmp_path}/near/step-3"
    shutil.rmtree(tmp_path / "near/step-3")
    assert latest(tiers) == f"{tmp_path}/durable/step-3"  # older ones near by are not passed off as newer
    save(dataclasses.replace(tiers, drain="command"), 2, 22)  # the run went back
    with pytest.warns(RuntimeWarning, match="step-3 has a higher number"):
        assert latest(tiers) == f"{tmp_path}/near/step-2"
    assert {folder.name: dict(folder.tiers) for folder in scan_steps(tiers)} == {
        "step-1": {"near": "complete", "durable": "complete"},
        "step-2": {"near": "complete", "durable": "another save"},
        "step-3": {"durable": "complete"},
    }
    shutil.rmtree(tmp_path / "near")
    assert latest(tiers) == f"{tmp_path}/durable/step-3"
    shutil.rmtree(tmp_path / "durable")
    assert latest(tiers) is None
    assert scan_steps(tiers) == []


@pytest.mark.parametrize("lost", ["near", "durable"])
def test_a_place_that_cannot_be_looked_at(tiers: Tiers, tmp_path: Path, lost: str) -> None:
    save(tiers, 1)
    shutdown()
    shutil.rmtree(tmp_path / lost)
    (tmp_path / lost).write_text("no folder")
    other = "durable" if lost == "near" else "near"
    with pytest.warns(RuntimeWarning, match=f"taking .*{other}/step-1: .*{lost}"):
        assert latest(tiers) == f"{tmp_path}/{other}/step-1"


def test_a_place_that_hangs_is_not_waited_for(tiers: Tiers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tiers, 1)
    shutdown()
    monkeypatch.setattr(far_looks, "_MOST_LOOK_S", 0.2)
    look, released = newest_whole, threading.Event()

    def held(run: Any, *arguments: Any) -> Any:
        assert str(run) != str(tiers.durable) or released.wait(LIMIT_S)
        return look(run, *arguments)

    monkeypatch.setattr("bytecheckpoint.training_state.latest.newest_whole", held)
    with pytest.warns(RuntimeWarning, match=r"taking .*near/step-1: latest\(.*durable\): no answer within 0.2 s"):
        assert latest(tiers) == f"{tmp_path}/near/step-1"
    released.set()
    for thread in threading.enumerate():
        if thread.name == "bytecheckpoint-look":
            thread.join(LIMIT_S)


def test_damage_near_by_is_loaded_from_the_durable_place(tiers: Tiers, tmp_path: Path) -> None:
    """Before a step back: also where no step back is allowed."""
    for step in (1, 2):
        save(tiers, step)
    shutdown()
    (file,) = (tmp_path / "near/step-2").glob("*.distcp")
    damaged = bytearray(file.read_bytes())
    damaged[len(damaged) // 3] ^= 1
    file.write_bytes(damaged)
    state = state_of(0)
    with pytest.warns(RuntimeWarning, match="near/step-2 is damaged, so .*durable/step-2 is loaded"):
        resumed = resume(tiers, state, no_dist=True, max_steps_back=0)
    assert resumed is not None
    assert (resumed.path, resumed.step, float(state["w"][0])) == (f"{tmp_path}/durable/step-2", 2, 2)
    assert resumed.passed_over == (f"{tmp_path}/near/step-2",)
    (file,) = (tmp_path / "durable/step-2").glob("*.distcp")
    file.write_bytes(damaged)
    with pytest.raises(CheckpointError, match="the block has CRC"):
        resume(tiers, state, no_dist=True, max_steps_back=0)
    with pytest.warns(RuntimeWarning, match="step-2 is damaged, so .*step-1 is loaded"):
        resumed = resume(tiers, state, no_dist=True)
    assert resumed is not None
    assert (resumed.step, float(state["w"][0])) == (1, 1)


def _on_ranks(folder: str) -> tuple[str | None, str, list[float], str]:
    tiers = Tiers(near=f"{folder}/near", durable=f"{folder}/durable", config=Config(journal="off"))
    rank = dist.get_rank()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        handle = async_save_state_dict(
            tiers / "step-1", {"w": torch.ones(10), f"r{rank}": torch.full((3,), float(rank))}
        )
        assert handle.durable is not None
        copy = handle.durable.result(LIMIT_S)  # on the rank that copies, and on the others
        dist.barrier()
        if rank == 0:
            shutil.rmtree(f"{folder}/near")
        dist.barrier()
        found = latest(tiers, process_group=dist.group.WORLD)
        state = {"w": torch.zeros(10), f"r{1 - rank}": torch.zeros(3)}
        resumed = resume(tiers, state)
        assert resumed is not None
        shutdown()
    return found, copy, state[f"r{1 - rank}"].tolist(), resumed.path


def test_on_ranks(tmp_path: Path) -> None:
    copy = f"{tmp_path}/durable/step-1"
    assert run_ranks(2, _on_ranks, str(tmp_path)) == [
        (copy, copy, [1.0] * 3, copy),
        (copy, copy, [0.0] * 3, copy),
    ]


def test_command_says_what_is_where(tiers: Tiers, tmp_path: Path) -> None:
    for step in (1, 2):
        save(tiers, step)
    shutdown()
    shutil.rmtree(tmp_path / "near/step-1")
    listed = as_json("steps", str(tiers.near), "--durable", str(tiers.durable))
    assert [step["tiers"] for step in listed["steps"]] == [
        {"durable": "complete"},
        {"near": "complete", "durable": "complete"},
    ]
    assert listed["newest"] == f"{tmp_path}/near/step-2"
    lines = run("steps", str(tiers.near), "--durable", str(tiers.durable)).output.splitlines()
    assert any(line.endswith("durable complete") and line.startswith("step-1") for line in lines)
    assert any(line.endswith("near complete, durable complete") for line in lines)
