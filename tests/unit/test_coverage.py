# SPDX-License-Identifier: Apache-2.0
"""Tests that every element of every tensor is in one chunk: at the plan, at the commit, on disk, in a load."""

from __future__ import annotations

import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from partial_states import PARTIAL, UncheckedWriter, gap_of, rows, save_incomplete
from run_folder import RunFolder, save_at
from support.cli_runs import run
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan

from bytecheckpoint import (
    BcpLoadPlanner,
    BcpReader,
    BcpSavePlanner,
    BcpWriter,
    Config,
    Retention,
    find_latest_ckpt_path,
    save_state_dict,
    scan_steps,
    verify,
)
from bytecheckpoint.errors import InvalidPlanError
from bytecheckpoint.native import _core
from bytecheckpoint.torchtitan._engine import _newest


class LookingPlanner(BcpSavePlanner):
    """Looks at the items of all plans. DCP's own planner then joins the plans."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        assert all(len(list(plan.items)) for plan in all_plans)
        return super().create_global_plan(all_plans)


class CutsMetadata(DefaultSavePlanner):
    """Leaves the last chunk of "w" out of the metadata."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        metadata.state_dict_metadata["w"].chunks.pop()  # type: ignore[union-attr]
        return plans, metadata


AS_GIVEN = Config(planning="as given")


def save(path: Path, state: dict[str, Any], *, planner: Any = None, writer: Any = None, **options: Any) -> None:
    dcp.save(state, storage_writer=writer or BcpWriter(path, **options), planner=planner, no_dist=True)


def load(path: Path, into: dict[str, Any], *, planner: Any = None) -> None:
    dcp.load(into, storage_reader=BcpReader(path, config=AS_GIVEN), planner=planner or BcpLoadPlanner(), no_dist=True)


def refusal(call: Any) -> InvalidPlanError:
    with pytest.raises(CheckpointException) as raised:
        call()
    error = raised.value.failures[0][0]
    assert isinstance(error, InvalidPlanError), error
    return error


def state_of(path: Path) -> tuple[str, str]:
    found = _core.inspect_folder(str(path))
    return found["state"], found["reason"]


# Gaps that are found at the plan and at the commit.


@pytest.mark.parametrize("planner", [BcpSavePlanner, LookingPlanner, DefaultSavePlanner])
@pytest.mark.parametrize("saved_before", [False, True])
def test_one_rank_that_holds_half_a_tensor_is_refused(planner: Any, saved_before: bool, tmp_path: Path) -> None:
    if saved_before:  # neither the plan of a whole state nor that of an earlier try may be used again
        save(tmp_path, {"w": rows(0, 8)}, planner=planner())
    for _ in range(2):
        error = refusal(lambda: save(tmp_path, {"w": rows(0, 4)}, planner=planner()))
        assert gap_of(4, 8) in str(error)
        assert "allow_partial_tensors=True" in str(error)
    assert not list(tmp_path.glob("*.tmp"))
    if saved_before:
        got = {"w": torch.zeros(8, 2)}
        load(tmp_path, got)
        assert torch.equal(got["w"], torch.arange(16.0).view(8, 2))
    else:
        assert not list(tmp_path.iterdir())


def test_it_is_refused_before_a_byte_is_written_whoever_plans(tmp_path: Path) -> None:
    class Watched(BcpWriter):
        writes = 0

        def write_data(self, plan: Any, planner: Any) -> Any:
            self.writes += 1
            return super().write_data(plan, planner)

    for planner in (BcpSavePlanner(), LookingPlanner(), DefaultSavePlanner(), CutsMetadata()):
        writer = Watched(tmp_path)
        refusal(
            lambda planner=planner, writer=writer: save(tmp_path, {"w": rows(0, 4)}, planner=planner, writer=writer)
        )
        assert writer.writes == 0


@pytest.mark.parametrize("planner", [BcpSavePlanner, LookingPlanner])
def test_our_planner_refuses_for_any_writer(planner: Any, tmp_path: Path) -> None:
    writer = FileSystemWriter(tmp_path)
    assert gap_of(4, 8) in str(refusal(lambda: save(tmp_path, {"w": rows(0, 4)}, planner=planner(), writer=writer)))


def test_what_was_planned_is_judged_by_its_metadata(tmp_path: Path) -> None:
    error = refusal(lambda: save(tmp_path, {"w": torch.ones(8, 2)}, planner=CutsMetadata()))
    assert gap_of(0, 8) in str(error)


def test_a_gap_that_is_not_of_whole_rows_is_told_as_a_box(tmp_path: Path) -> None:
    from bytecheckpoint.tensors.chunks import LocalChunks

    left = LocalChunks((8, 2), [(0, 0)], [torch.ones(8, 1)], torch.float32)
    error = refusal(lambda: save(tmp_path, {"w": left}, planner=BcpSavePlanner()))
    assert "'w': the box at [0, 1] of [8, 1], in a tensor of [8, 2], is in no chunk" in str(error)


# Tensors that are partial on purpose.


@pytest.mark.parametrize("planner", [BcpSavePlanner, LookingPlanner, DefaultSavePlanner])
def test_partial_tensors_that_are_meant_are_saved_and_marked(planner: Any, tmp_path: Path) -> None:
    made = planner() if planner is DefaultSavePlanner else planner(config=PARTIAL)
    save(tmp_path, {"w": rows(0, 4), "other": torch.ones(3)}, planner=made, config=PARTIAL)
    assert state_of(tmp_path) == ("complete", "")
    assert verify(tmp_path).is_whole
    partial = {item[0]: item[-1] for item in _core.Checkpoint.open(str(tmp_path)).contents()}
    assert partial == {"w": True, "other": False}
    got = {"w": rows(0, 4, value=-1.0)}
    load(tmp_path, got)
    assert torch.equal(got["w"].tensors[0], rows(0, 4).tensors[0])
    assert "on purpose" in run("show", str(tmp_path), "w").stdout
    assert "(partial)" in run("ls", str(tmp_path)).stdout


def test_the_planner_that_was_told_is_enough(tmp_path: Path) -> None:
    save(tmp_path, {"w": rows(0, 4)}, planner=BcpSavePlanner(config=PARTIAL))
    assert state_of(tmp_path) == ("complete", "")


def test_overlaps_are_never_allowed(tmp_path: Path) -> None:
    from bytecheckpoint.tensors.chunks import LocalChunks

    twice = LocalChunks((8, 2), [(0, 0), (2, 0)], [torch.ones(4, 2), torch.ones(4, 2)], torch.float32)
    error = refusal(lambda: save(tmp_path, {"w": twice}, planner=BcpSavePlanner(config=PARTIAL), config=PARTIAL))
    assert "overlap" in str(error)


def test_only_checkpoints_with_partial_tensors_are_of_a_new_version(tmp_path: Path) -> None:
    def version(path: Path) -> int:
        data = (path / ".metadata").read_bytes()
        return data[data.index(b"BCPMANI\1") + 8]

    save(tmp_path / "whole", {"w": rows(0, 8)}, planner=BcpSavePlanner(config=PARTIAL), config=PARTIAL)
    save(tmp_path / "part", {"w": rows(0, 4)}, planner=BcpSavePlanner(config=PARTIAL), config=PARTIAL)
    assert (version(tmp_path / "whole"), version(tmp_path / "part")) == (1, 2)


def test_our_entry_point_takes_it_from_its_config(tmp_path: Path) -> None:
    with pytest.raises(InvalidPlanError, match=re.escape(gap_of(4, 8))):
        save_state_dict(tmp_path, {"w": rows(0, 4)})
    save_state_dict(tmp_path, {"w": rows(0, 4)}, config=PARTIAL)
    assert state_of(tmp_path) == ("complete", "")


def test_the_environment_allows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not Config.from_env().allow_partial_tensors
    monkeypatch.setenv("BYTECHECKPOINT_ALLOW_PARTIAL_TENSORS", "1")
    assert Config.from_env().allow_partial_tensors


# Gaps in checkpoints on disk.


def test_a_checkpoint_with_a_gap_is_incomplete_and_says_where(tmp_path: Path) -> None:
    save_incomplete(tmp_path, {"w": rows(0, 4), "v": rows(0, 1, of=2), "u": torch.ones(3)})
    for _ in range(2):  # the second time, the result is remembered
        assert state_of(tmp_path) == ("incomplete", "'v': rows 1 to 1 of 2 are in no chunk, and 1 more tensor")
    report = verify(tmp_path)
    assert not report.is_whole
    assert [(p.file, p.section, p.fqns, p.message) for p in report.problems] == [
        (".metadata", "metadata", ["v"], "'v': rows 1 to 1 of 2 are in no chunk"),
        (".metadata", "metadata", ["w"], gap_of(4, 8)),
    ]
    assert run("verify", str(tmp_path)).exit_code == 1


def test_what_is_there_loads_and_what_is_not_is_an_error_before_a_tensor_changes(tmp_path: Path) -> None:
    save_incomplete(tmp_path)
    got: dict[str, Any] = {"w": rows(1, 4, value=-1.0), "other": torch.zeros(3)}
    load(tmp_path, got)
    assert torch.equal(got["w"].tensors[0], rows(1, 4).tensors[0])
    assert torch.equal(got["other"], torch.ones(3))
    into = {"other": torch.zeros(3), "w": torch.full((8, 2), -1.0)}
    error = refusal(lambda: load(tmp_path, into))
    assert "'w': rows 4 to 7 of 8 are in no stored chunk" in str(error)
    assert torch.equal(into["other"], torch.zeros(3))


@pytest.mark.parametrize("writer", [partial(UncheckedWriter, config=AS_GIVEN), FileSystemWriter])
def test_stock_planner_s_checkpoints_are_judged_alike(writer: Any, tmp_path: Path) -> None:
    save(tmp_path, {"w": rows(0, 4)}, writer=writer(tmp_path))
    assert state_of(tmp_path) == ("incomplete", gap_of(4, 8))


def test_steps_with_gaps_are_not_counted_kept_or_found(tmp_path: Path) -> None:
    template = tmp_path / "template"
    save_at(template)
    runs = RunFolder(tmp_path / "run", template)
    runs.complete(1, 2, 3)
    for step in (0, 4):
        save_incomplete(runs.path(step))
    runs.age(0, 86_400.0)  # by the time of its commit it is the oldest
    assert [folder.state for folder in scan_steps(runs.root)] == ["incomplete", *["complete"] * 3, "incomplete"]
    listed = run("steps", str(runs.root))
    assert listed.exit_code == 1
    assert gap_of(4, 8) in listed.stdout
    assert "3 complete, 2 incomplete" in listed.stdout
    assert _newest(str(runs.root)).path == str(runs.root / "step-3")

    report = Retention(runs.root, keep_latest=1).prune()
    assert report.kept == [3]
    assert runs.names() == {"step-0", "step-3", "step-4"}
    assert gap_of(4, 8) in report.skipped[str(runs.path(0))]
    report = Retention(runs.root, keep_latest=1, remove_corrupt=True).prune()
    assert report.swept == [str(runs.path(0))]
    assert runs.names() == {"step-3", "step-4"}, "step 4 is the newest"


def test_nothing_is_removed_because_of_steps_with_gaps(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for step in (1, 2, 3):
        save_incomplete(tmp_path / "run" / f"step-{step}")
    report = Retention(tmp_path / "run", keep_latest=1, remove_corrupt=True).prune()
    assert (report.kept, report.removed, report.swept) == ([], [], [])
    assert len(scan_steps(tmp_path / "run")) == 3


def test_a_model_with_gaps_is_not_whole(tmp_path: Path) -> None:
    for step in (1, 2):
        save_at(tmp_path / f"global_step_{step}" / "model")
    with pytest.warns(RuntimeWarning, match="is not there"):
        assert find_latest_ckpt_path(tmp_path) == str(tmp_path / "global_step_2")
    shutil.rmtree(tmp_path / "global_step_2" / "model")
    save_incomplete(tmp_path / "global_step_2" / "model")
    folders = scan_steps(tmp_path)
    assert [(folder.state, folder.reason) for folder in folders] == [
        ("complete", ""),
        ("incomplete", f"model: {gap_of(4, 8)}"),
    ]
    with pytest.warns(RuntimeWarning, match="is not there"):
        assert find_latest_ckpt_path(tmp_path) == str(tmp_path / "global_step_1")


def test_large_metadata_is_judged_too_and_only_once(tmp_path: Path) -> None:
    # About 33 MiB of metadata: the names are long, and each is stored three times.
    many = {f"{i:06}" + "x" * 1200: torch.ones(1) for i in range(8000)}
    save_incomplete(tmp_path, {**many, "w": rows(0, 4)})
    assert (tmp_path / ".metadata").stat().st_size > 32 << 20
    assert state_of(tmp_path) == ("incomplete", gap_of(4, 8))
    assert state_of(tmp_path) == ("incomplete", gap_of(4, 8))


# Loads.


class ReadsLess(DefaultLoadPlanner):
    """A planner that overrides how a load is planned, and so may leave elements out on purpose."""

    def create_local_plan(self) -> LoadPlan:
        return super().create_local_plan()


@pytest.mark.parametrize("is_meant", [False, True])
@pytest.mark.parametrize("is_stock", [False, True])
def test_dcp_s_planner_leaves_nothing_out_without_a_word(is_meant: bool, is_stock: bool, tmp_path: Path) -> None:
    state = {"w": rows(0, 4), "other": torch.ones(3)}
    if is_stock:
        save(tmp_path, state, writer=FileSystemWriter(tmp_path))
    elif is_meant:
        save(tmp_path, state, config=PARTIAL)
    else:
        save_incomplete(tmp_path, state)
    into: dict[str, Any] = {"other": torch.zeros(3), "w": torch.full((8, 2), -1.0)}
    error = refusal(lambda: load(tmp_path, into, planner=DefaultLoadPlanner()))
    assert "'w': rows 4 to 7 of 8 are in no stored chunk" in str(error)
    assert torch.equal(into["other"], torch.zeros(3))
    load(tmp_path, into, planner=ReadsLess())
    assert torch.equal(into["other"], torch.ones(3))
    assert torch.equal(into["w"], torch.cat([torch.arange(8.0).view(4, 2), torch.full((4, 2), -1.0)]))
    there = {"w": rows(1, 4, value=-1.0)}
    load(tmp_path, there, planner=DefaultLoadPlanner())
    assert torch.equal(there["w"].tensors[0], rows(1, 4).tensors[0])


def test_chunks_that_overlap_do_not_hide_a_gap(tmp_path: Path) -> None:
    class Doubles(DefaultSavePlanner):
        """Stores rows 0 to 1, and rows 1 to 2."""

        def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
            return self.create_unchecked(all_plans)

        def create_unchecked(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
            from torch.distributed.checkpoint.default_planner import create_default_global_save_plan

            self.global_plan, self.metadata = create_default_global_save_plan(all_plans)
            return self.global_plan, self.metadata

    from bytecheckpoint.tensors.chunks import LocalChunks

    overlapping = LocalChunks((4,), [(0,), (1,)], [torch.ones(2), torch.ones(2)], torch.float32)
    dcp.save({"w": overlapping}, storage_writer=FileSystemWriter(tmp_path), planner=Doubles(), no_dist=True)
    assert "overlap" in state_of(tmp_path)[1]
    into = {"w": torch.zeros(4)}
    assert "'w': rows 3 to 3 of 4 are in no stored chunk" in str(refusal(lambda: load(tmp_path, into)))
    assert torch.equal(into["w"], torch.zeros(4))
    reader = FileSystemReader(tmp_path)
    planner = BcpLoadPlanner()
    error = refusal(lambda: dcp.load(into, storage_reader=reader, planner=planner, no_dist=True))
    assert "'w': rows 3 to 3 of 4 are in no stored chunk" in str(error)
