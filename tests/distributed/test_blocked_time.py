# SPDX-License-Identifier: Apache-2.0
"""In each way to save, the report of every rank says when the save began and for how long it kept training waiting."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.ranks import run_ranks

import bytecheckpoint
from bytecheckpoint import BcpSavePlanner, BcpStager, BcpWriter, Config, SaveReport
from bytecheckpoint.observability import flush
from distributed.reported import state

Saved = tuple[SaveReport, float]  # the report, and the seconds for which the call kept this thread


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    begin = time.monotonic()
    return call(), time.monotonic() - begin


def plain(path: str) -> Saved:
    writer = BcpWriter(path)
    _, seconds = timed(lambda: dcp.save(state(), storage_writer=writer, planner=BcpSavePlanner()))
    return report_of(writer), seconds


def report_of(writer: BcpWriter) -> SaveReport:
    assert writer.last_report is not None
    return writer.last_report


def of_our_stager(path: str) -> Saved:
    writer = BcpWriter(path)
    future, seconds = timed(lambda: dcp.async_save(state(), storage_writer=writer, async_stager=BcpStager()))
    future.result()
    return report_of(writer), seconds


def of_the_writer_as_stager(path: str) -> Saved:
    writer = BcpWriter(path)
    future, seconds = timed(lambda: dcp.async_save(state(), storage_writer=writer))
    future.result()
    return report_of(writer), seconds


def registered(path: str) -> Saved:
    writer = BcpWriter(path)
    with bytecheckpoint.registered():
        _, seconds = timed(lambda: dcp.save(state(), storage_writer=writer))
    return report_of(writer), seconds


def registered_async(path: str) -> Saved:
    writer = BcpWriter(path)
    with bytecheckpoint.registered():
        future, seconds = timed(lambda: dcp.async_save(state(), storage_writer=writer))
        future.result()
    return report_of(writer), seconds


def own(path: str) -> Saved:
    return timed(lambda: bytecheckpoint.save_state_dict(path, state()))


def own_async(path: str) -> Saved:
    handle, seconds = timed(lambda: bytecheckpoint.async_save_state_dict(path, state()))
    return handle.committed.result(), seconds


def of_a_model(path: str) -> Saved:
    handle, seconds = timed(lambda: bytecheckpoint.save(path, {"model": torch.nn.Linear(200, 200)}, "ddp"))
    return handle.committed.result().parts["model"], seconds


def of_a_model_async(path: str) -> Saved:
    model = {"model": torch.nn.Linear(200, 200)}
    handle, seconds = timed(lambda: bytecheckpoint.save(path, model, "ddp", fast_saving=True))
    return handle.committed.result().parts["model"], seconds


def of_torchtitans_engine(path: str) -> Saved:
    from bytecheckpoint.torchtitan._engine import Engine

    engine = Engine(Config(), None)
    future, seconds = timed(lambda: engine.save_async(path, state()))
    report = future.result()
    engine.close()
    return report, seconds


WAYS = {
    plain: False,
    registered: False,
    own: False,
    of_a_model: False,
    of_our_stager: True,
    of_the_writer_as_stager: True,
    registered_async: True,
    own_async: True,
    of_a_model_async: True,
    of_torchtitans_engine: True,
}


def looked_at(way: Callable[[str], Saved], path: str) -> tuple[Saved, tuple[float, float], dict[str, Any]]:
    heard: list[Any] = []
    bytecheckpoint.observe(heard.append)
    before = time.time()
    saved = way(path)
    after = time.time()
    assert flush()
    assert heard == ([saved[0]] if saved[0].ranks else []), "the coordinator alone hears of it, of the same report"
    return saved, (before, after), saved[0].to_dict()


@pytest.mark.parametrize(("way", "is_async"), WAYS.items(), ids=lambda value: getattr(value, "__name__", None))
def test_each_way_to_save(tmp_path: Path, way: Any, is_async: bool) -> None:
    clock_s = 0.05  # the Unix clock may be set meanwhile; it is not the one that measures
    of_ranks = run_ranks(2, looked_at, way, str(tmp_path / "saved"))
    for rank, ((report, call_s), (before, after), plain_report) in enumerate(of_ranks):
        assert (report.rank, report.is_async) == (rank, is_async)
        assert 0 < report.blocked_s <= call_s
        assert before - clock_s <= report.began_at <= report.began_at + report.total_s <= after + clock_s
        if not is_async:
            assert report.blocked_s == report.total_s
        names = {field.name for field in dataclasses.fields(report)} - {"trace"}
        assert (
            names | {"host", "phases", "total_bytes", "total_linked_bytes", "total_requests", "gb_per_s", "balance"}
            == plain_report.keys()
        )
        assert json.loads(report.to_json()) == json.loads(json.dumps(plain_report))
        assert plain_report["phases"]["write"] > 0
        assert (plain_report["blocked_s"], plain_report["rank"]) == (report.blocked_s, rank)
    coordinator = of_ranks[0][0][0]
    assert [each.blocked_s for each in coordinator.ranks] == [saved[0].blocked_s for saved, _, _ in of_ranks] or (
        not is_async  # what another rank handed in is what it had seen by then
    )


def wait_for_memory(path: str) -> tuple[float, float, float]:
    """Returns what the second save was blocked for, for how long the first still held its memory, and for the first."""
    import threading

    may_go, is_there = threading.Event(), threading.Event()

    class Holding(BcpSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            is_there.set()
            assert may_go.wait(60)
            return super().resolve_data(write_item)

    first = bytecheckpoint.async_save_state_dict(f"{path}/1", state(), planner=Holding())
    assert is_there.wait(60)
    begin = time.monotonic()
    let_go: list[float] = []

    def go() -> None:
        let_go.append(time.monotonic())
        may_go.set()

    threading.Timer(0.5, go).start()
    second = bytecheckpoint.async_save_state_dict(f"{path}/2", state())
    return (
        second.committed.result().blocked_s,
        let_go[0] - begin,
        first.committed.result().blocked_s,
    )


def test_the_wait_for_memory_counts(tmp_path: Path) -> None:
    for blocked_s, held_s, first_s in run_ranks(2, wait_for_memory, str(tmp_path)):
        assert blocked_s >= held_s >= 0.5
        assert first_s > 0
