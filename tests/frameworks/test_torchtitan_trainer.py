# SPDX-License-Identifier: Apache-2.0
"""torchtitan's own trainer, from its command line, with its debug model on two gloo ranks."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from frameworks.titan import run_processes

pytest.importorskip("torchtitan", reason="torchtitan is not installed: ITS ADAPTER IS NOT TESTED")

RECIPE = Path(__file__).with_name("titan_recipe.py")
ROOT = Path(__file__).parents[2]


def _train(folder: Path, *flags: str, config: str = "debug", num_ranks: int = 2) -> dict[int, float]:
    """Runs a job to its end; its losses by step."""
    folder.mkdir(exist_ok=True)
    losses = folder / "losses"
    losses.unlink(missing_ok=True)
    command = [sys.executable, str(RECIPE), "--module", "frameworks.titan_recipe", "--config", config]
    command += ["--dump_folder", str(folder), "--debug.seed", "1", "--debug.deterministic", *flags]
    run_processes(num_ranks, command, PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}", TITAN_LOSSES=str(losses))
    return dict(map(json.loads, losses.read_text().splitlines()))


def _keep(folder: Path, source: Path, step: int) -> None:
    """A run that was cut off after ``step``."""
    shutil.copytree(source / "checkpoint" / f"step-{step}", folder / "checkpoint" / f"step-{step}")


def _contents(path: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(of.size, dtype=of.properties.dtype) if hasattr(of, "size") else None
        for name, of in metadata.items()
    }
    dcp.load(state, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    found.update(state)
    return found


def _is_ours(path: Path) -> bool:
    return any(len(name.suffixes) == 2 for name in path.glob("*.distcp"))


def test_the_flag_resumes_as_if_nothing_had_been(tmp_path: Path) -> None:
    """Losses and the last checkpoint equal, exactly, those of an uninterrupted run with torchtitan's own manager."""
    uninterrupted, cut, again = tmp_path / "uninterrupted", tmp_path / "cut", tmp_path / "again"
    losses = _train(uninterrupted)
    assert sorted(losses) == [1, 2, 3, 4, 5, 6]
    assert not _is_ours(uninterrupted / "checkpoint" / "step-6")

    _keep(cut, uninterrupted, 2)  # theirs is resumed by ours
    resumed = _train(
        cut,
        "--override.imports",
        'bytecheckpoint.torchtitan.use={"io_threads":2}',
        "--checkpoint.async_mode",
        "async_with_pinned_mem",
    )
    assert resumed == {step: losses[step] for step in (3, 4, 5, 6)}
    assert _is_ours(cut / "checkpoint" / "step-4")
    assert _is_ours(cut / "checkpoint" / "step-6")

    _keep(again, cut, 4)
    assert _train(again, config="ours_in_the_recipe") == {step: losses[step] for step in (5, 6)}
    wanted = _contents(uninterrupted / "checkpoint" / "step-6")
    for run in (cut, again):
        found = _contents(run / "checkpoint" / "step-6")
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            other = found[name]
            same = torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other
            assert same, (run.name, name)
