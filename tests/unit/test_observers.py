# SPDX-License-Identifier: Apache-2.0
"""Who observes hears of each call once, in a thread of ours, and can do no harm to a call or to the process."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import bytecheckpoint
from bytecheckpoint import LoadReport, SaveReport
from bytecheckpoint.observability import flush


@pytest.fixture(autouse=True)
def nothing_waits() -> Iterator[None]:
    yield
    assert flush()


def save(path: Path) -> SaveReport:
    return bytecheckpoint.save_state_dict(path, {"t": torch.arange(100)}, no_dist=True)


def load(path: Path) -> LoadReport:
    return bytecheckpoint.load_state_dict(path, {"t": torch.zeros(100, dtype=torch.int64)}, no_dist=True)


def test_a_function_gets_the_report(tmp_path: Path) -> None:
    got: list[Any] = []
    threads: list[str] = []

    def on_report(report: Any) -> None:
        threads.append(threading.current_thread().name)
        got.append(report)

    bytecheckpoint.observe(on_report)
    bytecheckpoint.observe(on_report)  # it is not added twice
    saved, loaded = save(tmp_path / "a"), load(tmp_path / "a")
    bytecheckpoint.stop_observing(on_report)
    save(tmp_path / "b")
    assert flush()
    assert got == [saved, loaded]
    assert threads == ["bytecheckpoint-observe"] * 2


class Own:
    def __init__(self) -> None:
        self.got: list[tuple[Any, dict[str, Any]]] = []

    def export(self, report: Any, record: dict[str, Any]) -> None:
        self.got.append((report, record))

    def heard(self, report: Any) -> None:
        self.got.append((report, {}))


def test_an_exporter_of_ones_own_and_a_bound_method(tmp_path: Path) -> None:
    own, method = Own(), Own()
    bytecheckpoint.observe(own)
    bytecheckpoint.observe(method.heard)
    report = save(tmp_path / "step_4")
    assert flush()
    bytecheckpoint.stop_observing(own)
    bytecheckpoint.stop_observing(method.heard)
    save(tmp_path / "step_5")
    assert flush()
    ((got, record),) = own.got
    assert got == report
    assert (record["kind"], record["step"], record["path"]) == ("save", 4, "step_4")
    assert method.got == [(report, {})]


def test_register_with_a_callback(tmp_path: Path) -> None:
    got: list[Any] = []
    with bytecheckpoint.registered(on_report=got.append):
        dcp.save({"t": torch.arange(10)}, checkpoint_id=tmp_path / "a", no_dist=True)
        future: Any = dcp.async_save({"t": torch.arange(10)}, checkpoint_id=tmp_path / "b", no_dist=True)
        future.result()
        dcp.load({"t": torch.arange(10)}, checkpoint_id=tmp_path / "a", no_dist=True)
    save(tmp_path / "c")
    assert flush()
    assert [(type(report), report.path) for report in got] == [
        (SaveReport, str(tmp_path / "a")),
        (SaveReport, str(tmp_path / "b")),
        (LoadReport, str(tmp_path / "a")),
    ]
    assert [report.is_async for report in got[:2]] == [False, True]


def test_one_that_fails_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    got: list[Any] = []

    class Broken:
        def export(self, report: Any, record: Any) -> None:
            raise RuntimeError("the collector is away")

    broken = Broken()
    bytecheckpoint.observe(broken)
    bytecheckpoint.observe(got.append)
    with caplog.at_level(logging.WARNING, "bytecheckpoint"):
        reports = [save(tmp_path / str(number)) for number in range(3)]
        assert flush()
    bytecheckpoint.stop_observing(broken)
    bytecheckpoint.stop_observing(got.append)
    assert got == reports, "another exporter hears all the same"
    lines = [record.getMessage() for record in caplog.records if "collector" in record.getMessage()]
    assert len(lines) == 1, lines
    assert "Broken failed: the collector is away; this is said once" in lines[0]


AT_THE_END = """
import sys, threading, torch, bytecheckpoint

began = threading.Event()
def on_report(report):
    began.set()
    main.join()  # still under way when the main thread has ended
    print("heard of", report.path, flush=True)

main = threading.main_thread()
bytecheckpoint.observe(on_report)
bytecheckpoint.save_state_dict(sys.argv[1], {"t": torch.arange(10)}, no_dist=True)
began.wait()
"""


def test_the_end_of_the_process_waits_for_exporters(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", AT_THE_END, str(tmp_path / "a")], capture_output=True, text=True, timeout=240, check=True
    )
    assert done.stdout == f"heard of {tmp_path / 'a'}\n"


def test_a_forked_child_has_no_exporters(tmp_path: Path) -> None:
    got: list[Any] = []
    bytecheckpoint.observe(got.append)
    save(tmp_path / "parent")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            save(tmp_path / "child")
            heard = flush() and len(got)
            os.write(writing, json.dumps(heard).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        of_child = answer.read()
    os.waitpid(child, 0)
    assert flush()
    bytecheckpoint.stop_observing(got.append)
    assert json.loads(of_child) <= 1, "what the parent had heard when it forked, and nothing of the child's own save"
    assert [report.path for report in got] == [str(tmp_path / "parent")]
    load(tmp_path / "child")
