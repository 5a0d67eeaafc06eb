# SPDX-License-Identifier: Apache-2.0
"""Tests that ``latest``, ``bcp steps`` and ``prune`` call a checkpoint whole only if the first look of a load does."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.cli_runs import as_json
from torch import nn
from unit.run_folder import RunFolder, save_at, small_state

import bytecheckpoint
from bytecheckpoint import BcpReader, Retention, find_latest_ckpt_path, latest, load_state_dict
from bytecheckpoint.checkpoint.steps import look_at_step
from bytecheckpoint.errors import CheckpointError, CorruptCheckpointError
from bytecheckpoint.torchtitan._engine import _newest

TRIED_BY_LOADS = 274


def flips(mark: Path, num_places: int | None = None) -> Iterator[int]:
    """Flips one bit at each of the places in a file in turn, all if no number is given; at the end it is as it was."""
    good = mark.read_bytes()
    num_places = min(num_places or len(good), len(good))
    for place in (number * len(good) // num_places for number in range(num_places)):
        damaged = bytearray(good)
        damaged[place] ^= 1 << place % 8
        mark.write_bytes(damaged)
        yield place
    mark.write_bytes(good)


def flip(mark: Path, place: int) -> None:
    damaged = bytearray(mark.read_bytes())
    damaged[place] ^= 1
    mark.write_bytes(damaged)


def is_refused(path: Path) -> bool:
    """Whether a load refuses a checkpoint before it reads data."""
    reader = BcpReader(path)
    try:
        reader.set_up_storage_reader(reader.read_metadata(), True)
    except CheckpointError:
        return True
    return False


def state_of(path: Path) -> str:
    folder = look_at_step(1, str(path))
    assert folder is not None
    return folder.state


def test_no_flipped_bit_in_our_metadata_is_whole(tmp_path: Path) -> None:
    save_at(tmp_path)
    found = [state_of(tmp_path) for _ in flips(tmp_path / ".metadata")]
    assert len(found) > 1000
    assert set(found) == {"corrupt", "unknown"}, "unknown: the bit made it a newer version"
    assert found.count("unknown") < 8
    assert state_of(tmp_path) == "complete"
    assert all(is_refused(tmp_path) for _ in flips(tmp_path / ".metadata", TRIED_BY_LOADS))


def test_what_stock_wrote_is_whole_only_if_it_opens(tmp_path: Path) -> None:
    """Stock's metadata have no checksums: many a flipped bit says something else that is just as possible."""
    dcp.save(small_state(), checkpoint_id=tmp_path, no_dist=True)
    seen = {(state_of(tmp_path) == "complete", is_refused(tmp_path)) for _ in flips(tmp_path / ".metadata")}
    assert (True, True) not in seen
    assert {(False, True), (True, False)} <= seen


@pytest.mark.parametrize("place", [0, 100, 400])
def test_a_bit_of_the_pickle_is_seen_by_all(run: RunFolder, place: int) -> None:
    run.complete(1, 2, 3)
    flip(run.path(3) / ".metadata", place)
    with pytest.raises(CorruptCheckpointError, match="pickle of the metadata: CRC"):
        load_state_dict(run.path(3), small_state(), no_dist=True)
    with pytest.warns(RuntimeWarning, match="step-3, which is corrupt: .*pickle of the metadata: CRC"):
        assert latest(run.root) == str(run.path(2))
    assert _newest(str(run.root)).path == str(run.root / "step-2")
    listed = as_json("steps", str(run.root), code=1)
    assert [step["state"] for step in listed["steps"]] == ["complete", "complete", "corrupt"]
    assert listed["newest"] == str(run.path(2))
    report = Retention(run.root, keep_latest=1).prune()
    assert (report.kept, report.removed) == ([2], [str(run.path(1))])
    assert "pickle of the metadata" in report.skipped[str(run.path(3))]


def test_a_bit_of_the_pickle_of_a_rank_s_part(run: RunFolder) -> None:
    run.complete(1, 2)
    mark = (run.path(2) / ".metadata").rename(run.path(2) / "__0.metadata")
    shutil.copy2(mark, run.path(2) / "__1.metadata")
    assert state_of(run.path(2)) == "complete"
    flip(run.path(2) / "__1.metadata", 100)
    assert state_of(run.path(2)) == "corrupt"
    assert Retention(run.root, keep_latest=1).prune().kept == [1]


@pytest.mark.parametrize("part", ["model", "extra_state"])
def test_a_bit_of_the_pickle_of_a_part(tmp_path: Path, part: str) -> None:
    for step in (1, 2):
        bytecheckpoint.save(tmp_path, {"model": nn.Linear(3, 2), "extra_state": {"a": 1}}, "ddp", global_steps=step)
    flip(tmp_path / "global_step_2" / part / ".metadata", 100)
    with pytest.warns(RuntimeWarning) as said:
        assert find_latest_ckpt_path(tmp_path) == str(tmp_path / "global_step_1")
    assert f"corrupt: {part}: " in str(said[0].message)
    assert "names step '2', which is not whole" in str(said[1].message)
    assert Retention(tmp_path, keep_latest=1).prune().kept == [1]


def test_a_bit_of_large_metadata_is_seen_at_the_second_look_too(tmp_path: Path) -> None:
    """Of metadata over 32 MiB, loads read the blocks of the manifest that they need, and no pickle."""
    many: dict[str, Any] = {f"{i:06}" + "x" * 1200: torch.ones(1) for i in range(8000)}
    dcp.save(many, storage_writer=bytecheckpoint.BcpWriter(tmp_path, sync_files=False), no_dist=True)
    mark = tmp_path / ".metadata"
    assert mark.stat().st_size > 32 << 20
    assert state_of(tmp_path) == "complete"
    flip(mark, mark.stat().st_size - (4 << 20))
    assert state_of(tmp_path) == "corrupt"
