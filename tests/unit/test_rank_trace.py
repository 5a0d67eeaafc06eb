# SPDX-License-Identifier: Apache-2.0
"""Tests what a rank records of a call, and how times of other ranks are put on the clock of the coordinator."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from bytecheckpoint import BcpLoadPlanner, BcpReader, BcpSavePlanner, BcpWriter, Config
from bytecheckpoint.calls.trace import MOST_TRACE_BYTES
from bytecheckpoint.errors import CorruptCheckpointError
from bytecheckpoint.journal.clocks import offset_of
from bytecheckpoint.native import _C, _core
from bytecheckpoint.report.rank_trace import RankTrace


def state(num_tensors: int = 8, elements: int = 1 << 20) -> dict[str, Any]:
    return {**{f"t{number}": torch.full((elements,), float(number)) for number in range(num_tensors)}, "step": 3}


def saved(path: Path, value: dict[str, Any], **settings: Any) -> RankTrace:
    writer = BcpWriter(path, config=Config(**settings))
    dcp.save(value, storage_writer=writer, planner=BcpSavePlanner(), no_dist=True)
    assert writer.last_report is not None
    assert writer.last_report.trace is not None
    return writer.last_report.trace


def test_a_save_records_what_its_threads_do(tmp_path: Path) -> None:
    began = time.time()
    trace = saved(tmp_path, state())
    assert began - 0.1 <= trace.began_at <= time.time()
    phases = trace.phases
    of_threads = {"copy", "checksum", "write", "flush", "sync"}
    of_hooks = {"plan", "global_plan", "begin", "exchange", "wait", "assemble", "commit", "sweep"}
    assert of_threads | of_hooks <= phases.keys() <= {*_core.PHASES}
    assert all(seconds >= 0.0 for seconds in phases.values())
    num_bytes = sum(path.stat().st_size for path in tmp_path.glob("*.distcp"))
    count, _, written = trace.summary["phases"]["write"]
    assert count == -(-num_bytes // (8 << 20))
    assert num_bytes - 4096 <= written <= num_bytes + 4096  # direct I/O writes whole sectors
    # Sizes are counted by tensor, not by slot.
    assert [(power, tensors, size) for power, tensors, _, size in trace.summary["sizes"]["copy"]] == [(22, 8, 8 << 22)]
    lanes = dict(trace.summary["lanes"])
    assert {"call", "fill", "write 0"} <= lanes.keys()
    for spans in lanes.values():
        for phase, begin_us, length_us, busy_us, pieces, size in spans:
            assert phase in phases
            assert min(begin_us, length_us, busy_us, pieces, size) >= 0
    assert len(trace.spans) <= MOST_TRACE_BYTES


def test_a_load_records_what_its_threads_do(tmp_path: Path) -> None:
    saved(tmp_path, state())
    reader = BcpReader(tmp_path)
    dcp.load(state(), storage_reader=reader, planner=BcpLoadPlanner(), no_dist=True)
    assert reader.last_report is not None
    assert reader.last_report.trace is not None
    phases = reader.last_report.trace.summary["phases"]
    assert {"metadata", "plan", "exchange", "read", "wait_read", "verify", "scatter", "objects"} <= phases.keys()
    assert phases["verify"][2] == phases["scatter"][2] == phases["read"][2]
    assert phases["read"][2] >= 8 << 22


def test_many_small_tensors_stay_readable(tmp_path: Path) -> None:
    trace = saved(tmp_path, state(5000, 1024))
    assert [row[:2] for row in trace.summary["sizes"]["copy"]] == [(12, 5000)]
    assert len(trace.spans) <= MOST_TRACE_BYTES
    assert sum(len(spans) for _, spans in trace.summary["lanes"]) > 8


def test_nothing_is_recorded_if_it_is_turned_off(tmp_path: Path) -> None:
    writer = BcpWriter(tmp_path, config=Config(trace="off"))
    dcp.save(state(), storage_writer=writer, no_dist=True)
    assert writer.last_report is not None
    assert writer.last_report.trace is None
    assert writer.last_report.blocked_s == writer.last_report.total_s > 0
    assert "phases" not in writer.last_report.to_dict()


def random_trace(draw: random.Random) -> RankTrace:
    spans = _C.Trace(join_ns=0, spans_of_lane=200, header="")
    for _ in range(draw.randrange(100)):
        begin = time.monotonic_ns() + draw.randrange(10**9)
        spans.add(draw.choice(_core.PHASES), begin, begin + draw.randrange(10**9), draw.randrange(1 << 40))
    return RankTrace(
        host=draw.choice(["", "node0", "\u00e9" * 300, "a b\n"]),
        clock=draw.choice(["", "a time:[1]"]),
        began_ns=draw.randrange(1 << 62),
        sent_ns=draw.randrange(1 << 62),
        received_ns=draw.randrange(1 << 62),
        heard_ns=draw.randrange(1 << 62),
        answered_ns=draw.randrange(1 << 62),
        unix_offset_s=draw.uniform(-1e9, 1e9),
        spans=spans.encode(draw.choice([0, 1000, 1 << 30])),
    )


def test_traces_travel_as_bytes() -> None:
    draw = random.Random(5)
    for _ in range(50):
        trace = random_trace(draw)
        got = RankTrace.from_bytes(trace.to_bytes())
        assert got.summary == trace.summary
        assert (got.clock, got.spans, got.unix_offset_s) == (trace.clock, trace.spans, trace.unix_offset_s)
        assert got.host.rstrip("\ufffd") == trace.host.encode()[:255].decode(errors="ignore")
    with pytest.raises(CorruptCheckpointError, match="a trace of a rank has 3 bytes, at least"):
        RankTrace.from_bytes(b"abc")
    with pytest.raises(CorruptCheckpointError, match="a trace of spans is damaged"):
        _ = RankTrace(spans=b"\x01\xff").summary


def exchange(offset_s: float, *, unix_error_s: float, sent_s: float, received_s: float) -> tuple[RankTrace, RankTrace]:
    """The traces of a rank whose clock is behind by ``offset_s``, and of a coordinator that planned from 10 to 11 s."""
    coordinator = RankTrace(clock="a", heard_ns=10 * 10**9, answered_ns=11 * 10**9, unix_offset_s=1000.0)
    rank = RankTrace(
        clock="b",
        sent_ns=round((sent_s - offset_s) * 1e9),
        received_ns=round((received_s - offset_s) * 1e9),
        unix_offset_s=1000.0 + offset_s + unix_error_s,
    )
    return rank, coordinator


def test_one_machine_has_one_clock() -> None:
    rank, coordinator = exchange(500.0, unix_error_s=3.0, sent_s=9.0, received_s=12.0)
    same = RankTrace(clock="a", sent_ns=rank.sent_ns, received_ns=rank.received_ns)
    assert offset_of(same, coordinator) == (0.0, 0.0)
    unknown = RankTrace(unix_offset_s=999.0)
    assert offset_of(unknown, RankTrace(unix_offset_s=1000.0)) == (-1.0, None)


@pytest.mark.parametrize("offset_s", [-4000.0, 0.0, 77.5])
def test_the_exchange_of_plans_bounds_the_offset(offset_s: float) -> None:
    # Unix clocks that agree give the offset itself, and the exchange says how far it may be wrong.
    offset, error = offset_of(*exchange(offset_s, unix_error_s=0.0, sent_s=9.5, received_s=11.25))
    assert offset == pytest.approx(offset_s, abs=1e-6)
    assert error == pytest.approx(0.5, abs=1e-6)
    # Unix clocks that are an hour apart do not lead astray.
    for unix_error_s, wanted in ((3600.0, offset_s + 0.5), (-3600.0, offset_s - 0.25)):
        traces = exchange(offset_s, unix_error_s=unix_error_s, sent_s=9.5, received_s=11.25)
        offset, error = offset_of(*traces)
        assert offset == pytest.approx(wanted, abs=1e-6)
        assert error == pytest.approx(0.75, abs=1e-6)


def test_times_that_are_of_no_exchange_bound_nothing() -> None:
    traces = exchange(0.0, unix_error_s=2.0, sent_s=20.0, received_s=5.0)
    assert offset_of(*traces) == (2.0, None)
