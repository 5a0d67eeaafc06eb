# SPDX-License-Identifier: Apache-2.0
"""Runs torchtitan's own trainer from its command line, with its debug model, on two gloo ranks."""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.ending_ranks import EndingRanks
from support.ports import free_port
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from frameworks.titan_marks import needs_trainer

pytest.importorskip("torchtitan", reason="torchtitan is not installed: ITS ADAPTER IS NOT TESTED")
pytestmark = needs_trainer

LIMIT_S = 150.0


def run_recipe(rank: int, num_ranks: int, arguments: list[str], variables: dict[str, str]) -> None:
    from frameworks import titan_recipe

    titan_recipe.run(rank, num_ranks, arguments, variables)


class Runs(Protocol):
    def __call__(
        self, folder: Path, *flags: str, config: str = ..., num_ranks: int = ...
    ) -> dict[int, dict[int, float]]:
        """Runs a job to its end. Returns the losses by step and by rank, for the ranks that log."""


@pytest.fixture(scope="module")
def train() -> Iterator[Runs]:
    # Forks the job's processes from one that has imported torchtitan, because the import takes longer than a job.
    ranks = EndingRanks("frameworks.titan_recipe")

    def run(folder: Path, *flags: str, config: str = "debug", num_ranks: int = 2) -> dict[int, dict[int, float]]:
        folder.mkdir(exist_ok=True)
        losses = folder / "losses"
        losses.unlink(missing_ok=True)
        arguments = ["--module", "frameworks.titan_recipe", "--config", config, "--dump_folder", str(folder)]
        arguments += ["--debug.seed", "1", "--debug.deterministic", *flags]
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "TITAN_LOSSES": str(losses)}
        ended = ranks.run(num_ranks, run_recipe, num_ranks, arguments, variables, limit_s=LIMIT_S)
        for rank, end in enumerate(ended):
            assert end.code == 0, f"rank {rank}: ...{end.said[-6000:]}"
        found: dict[int, dict[int, float]] = {}
        for rank, step, loss in map(json.loads, losses.read_text().splitlines()):
            found.setdefault(step, {})[rank] = loss
        return found

    yield run
    ranks.close()


def _keep(folder: Path, source: Path, step: int) -> None:
    """Copies a checkpoint, as a run leaves it that was stopped after ``step``."""
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


def test_the_flag_resumes_as_if_nothing_had_been(tmp_path: Path, train: Runs) -> None:
    """Losses and the last checkpoint equal exactly those of an uninterrupted run with torchtitan's own manager."""
    uninterrupted, cut, again = tmp_path / "uninterrupted", tmp_path / "cut", tmp_path / "again"
    losses = train(uninterrupted)
    assert sorted(losses) == [1, 2, 3, 4, 5, 6]
    assert not _is_ours(uninterrupted / "checkpoint" / "step-6")

    _keep(cut, uninterrupted, 2)  # our manager resumes their checkpoint
    resumed = train(
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
    assert train(again, config="ours_in_the_recipe") == {step: losses[step] for step in (5, 6)}
    for run in (cut, again):
        _assert_same(run, uninterrupted)


def _assert_same(run: Path, other: Path) -> None:
    """Asserts that the last checkpoints of two runs are equal."""
    found, wanted = (_contents(each / "checkpoint" / "step-6") for each in (run, other))
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        same = torch.equal(value, found[name]) if isinstance(value, torch.Tensor) else value == found[name]  # type: ignore[arg-type]
        assert same, (run.name, name)


def _degrees(**degrees: int) -> list[str]:
    names = {"replicate": "data_parallel_replicate", "shard": "data_parallel_shard"}
    flags = ((f"--parallelism.{names.get(name, name + '_parallel')}_degree", str(n)) for name, n in degrees.items())
    return [text for flag in flags for text in flag]


def _schedule(name: str) -> list[str]:
    return ["--parallelism.pipeline_parallel_schedule", name]


NEEDS_SCHEDULES = pytest.mark.skipif(
    "arg_mbs" not in inspect.signature(PipelineScheduleSingle.step).parameters,
    reason="this torch's schedules do not take microbatches, which torchtitan 0.3.0 gives them: "
    "PIPELINES OF ITS TRAINER ARE NOT TESTED",
)


@pytest.mark.parametrize(
    ("num_ranks", "flags"),
    [
        pytest.param(4, _degrees(replicate=2, shard=2), id="hsdp"),
        pytest.param(2, _degrees(tensor=2), id="tp", marks=pytest.mark.long),
        pytest.param(4, _degrees(pipeline=2, tensor=2), id="pp-tp", marks=[NEEDS_SCHEDULES, pytest.mark.long]),
        pytest.param(
            2, [*_degrees(pipeline=2), *_schedule("1F1B")], id="1F1B", marks=[NEEDS_SCHEDULES, pytest.mark.long]
        ),
        pytest.param(
            2,
            [*_degrees(pipeline=2), *_schedule("Interleaved1F1B")],
            id="Interleaved1F1B",
            marks=NEEDS_SCHEDULES,
        ),
        pytest.param(
            2,
            [*_degrees(pipeline=2), *_schedule("ZBVZeroBubble")],
            id="ZBVZeroBubble",
            marks=[NEEDS_SCHEDULES, pytest.mark.long],
        ),
    ],
)
def test_the_flag_resumes_in_each_layout(tmp_path: Path, train: Runs, num_ranks: int, flags: list[str]) -> None:
    """Our manager resumes what torchtitan's manager saved."""
    uninterrupted, cut = tmp_path / "uninterrupted", tmp_path / "cut"
    losses = train(uninterrupted, *flags, num_ranks=num_ranks)
    assert len({tuple(of_step.values()) for of_step in losses.values()}) == 6
    _keep(cut, uninterrupted, 2)
    resumed = train(cut, *flags, "--override.imports", "bytecheckpoint.torchtitan.use", num_ranks=num_ranks)
    assert resumed == {step: losses[step] for step in (3, 4, 5, 6)}
    assert _is_ours(cut / "checkpoint" / "step-6")
    _assert_same(cut, uninterrupted)


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_the_trainers_charts_have_our_numbers(tmp_path: Path, train: Runs, mode: str) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    ours = ("--override.imports", "bytecheckpoint.torchtitan.use", "--checkpoint.async_mode", mode)
    train(tmp_path, *ours, "--metrics.enable_tensorboard")
    (folder,) = (tmp_path / "tb").iterdir()
    charts = EventAccumulator(str(folder))
    charts.Reload()
    saves = charts.Scalars("checkpoint/saved_step")
    assert [point.value for point in saves] == [2, 4, 6], "each save once"
    if mode == "disabled":
        assert [point.step for point in saves] == [2, 4, 6]
    else:
        assert all(point.step >= point.value for point in saves)
    for name in ("save_duration_s", "save_blocked_duration_s", "save_size_bytes", "save_gb_per_s"):
        assert [point.step for point in charts.Scalars(f"checkpoint/{name}")] == [point.step for point in saves]
    on_disk = sum(file.stat().st_size for file in (tmp_path / "checkpoint" / "step-6").glob("*.distcp"))
    assert charts.Scalars("checkpoint/save_size_bytes")[-1].value == on_disk
    assert "loss_metrics/global_avg_loss" in charts.Tags()["scalars"]
    train(tmp_path, *ours, "--metrics.enable_tensorboard", "--training.steps", "7", "--metrics.save_tb_folder", "again")
    (folder,) = (tmp_path / "again").iterdir()
    charts = EventAccumulator(str(folder))
    charts.Reload()
    assert [point.step for point in charts.Scalars("checkpoint/load_duration_s")] == [6]
