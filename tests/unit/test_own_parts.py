# SPDX-License-Identifier: Apache-2.0
"""A folder that has the part of this machine's ranks alone: what a look, a prune, a drain and a load say of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks

from bytecheckpoint import Retention, Tiers, drain, resume, save_state_dict, scan_steps
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.native import _core
from bytecheckpoint.storage.own_parts import note_own_part, ranks_of_own_part


def save_parts(path: str) -> None:
    rank = dist.get_rank()
    save_state_dict(path, {f"w{rank}": torch.full((1000,), float(rank))})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Returns a run with two steps, of whose ranks only the first one's files are here."""
    for step in (1, 2):
        folder = tmp_path / f"run/step-{step}"
        run_ranks(2, save_parts, str(folder))
        for file in folder.glob("__1_*"):
            file.unlink()
    return tmp_path / "run"


def note(folder: Path) -> None:
    note_own_part(folder, _core.Checkpoint.open(str(folder)).save_id, [0])


def test_a_step_counts_once_it_is_noted(run: Path) -> None:
    retention = Retention(run, keep_latest=1)
    assert [step.state for step in scan_steps(run)] == ["corrupt", "corrupt"]
    assert retention.prune().kept == []
    note(run / "step-1")
    assert [step.state for step in scan_steps(run)] == ["part", "corrupt"]
    assert retention.prune().kept == [1]
    note(run / "step-2")
    report = retention.prune()
    assert (report.kept, report.removed) == ([2], [str(run / "step-1")])
    (file,) = (run / "step-2").glob("__0_*")
    file.write_bytes(file.read_bytes()[:-4096])
    assert [step.state for step in scan_steps(run)] == ["corrupt"]


def test_a_process_alone_has_not_all_of_it(run: Path, tmp_path: Path) -> None:
    for step in (1, 2):
        note(run / f"step-{step}")
    into = {"w0": torch.zeros(1000)}
    with pytest.raises(CheckpointError, match="step-2 is part: machines with disks of their own have the other parts"):
        resume(Tiers(near=run), into, no_dist=True)
    report = drain(run, tmp_path / "durable")
    assert {Path(path).name for path in report.failed} == {"step-1", "step-2"}
    assert "part: machines with disks" in report.failed[str(run / "step-2")]


@pytest.mark.parametrize(
    "text", ["", "0" * 32, "0" * 32 + "\n\n", "0" * 32 + "\n0 x\n", "1" * 32 + "\n0\n", "\0" * 100]
)
def test_what_is_no_note(text: str, tmp_path: Path) -> None:
    (tmp_path / ".bcp").mkdir()
    (tmp_path / ".bcp/part.txt").write_text(text)
    assert ranks_of_own_part(tmp_path, "0" * 32) is None
    note_own_part(tmp_path, "0" * 32, {7, 0, 12})
    assert ranks_of_own_part(tmp_path, "0" * 32) == {0, 7, 12}
    assert ranks_of_own_part(tmp_path, "1" * 32) is None
