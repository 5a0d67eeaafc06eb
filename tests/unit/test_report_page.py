# SPDX-License-Identifier: Apache-2.0
"""Tests what the page of ``bcp report`` holds, and the trace, without a browser."""

from __future__ import annotations

import base64
import gzip
import hashlib
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.simulated_journal import Job, Straggler, simulate_load, simulate_save, write_run

from bytecheckpoint.findings.figures import rank_figures
from bytecheckpoint.observability.page import page_of
from bytecheckpoint.observability.page.contents import page_contents
from bytecheckpoint.observability.page.rank_columns import of_blocks, of_ranks
from bytecheckpoint.observability.page.untrusted import cleaned, shown
from bytecheckpoint.observability.perfetto import trace_of
from bytecheckpoint.observability.run_folder import read_run
from bytecheckpoint.observability.summary import findings_of_all, troubles

HOSTILE = "</script><script>alert(1)</script>\n\x1b[31m\u202e\ud800<!--{{data}}{{script}}"


def page_for(folder: Path, records: list[dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    run = read_run(write_run(folder, records))
    found = findings_of_all(run.records)
    contents = page_contents(run, found, troubles(run.records, found))
    return page_of(contents), contents


def block(page: str, name: str) -> bytes:
    """Returns what is packed in the page under this name."""
    (packed,) = re.findall(rf'<script type="application/octet-stream" id="{name}">([A-Za-z0-9+/=]+)</script>', page)
    return gzip.decompress(base64.b64decode(packed))


def test_the_page_has_what_it_needs_and_no_address(tmp_path: Path) -> None:
    page, contents = page_for(tmp_path, [simulate_save(Job(4), 1)])
    assert json.loads(block(page, "data")) == contents
    assert b"Plotly" in block(page, "plotly")
    own = re.sub(r"[A-Za-z0-9+/=]{1000,}", "", page)
    assert not re.search(r"https?:|//\w+\.|\bsrc=|\bhref=\"(?!#)|@import|url\(", own)


def test_only_the_scripts_of_the_page_may_run(tmp_path: Path) -> None:
    page, _ = page_for(tmp_path, [simulate_save(Job(4), 1)])
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    (allowed,) = re.findall(r"script-src ([^;]*);", policy)
    (script,) = re.findall(r"<script>(.*)</script>\n</body>", page, re.DOTALL)
    hashes = [
        base64.b64encode(hashlib.sha256(each).digest()).decode() for each in (script.encode(), block(page, "plotly"))
    ]
    assert allowed.split() == [f"'sha256-{each}'" for each in hashes]
    assert policy.startswith("default-src 'none';")


def test_nothing_of_the_journal_is_markup(tmp_path: Path) -> None:
    """The page around its packed data is the same whatever the journal says."""
    plain, _ = page_for(tmp_path / "a", [simulate_save(Job(4), 1)])
    record = simulate_save(Job(4), 1, straggler=Straggler("slow_storage", (1,), 5.0))
    record |= {
        "path": HOSTILE,
        "save_id": HOSTILE,
        "hosts": [HOSTILE],
        "mesh": {HOSTILE: HOSTILE},
        "sizes": {HOSTILE: []},
    }
    record["report"] |= {HOSTILE: HOSTILE, "warnings": [HOSTILE]}
    record["ranks"]["phases"][HOSTILE] = [1, 2, 3, 4]
    record["timelines"]["0"]["lanes"][0]["name"] = HOSTILE
    hostile, contents = page_for(tmp_path / "b", [record])

    def around(page: str) -> str:
        return re.sub(r'(id="data">)[A-Za-z0-9+/=]+', r"\1", page)

    assert around(hostile) == around(plain)
    assert shown(HOSTILE) in json.dumps(contents, ensure_ascii=False).replace("\\\\", "\\")
    assert not {"\n", "\x1b", "\u202e", "\ud800"} & set("".join(texts_of(contents)))


def texts_of(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [*value, *(text for each in value.values() for text in texts_of(each))]
    return [text for each in value for text in texts_of(each)] if isinstance(value, list) else []


def test_values_are_bounded() -> None:
    deep: Any = 1
    for _ in range(100):
        deep = {"a": [deep]}
    assert len(json.dumps(cleaned(deep))) < 60
    assert len(cleaned(list(range(10_000)))) == 300
    assert len(cleaned({str(at): at for at in range(10_000)})) == 300
    assert len(shown("x" * 10_000)) < 500
    assert cleaned([float("nan"), float("inf"), 10**400, 1.5, True]) == [None, None, None, 1.5, True]


def column_of(given: list[Any]) -> list[float]:
    scale, values = given
    return [0.0] * values if scale == 0 else [value * scale for value in values]


def test_columns_keep_five_digits() -> None:
    figures = rank_figures(simulate_save(Job(100), 1))
    made = of_ranks(figures)
    assert made["num"] == 100
    assert made["rank"] is None  # they are 0, 1, 2, ...
    for kind, columns in (("columns", figures.columns), ("phases", figures.phases)):
        assert made[kind].keys() == columns.keys()
        for name, column in columns.items():
            assert column_of(made[kind][name]) == pytest.approx(column, abs=max(map(abs, column)) * 1e-5)


def test_blocks_have_the_largest_figures() -> None:
    record = simulate_save(Job(1000), 1)
    record["ranks"]["phases"]["write"][777] = 99.0
    figures = rank_figures(record)
    made = of_blocks(figures)
    assert made["num"] == 63
    write = column_of(made["phases"]["write"])
    at = write.index(max(write))
    assert made["rank"][at] <= 777 <= made["last"][at]
    assert write[at] == pytest.approx(99.0)
    assert made["last"][-1] == 999
    assert of_blocks(rank_figures(simulate_save(Job(64), 1)))["num"] == 64


@pytest.mark.parametrize(("ranks", "saves"), [(4, 200), (1024, 100), (10_000, 12)])
def test_the_page_is_small_and_has_the_ranks_of_the_calls_that_matter(ranks: int, saves: int, tmp_path: Path) -> None:
    job, slow = Job(ranks), Straggler("slow_storage", (1,), 4.0)
    records = [
        simulate_save(job, step, step=step, at=1e9 + step, straggler=slow if step == 2 else None)
        for step in range(1, saves + 1)
    ]
    page, contents = page_for(tmp_path, records)
    assert len(page) < 5_000_000
    calls = contents["calls"]
    with_ranks = [call["step"] for call in calls if "last" not in call["ranks"]]
    assert {2, saves} <= {*with_ranks}
    assert with_ranks == sorted(with_ranks)
    assert len(calls) == saves


def test_troubles_join_the_same_finding_of_several_calls(tmp_path: Path) -> None:
    slow = Straggler("slow_storage", (5,), 4.0)
    records = [simulate_save(Job(8), at, step=at, at=1e9 + at, straggler=slow if at % 2 else None) for at in range(10)]
    records.append(simulate_load(Job(8), 11, at=1e9 + 11, straggler=slow))
    found = findings_of_all(records)
    of_saves, of_loads = troubles(records, found)
    assert of_saves.calls == (1, 3, 5, 7, 9)
    assert of_saves.how_often() == "in 5 of 10 saves"
    assert of_saves.seconds == pytest.approx(sum(each[0].seconds for each in found[:10] if each))
    assert of_saves.finding == found[of_saves.worst][0]
    assert (of_loads.kind, of_loads.calls, of_loads.how_often()) == ("load", (10,), "in 1 of 1 load")


def test_a_trace_is_in_the_trace_event_format() -> None:
    save, load = simulate_save(Job(8, is_async=True), 1, at=100.0), simulate_load(Job(8), 2, at=200.0)
    del load["timelines"]
    trace = json.loads(json.dumps(trace_of([save, load]), allow_nan=False))
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    names = [event for event in trace["traceEvents"] if event["ph"] == "M"]
    assert len(spans) + len(names) == len(trace["traceEvents"])
    for event in spans:
        assert {"name", "cat", "ts", "dur", "pid", "tid", "args"} <= event.keys()
        assert all(isinstance(event[name], int) and event[name] >= 0 for name in ("ts", "dur", "pid", "tid"))
    by_lane: dict[int, list[tuple[int, int]]] = {}
    for event in spans:
        by_lane.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    for of_lane in by_lane.values():
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(of_lane))
    lanes = {event["tid"]: event["args"]["name"] for event in names if event["name"] == "thread_name"}
    assert lanes.keys() == by_lane.keys()
    assert {"whole call", "call", "fill", "write 0", "write 1"} == {*lanes.values()}
    processes = [event["args"]["name"] for event in names if event["name"] == "process_name"]
    assert processes == [f"rank {rank} on node0" for rank in range(8)]


def test_spans_that_overlap_or_are_no_spans() -> None:
    record = simulate_save(Job(2), 1)
    record["timelines"] = {
        "0": {"lanes": [{"name": "fill", "spans": [["copy", 0, 10, 10, 1, 1], ["copy", 5, 10, 1, 1, 1], ["x"], None]}]},
        "x": {"lanes": []},
        "1": {"lanes": [{"name": 5}, None]},
        "-1": None,
    }
    spans = [event for event in trace_of([record])["traceEvents"] if event.get("cat") == "phase"]
    assert [(span["dur"]) for span in spans] == [10, 5]
    assert spans[1]["ts"] == spans[0]["ts"] + 10
    assert trace_of([])["traceEvents"] == []
