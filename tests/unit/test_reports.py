# SPDX-License-Identifier: Apache-2.0
"""Tests what a save and a load report: figures, JSON, one line in the log."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.logger import _dcp_logger
from torch.distributed.checkpoint.planner import SavePlan

from bytecheckpoint import (
    BcpLoadPlanner,
    BcpReader,
    BcpSavePlanner,
    BcpWriter,
    LoadReport,
    PlanReport,
    RankLoadReport,
    RankSaveReport,
    SaveReport,
)
from bytecheckpoint.planning.plan_cache import plan_cache

PHASES_OF_ALL = ("plan_s", "exchange_s", "write_s")
OF_THE_COORDINATOR = ("global_plan_s", "begin_s", "wait_s", "assemble_s", "commit_s", "sweep_s")
SAVE_PHASES = PHASES_OF_ALL + OF_THE_COORDINATOR
LOAD_PHASES = ("metadata_s", "plan_s", "exchange_s", "read_s", "objects_s", "wait_s")


def state(number: int = 0) -> dict[str, Any]:
    return {"t": torch.full((300, 1000), float(number)), "object": {1, 2}, "step": number}


def rank_report(rank: int, bytes_written: int) -> RankSaveReport:
    return RankSaveReport(rank=rank, bytes_written=bytes_written)


def coordinator_report(*bytes_written: int, **fields: Any) -> SaveReport:
    ranks = tuple(rank_report(rank, of_rank) for rank, of_rank in enumerate(bytes_written))
    return SaveReport(path="/ckpt", save_id="0" * 32, bytes_written=bytes_written[0], ranks=ranks, **fields)


def plain(value: Any) -> Any:
    """Returns ``value`` as JSON gives it back."""
    return json.loads(json.dumps(value))


def save(path: Path, planner: Any = None, writer: BcpWriter | None = None, number: int = 0) -> SaveReport:
    writer = writer or BcpWriter(path)
    dcp.save(state(number), storage_writer=writer, checkpoint_id=path, planner=planner, no_dist=True)
    assert writer.last_report is not None
    return writer.last_report


def load(path: Path, planner: Any = None) -> LoadReport:
    reader = BcpReader(path)
    with torch.serialization.safe_globals([set]):
        dcp.load(state(-1), storage_reader=reader, planner=planner, no_dist=True)
    assert reader.last_report is not None
    return reader.last_report


def test_they_are_frozen_and_by_keyword() -> None:
    for report in (PlanReport(), rank_report(0, 1), coordinator_report(1), LoadReport(path="", save_id="")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            report.seconds = 1.0  # type: ignore[misc]
        with pytest.raises(TypeError):
            type(report)("hit")  # type: ignore[call-arg,misc]


def test_balance_and_rate_of_a_save() -> None:
    report = coordinator_report(3_000_000_000, 1_000_000_000, total_s=0.5)
    assert (report.total_bytes, report.gb_per_s, report.balance) == (4_000_000_000, 8.0, 1.5)
    assert coordinator_report(7, 7, 7).balance == 1.0
    assert coordinator_report(0, 0).balance == 1.0
    own = SaveReport(path="/ckpt", save_id="", rank=3, bytes_written=1_000_000_000, total_s=0.5)
    assert (own.total_bytes, own.gb_per_s, own.balance) == (1_000_000_000, 2.0, None)


def test_without_time_or_bytes_there_is_no_rate() -> None:
    assert coordinator_report(5).gb_per_s == 0.0
    empty = LoadReport(path="/ckpt", save_id="")
    assert (empty.gb_per_s, empty.read_amplification) == (0.0, 0.0)


def test_rates_of_a_load() -> None:
    report = LoadReport(path="/ckpt", save_id="", bytes_wanted=1_000_000_000, bytes_read=1_500_000_000, total_s=0.25)
    assert (report.gb_per_s, report.read_amplification) == (4.0, 1.5)


def without_trace(report: RankLoadReport | RankSaveReport) -> dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(report).items() if name != "trace"}


def test_json_has_every_field_and_property() -> None:
    saved = coordinator_report(3, 1, total_s=2.0, warnings=['a "warning"'], plan=PlanReport(cache="hit", bytes_sent=7))
    kept = json.loads(saved.to_json())
    for field in dataclasses.fields(saved):
        if field.name == "trace":
            continue
        value = getattr(saved, field.name)
        wanted = [*map(without_trace, value)] if field.name == "ranks" else value
        assert kept.pop(field.name) == plain(dataclasses.asdict(wanted) if field.name == "plan" else wanted)
    assert kept == {"total_bytes": 4, "total_linked_bytes": 0, "total_requests": 0, "gb_per_s": 2e-9, "balance": 1.5}
    of_ranks = tuple(RankLoadReport(rank=rank, bytes_wanted=2 + rank, bytes_read=3, read_s=0.5) for rank in range(2))
    loaded = LoadReport(path="/\udcff", save_id="x", bytes_wanted=2, bytes_read=3, total_s=2.0, ranks=of_ranks)
    assert json.loads(loaded.to_json()) == {
        **without_trace(loaded),
        "ranks": [*map(without_trace, of_ranks)],
        "mesh": [],
        "missing_keys": [],
        "missing_parts": [],
        "unexpected_keys": [],
        "casts": [],
        "renamed_keys": [],
        "total_bytes_wanted": 5,
        "total_bytes_read": 6,
        "total_requests": 0,
        "gb_per_s": 2.5e-9,
        "read_amplification": 1.2,
    }


def test_the_line_of_a_save() -> None:
    report = coordinator_report(
        *[133_000_000] * 7,
        139_000_000,
        plan=PlanReport(cache="hit"),
        plan_s=0.001,
        exchange_s=0.001,
        global_plan_s=0.001,
        begin_s=0.001,
        write_s=0.4,
        wait_s=0.08,
        assemble_s=0.001,
        commit_s=0.03,
        sweep_s=0.12,
        total_s=0.635,
    )
    assert report.summary() == (
        "saved /ckpt: 1.07 GB by 8 ranks in 635 ms (1.69 GB/s; plan 4.0 ms, write 480 ms, commit 31 ms, sweep 120 ms; "
        "largest rank 1.04x the mean; plan cache hit)"
    )
    assert str(report) == report.summary()
    assert coordinator_report(10_000, total_s=61.0).summary() == (
        "saved /ckpt: 10.00 kB by 1 rank in 61.00 s (0.00 GB/s; plan 0.0 ms, write 0.0 ms, commit 0.0 ms, sweep 0.0 ms)"
    )
    assert SaveReport(path="/ckpt", save_id="", rank=3).summary().startswith("saved /ckpt: 0 bytes by rank 3 in ")


def test_the_line_of_a_load() -> None:
    report = LoadReport(
        path="/ckpt",
        save_id="",
        rank=3,
        bytes_wanted=42_000_000_000,
        bytes_read=84_000_000_000,
        metadata_s=0.003,
        plan_s=0.001,
        exchange_s=0.001,
        read_s=1.5,
        objects_s=0.0101,
        total_s=1.5151,
    )
    assert report.summary() == (
        "loaded /ckpt: 42.00 GB by rank 3 in 1.52 s (28 GB/s; metadata 3.0 ms, plan 2.0 ms, read 1.50 s, "
        "objects 10 ms, wait 0.0 ms; read 2.00x what was wanted)"
    )
    of_ranks = (RankLoadReport(bytes_wanted=42_000_000_000, bytes_read=42_000_000_000),) * 4
    of_all = dataclasses.replace(report, ranks=of_ranks, wait_s=0.4849, total_s=2.0)
    assert of_all.summary() == (
        "loaded /ckpt: 168.00 GB by 4 ranks in 2.00 s (84 GB/s; metadata 3.0 ms, plan 2.0 ms, read 1.50 s, "
        "objects 10 ms, wait 485 ms; read 1.00x what was wanted)"
    )


@pytest.mark.parametrize("planner", [None, BcpSavePlanner])
def test_phases_of_a_save_add_up(tmp_path: Path, planner: Any) -> None:
    plan_cache().clear()
    report = save(tmp_path, planner and planner())
    phases = [getattr(report, name) for name in SAVE_PHASES]
    assert all(seconds > 0.0 for seconds in phases), phases
    assert math.isclose(sum(phases), report.total_s)
    assert 0.0 < report.stage_s + report.flush_s + report.sync_s <= report.write_s
    own = {field.name: getattr(report, field.name) for field in dataclasses.fields(RankSaveReport)}
    assert report.ranks == (RankSaveReport(**own),)
    assert (report.rank, report.num_records, report.balance) == (0, 3, 1.0)
    assert report.plan.cache == "miss"


@pytest.mark.parametrize("planner", [None, BcpLoadPlanner])
def test_phases_of_a_load_add_up(tmp_path: Path, planner: Any) -> None:
    save(tmp_path)
    report = load(tmp_path, planner and planner())
    phases = [getattr(report, name) for name in LOAD_PHASES]
    assert all(seconds > 0.0 for seconds in phases), phases
    assert math.isclose(sum(phases), report.total_s)
    assert 0.0 < report.seconds <= report.read_s + report.objects_s
    assert report.bytes_wanted > 1_200_000
    assert report.read_amplification > 1.0


def test_a_reader_that_loads_again_begins_anew(tmp_path: Path) -> None:
    save(tmp_path)
    reader = BcpReader(tmp_path)
    reports = []
    for _ in range(3):
        dcp.load({"t": torch.zeros(300, 1000)}, storage_reader=reader, no_dist=True)
        reports.append(reader.last_report)
    for report in reports:
        assert report is not None
        assert math.isclose(sum(getattr(report, name) for name in LOAD_PHASES), report.total_s)


class Reporting(DefaultSavePlanner):
    """Reports a plan, as a planner does that keeps its plans."""

    last_plan: object = None

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        self.last_plan = PlanReport(cache="hit", bytes_sent=3, bytes_received=5, seconds=0.5)
        return super().finish_plan(new_plan)


def test_what_the_planner_says_is_in_the_report(tmp_path: Path) -> None:
    report = save(tmp_path, Reporting())
    assert report.plan == report.ranks[0].plan == PlanReport(cache="hit", bytes_sent=3, bytes_received=5, seconds=0.5)
    assert "plan cache hit" in report.summary()


def test_what_another_planner_calls_so_is_not(tmp_path: Path) -> None:
    class Other(DefaultSavePlanner):
        last_plan = "yesterday"

    assert save(tmp_path, Other()).plan == PlanReport(as_given="planner: it is a Other")


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    return [(record.levelno, record.getMessage()) for record in caplog.records if record.name == "bytecheckpoint"]


def test_one_line_a_save_and_a_load(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="bytecheckpoint")
    saved, loaded = save(tmp_path), load(tmp_path)
    assert lines(caplog) == [(logging.INFO, saved.summary()), (logging.INFO, loaded.summary())]


def test_a_failed_save_logs_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="bytecheckpoint")
    writer = BcpWriter(tmp_path)
    with pytest.raises(dcp.api.CheckpointException):
        dcp.save({"t": torch.zeros(3).to_sparse()}, storage_writer=writer, no_dist=True)
    assert lines(caplog) == []
    assert writer.last_report is None


def test_dcp_s_own_log_names_the_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger=_dcp_logger.name)
    save(tmp_path)
    load(tmp_path)
    events = [record.msg for record in caplog.records if record.name == _dcp_logger.name]
    steps = {event["func_name"] for event in events if event["checkpoint_id"] == str(tmp_path)}
    assert {"local_step", "global_step", "write_data", "finish_checkpoint", "read_data"} <= steps


class Meeting(BcpSavePlanner):
    """Waits, before it writes, until the other save has come as far."""

    def __init__(self, barrier: threading.Barrier) -> None:
        super().__init__()
        self._barrier = barrier

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        self._barrier.wait(timeout=60)
        return super().finish_plan(new_plan)


class Keeping(BcpWriter):
    """Keeps the report of each ``finish``."""

    def __init__(self, path: Path, barrier: threading.Barrier) -> None:
        super().__init__(path)
        self._barrier = barrier
        self._lock = threading.Lock()
        self.reports: dict[str, SaveReport] = {}

    def finish(self, metadata: Any, results: Any) -> None:
        self._barrier.wait(timeout=60)  # both have written: `last_report` is one of the two
        with self._lock:
            super().finish(metadata, results)
            assert self.last_report is not None
            self.reports[self.last_report.path] = self.last_report


def test_two_saves_at_once_on_one_writer(tmp_path: Path) -> None:
    barrier = threading.Barrier(2)
    writer = Keeping(tmp_path / "unused", barrier)
    failed: list[BaseException] = []

    def run(number: int) -> None:
        try:
            big = {f"t{i}": torch.zeros(1000) for i in range(number)}
            dcp.save(
                big, storage_writer=writer, checkpoint_id=tmp_path / str(number), planner=Meeting(barrier), no_dist=True
            )
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in (1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert {Path(path).name for path in writer.reports} == {"1", "5"}
    for path, report in writer.reports.items():
        assert report.num_records == report.ranks[0].num_records == int(Path(path).name)
        assert math.isclose(sum(getattr(report, name) for name in SAVE_PHASES), report.total_s)
    assert writer.last_report in writer.reports.values()
