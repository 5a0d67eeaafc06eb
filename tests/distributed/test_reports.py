# SPDX-License-Identifier: Apache-2.0
"""The coordinator's report of a save contains what each rank reports, and only one rank logs it."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from support.ranks import run_ranks

from bytecheckpoint import BcpReader, BcpSavePlanner, BcpWriter, Config, RankSaveReport, SaveReport
from distributed.reported import logged, state

NUM_RANKS = 4
OF_THE_COORDINATOR = ("global_plan_s", "begin_s", "wait_s", "assemble_s", "commit_s", "sweep_s")


def save(path: str, planned_by_us: bool, **arguments: Any) -> tuple[SaveReport, list[str]]:
    lines, writer = logged(), BcpWriter(path)
    planner = BcpSavePlanner() if planned_by_us else None
    dcp.save(state(), storage_writer=writer, planner=planner, **arguments)
    assert writer.last_report is not None
    return writer.last_report, lines


def save_alone(path: str) -> tuple[SaveReport, list[str]]:
    return save(path, False, use_collectives=False)


def own_part(report: SaveReport) -> RankSaveReport:
    return RankSaveReport(**{field.name: getattr(report, field.name) for field in dataclasses.fields(RankSaveReport)})


def test_the_coordinator_knows_all_ranks(tmp_path: Path) -> None:
    for planned_by_us in (False, True):
        path = tmp_path / str(planned_by_us)
        reports, lines = zip(*run_ranks(NUM_RANKS, save, str(path), planned_by_us), strict=True)
        ours = reports[0]
        assert [report.rank for report in reports] == [*range(NUM_RANKS)]
        assert ours.ranks == tuple(map(own_part, reports))
        of_files = [0] * NUM_RANKS
        for file in path.glob("__*.distcp"):
            of_files[int(file.name.split("_")[2])] += file.stat().st_size
        assert [of_rank.bytes_written for of_rank in ours.ranks] == of_files
        assert ours.total_bytes == sum(of_files)
        assert ours.balance == max(of_files) * NUM_RANKS / sum(of_files)
        assert 1.0 < ours.balance < NUM_RANKS
        assert [of_rank["bytes_written"] for of_rank in json.loads(ours.to_json())["ranks"]] == of_files
        assert f"{sum(of_files) / 1e6:.2f} MB by {NUM_RANKS} ranks" in ours.summary()
        assert f"largest rank {ours.balance:.2f}x the mean" in ours.summary()
        assert [*lines] == [[ours.summary()], [], [], []]
        for report in reports[1:]:
            assert (report.ranks, report.balance, report.total_bytes) == ((), None, report.bytes_written)
            assert all(getattr(report, name) == 0.0 for name in OF_THE_COORDINATOR)
            assert math.isclose(report.plan_s + report.exchange_s + report.write_s, report.total_s)


class Plain(BcpWriter):
    """Its hook takes only the arguments of the base class, so DCP does not pass the rank."""

    def set_up_storage_writer(self, is_coordinator: bool) -> None:  # type: ignore[override]
        super().set_up_storage_writer(is_coordinator)


def save_untold(path: str) -> SaveReport:
    writer = Plain(path)
    dcp.save(state(), storage_writer=writer)
    assert writer.last_report is not None
    return writer.last_report


def test_a_writer_that_is_told_no_rank(tmp_path: Path) -> None:
    reports = run_ranks(3, save_untold, str(tmp_path))
    assert [report.rank for report in reports] == [0, 1, 2]
    assert reports[0].ranks == tuple(map(own_part, reports))


def test_without_collectives(tmp_path: Path) -> None:
    reports, lines = zip(*run_ranks(2, save_alone, str(tmp_path)), strict=True)
    assert [*lines] == [[reports[0].summary()], []]
    for rank, report in enumerate(reports):
        assert report.ranks == (own_part(report),)
        assert report.rank == rank
        assert report.commit_s > 0


def progress(path: str) -> str:
    """Returns what this rank writes to stderr during a save and a load."""
    config, text = Config(progress=True), io.StringIO()
    with contextlib.redirect_stderr(text):
        dcp.save(state(), storage_writer=BcpWriter(path, config=config))
        dcp.load(state(), storage_reader=BcpReader(path, config=config))
    return text.getvalue()


def test_one_rank_shows_progress(tmp_path: Path) -> None:
    first, *others = run_ranks(NUM_RANKS, progress, str(tmp_path))
    assert others == [""] * (NUM_RANKS - 1)
    assert first.count("100%") == 2
    assert first.index(f"saving {tmp_path}: ") < first.index(f"loading {tmp_path}: ")
