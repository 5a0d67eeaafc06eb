# SPDX-License-Identifier: Apache-2.0
"""The coordinator's report of a load contains what each rank reports. No rank hangs if others fail or come late."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import threading
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.equality import assert_equal
from support.failing_hooks import BcpFailsLate, FailsLate, Reason
from support.ranks import RanksFailed, failures, run_ranks
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from bytecheckpoint import BcpLoadPlanner, BcpReader, BcpWriter, Config, LoadReport, RankLoadReport, save_state_dict
from bytecheckpoint.distributed import channel as _peers
from bytecheckpoint.sharing import report_gather as _gather
from distributed.reported import logged, state
from distributed.shared_loads import OwnFinish, Wrapper

NUM_RANKS = 4
BYTES_OF_ALL = 800_000


def empty() -> dict[str, Any]:
    return {key: torch.zeros_like(tensor) for key, tensor in state().items()}


def load(reader: BcpReader, planner: DefaultLoadPlanner | None = None, **how: Any) -> LoadReport:
    got = empty()
    dcp.load(got, storage_reader=reader, planner=planner, **how)
    assert_equal(got, state())
    assert reader.last_report is not None
    return reader.last_report


def save(path: str) -> None:
    dcp.save(state(), storage_writer=BcpWriter(path))


@pytest.fixture
def path(tmp_path: Path) -> str:
    run_ranks(NUM_RANKS, save, str(tmp_path))
    return str(tmp_path)


def own_part(report: LoadReport) -> RankLoadReport:
    return RankLoadReport(**{field.name: getattr(report, field.name) for field in dataclasses.fields(RankLoadReport)})


def load_and_log(path: str, planned_by_us: bool, config: Config) -> tuple[LoadReport, list[str]]:
    lines = logged()
    return load(BcpReader(path, config=config), BcpLoadPlanner() if planned_by_us else None), lines


@pytest.mark.parametrize("reading", ["independent", "cooperative"])
@pytest.mark.parametrize("planned_by_us", [False, True])
def test_the_coordinator_knows_all_ranks(path: str, planned_by_us: bool, reading: str) -> None:
    of_ranks = run_ranks(NUM_RANKS, load_and_log, path, planned_by_us, Config(shared_reading=reading))
    reports, lines = zip(*of_ranks, strict=True)
    ours = reports[0]
    assert [report.rank for report in reports] == [*range(NUM_RANKS)]
    assert ours.ranks == tuple(map(own_part, reports))
    wanted = [(rank + 1) * 1000 * 100 * 8 + BYTES_OF_ALL for rank in range(NUM_RANKS)]
    assert [of_rank.bytes_wanted for of_rank in ours.ranks] == wanted
    assert ours.total_bytes_wanted == sum(wanted)
    assert ours.total_bytes_read == sum(report.bytes_read for report in reports)
    assert ours.read_amplification == ours.total_bytes_read / sum(wanted)
    assert [of_rank["bytes_wanted"] for of_rank in json.loads(ours.to_json())["ranks"]] == wanted
    assert f"{sum(wanted) / 1e6:.2f} MB by {NUM_RANKS} ranks" in ours.summary()
    assert [*lines] == [[ours.summary()], [], [], []]
    for rank, report in enumerate(reports):
        assert report.reading == reading
        assert report.bytes_read + report.bytes_received >= report.bytes_wanted == wanted[rank]
        phases = (report.metadata_s, report.plan_s, report.exchange_s, report.read_s, report.objects_s, report.wait_s)
        assert math.isclose(sum(phases), report.total_s)
    for report in reports[1:]:
        assert (report.ranks, report.total_bytes_wanted) == ((), report.bytes_wanted)


def load_on_a_group(path: str) -> LoadReport | None:
    """Loads over two groups at once."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    reader = BcpReader(path)
    got = {"shared": torch.zeros_like(state()["shared"])}
    dcp.load(got, storage_reader=reader, process_group=groups[dist.get_rank() // 2])
    return reader.last_report


def test_a_group_reports_to_its_coordinator(path: str) -> None:
    reports: Any = run_ranks(NUM_RANKS, load_on_a_group, path)
    for pair in (reports[:2], reports[2:]):
        assert [report.rank for report in pair] == [0, 1]
        assert [report.ranks for report in pair] == [tuple(map(own_part, pair)), ()]


class Plain(BcpReader):
    """Its hook takes only the base class's arguments, so DCP does not pass the rank. It reads the metadata once."""

    kept: Any = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        if self.kept is None:
            self.kept = super().read_metadata(*args, **kwargs)
        return self.kept

    def set_up_storage_reader(self, metadata: Any, is_coordinator: bool) -> None:  # type: ignore[override]
        super().set_up_storage_reader(metadata, is_coordinator)


def load_thrice(path: str) -> list[tuple[LoadReport, float]]:
    """Loads three times, with a coordinator other than rank 0."""
    reader, reports = Plain(path), []
    for planner in (None, BcpLoadPlanner(), None):
        time.sleep(0.2)
        got = empty()
        begin = time.perf_counter()
        _load_state_dict(got, reader, coordinator_rank=2, planner=planner)
        seconds = time.perf_counter() - begin
        assert_equal(got, state())
        assert reader.last_report is not None
        reports.append((reader.last_report, seconds))
    return reports


def test_a_reader_that_keeps_the_metadata_and_is_told_no_rank(path: str) -> None:
    loads: Any = zip(*run_ranks(3, load_thrice, path), strict=True)
    for of_ranks in loads:
        reports = [report for report, _ in of_ranks]
        assert [report.rank for report in reports] == [0, 1, 2]
        assert [report.ranks for report in reports] == [(), (), tuple(map(own_part, reports))]
        # The time of the load before, and the time since, do not count.
        assert all(report.total_s <= seconds for report, seconds in of_ranks)


def one_rank_fails(path: str, failing: Any) -> None:
    reader, lines = BcpReader(path), logged()
    load(reader)
    del lines[:]
    for rank in (0, 2):
        before = reader.last_report
        planner = failing(hook="resolve_tensor", rank=rank)
        found = failures(partial(dcp.load, empty(), storage_reader=reader, planner=planner))
        assert {r: (type(e), str(e)) for r, e in found.items()} == {rank: (Reason, f"resolve_tensor on rank {rank}")}
        if dist.get_rank() in (0, rank):
            assert reader.last_report is before
    assert lines == []
    again = load(reader)
    assert len(again.ranks) == (NUM_RANKS if dist.get_rank() == 0 else 0)


@pytest.mark.parametrize("failing", [FailsLate, BcpFailsLate])
def test_a_load_that_failed_on_one_rank_is_no_load(path: str, failing: Any) -> None:
    run_ranks(NUM_RANKS, one_rank_fails, path, failing)


class Slow(DefaultLoadPlanner):
    """Takes so long that the other ranks wait for it at the end."""

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        time.sleep(0.5)


class Stopped(BaseException):
    """What a signal handler raises: neither an Exception nor a KeyboardInterrupt."""


def stop(number: int, frame: Any) -> None:
    raise Stopped(signal.Signals(number).name)


def interrupted_while_waiting(path: str, number: int, interrupted: list[int]) -> None:
    """Sends a signal to the ranks in ``interrupted`` while they wait for rank 3, which is slow."""
    signal.signal(number, stop)
    exchange = _gather.ReportGather._exchange
    if dist.get_rank() in interrupted:

        def press_and_exchange(gather: Any, numbers: Any) -> Any:
            threading.Timer(0.2, os.kill, (os.getpid(), number)).start()
            return exchange(gather, numbers)

        _gather.ReportGather._exchange = press_and_exchange  # type: ignore[method-assign]
    reader, planner = BcpReader(path), Slow() if dist.get_rank() == 3 else None
    if interrupted == [0]:
        found = failures(partial(dcp.load, empty(), storage_reader=reader, planner=planner))
        assert {rank: type(error) for rank, error in found.items()} == {0: Stopped}
        _gather.ReportGather._exchange = exchange  # type: ignore[method-assign]
        load(BcpReader(path))
        return
    try:
        dcp.load(empty(), storage_reader=reader, planner=planner)
    except BaseException as error:
        raise ValueError(f"seen by {dist.get_rank()}: {type(error)}") from None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_coordinator_waits_for_a_slow_rank(path: str, number: int) -> None:
    run_ranks(NUM_RANKS, interrupted_while_waiting, path, number, [0])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("interrupted", [[1], [0, 1, 2]])
def test_a_signal_while_ranks_wait_for_a_slow_one(path: str, number: int, interrupted: list[int]) -> None:
    """The other ranks wait in DCP's own exchange, which then breaks. No rank hangs in our exchange."""
    with pytest.raises(RanksFailed) as caught:
        run_ranks(NUM_RANKS, interrupted_while_waiting, path, number, interrupted, limit_s=40)
    text = str(caught.value)
    assert "did not end, or died" not in text
    assert all(f"seen by {rank}" in text for rank in range(NUM_RANKS)), text


def interrupted_at_the_door(path: str) -> None:
    """Interrupts rank 1 after it has read and before it begins the gather, and right after it has begun it."""
    begin = _peers.Peers.begin_gather

    def before(peers: Any, numbers: Any) -> Any:
        _peers.Peers.begin_gather = begin  # type: ignore[method-assign]
        if dist.get_rank() == 1:
            raise Stopped("before")
        return begin(peers, numbers)

    class Interrupted:
        def __init__(self, work: Any) -> None:
            self.work = work

        def wait(self) -> None:
            raise Stopped("after")

    def after(peers: Any, numbers: Any) -> Any:
        _peers.Peers.begin_gather = begin  # type: ignore[method-assign]
        work, gathered = begin(peers, numbers)
        return (Interrupted(work) if dist.get_rank() == 1 else work), gathered

    for when in (before, after):
        _peers.Peers.begin_gather = when  # type: ignore[method-assign]
        found = failures(partial(dcp.load, empty(), storage_reader=BcpReader(path)))
        assert {rank: str(error) for rank, error in found.items()} == {1: when.__name__}
        load(BcpReader(path))


def test_an_interrupt_right_before_or_after_coming(path: str) -> None:
    run_ranks(3, interrupted_at_the_door, path)


def lose_a_rank(path: str) -> None:
    if dist.get_rank() == 1:
        _gather.ReportGather.gather = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    try:
        load(BcpReader(path))
    except BaseException as error:
        raise ValueError(f"seen by {dist.get_rank()}: {error}") from None


def test_a_rank_that_is_killed_leaves_no_rank_waiting(path: str) -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(NUM_RANKS, lose_a_rank, path, limit_s=40)
    text = str(caught.value)
    assert "rank 1 did not end, or died" in text
    assert all(f"seen by {rank}" in text for rank in (0, 2, 3)), text


def not_sure_that_all_come(path: str) -> None:
    assert load(BcpReader(path), OwnFinish()).ranks == ()
    assert load(Wrapper(path)).ranks == ()
    alone = load(BcpReader(path), no_dist=True)
    assert alone.ranks == (own_part(alone),)


def test_nobody_waits_for_ranks_that_may_not_come(path: str) -> None:
    run_ranks(2, not_sure_that_all_come, path)


def parts_of_their_own(path: str) -> tuple[LoadReport, list[str]]:
    lines = logged()
    dcp.save(state(), storage_writer=BcpWriter(path), use_collectives=False)
    del lines[:]
    return load(BcpReader(path)), lines


def test_parts_that_were_saved_without_collectives(tmp_path: Path) -> None:
    reports, lines = zip(*run_ranks(2, parts_of_their_own, str(tmp_path)), strict=True)
    assert [(report.rank, report.ranks) for report in reports] == [(0, ()), (1, ())]
    assert "MB by rank 0 in" in reports[0].summary()
    assert [*lines] == [[reports[0].summary()], []]


def test_one_process(path: str) -> None:
    reader = BcpReader(path)
    dcp.load({"shared": torch.zeros(100_000, dtype=torch.int64)}, storage_reader=reader)
    report = reader.last_report
    assert report is not None
    assert report.ranks == (own_part(report),)
    assert report.total_bytes_wanted == BYTES_OF_ALL
    assert "800.00 kB by 1 rank in" in report.summary()


def load_parts_of(path: str) -> tuple[LoadReport, list[str]]:
    """Loads in two pipeline stages of two ranks, which leave a layer out. The last rank also wants a key not saved."""
    stage = dist.get_rank() // 2
    got = {"model": {f"layer{2 * stage + n}": torch.zeros(2) for n in range(2 - stage)}, "own": {}}
    if dist.get_rank() == NUM_RANKS - 1:
        got["own"]["new"] = torch.zeros(1)
    reader = BcpReader(path)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", RuntimeWarning)
        dcp.load(got, storage_reader=reader, planner=BcpLoadPlanner(allow_partial_load=True))
    assert reader.last_report is not None
    return reader.last_report, [str(warning.message) for warning in warned]


def test_what_no_rank_asks_for_is_told_by_the_coordinator_once(tmp_path: Path) -> None:
    saved = {"model": {f"layer{n}": torch.ones(2) for n in range(4)}, "optimizer": {"lr": 0.1}}
    save_state_dict(tmp_path, saved, no_dist=True)
    reports, warned = zip(*run_ranks(NUM_RANKS, load_parts_of, str(tmp_path)), strict=True)
    assert reports[0].unexpected_keys == ("model.layer3",)
    assert reports[0].missing_keys == ("own.new",)
    assert [report.num_unexpected_keys for report in reports] == [1, 0, 0, 0]
    assert [report.num_loaded_keys for report in reports] == [3, None, None, None]
    of_lr = reports[0].bytes_unread - 2 * 4  # model.layer3, and the object of the optimizer
    assert 0 < of_lr < 1000
    assert [report.num_missing_keys for report in reports] == [1, 0, 0, 1]
    assert [len(messages) for messages in warned] == [1, 0, 0, 0]
    assert "'model.layer3'; these keys are not in the checkpoint: 'own.new'" in warned[0][0]
