# SPDX-License-Identifier: Apache-2.0
"""Tests the progress bar: it shows how many bytes are really done, on stderr, only if it is asked for."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import termios
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from bytecheckpoint import BcpLoadPlanner, BcpReader, BcpSavePlanner, BcpWriter, Config
from bytecheckpoint.calls.progress import progress_bar
from bytecheckpoint.calls.trace import CallTrace

SHOWN = Config(progress=True, ring_bytes=16 << 20)


def state() -> dict[str, Any]:
    """Returns a tensor of several slots, one that is opaque, one that is loaded through a copy, and objects."""
    quantized = torch.quantize_per_tensor(torch.arange(2000.0), 0.5, 0, torch.qint8)
    return {"t": torch.arange(6 << 20), "quantized": quantized, "copied": torch.zeros(300), "set": {1, 2}, "step": 3}


def last_line(text: str) -> str:
    """Returns what stands on the terminal in the end."""
    return text.rstrip("\n").rpartition("\r")[2]


def full_bar(what: str, path: Path, num_bytes: int) -> re.Pattern[str]:
    return re.compile(rf"{what} {path}: 100%\|.*\| {num_bytes / 1e6:.1f}M/{num_bytes / 1e6:.1f}M \[")


@pytest.mark.parametrize("planned_by_us", [False, True])
def test_a_bar_for_a_save_and_one_for_a_load(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], planned_by_us: bool
) -> None:
    writer = BcpWriter(tmp_path, config=SHOWN)
    dcp.save(state(), storage_writer=writer, planner=BcpSavePlanner() if planned_by_us else None, no_dist=True)
    out, saved = capfd.readouterr()
    assert out == ""
    assert writer.last_report is not None
    assert full_bar("saving", tmp_path, writer.last_report.bytes_written).match(last_line(saved)), saved
    assert saved.endswith("\n")

    got = {**state(), "copied": torch.zeros(300, dtype=torch.float64)}
    reader = BcpReader(tmp_path, config=SHOWN)
    with torch.serialization.safe_globals([set]):
        dcp.load(got, storage_reader=reader, planner=BcpLoadPlanner() if planned_by_us else None, no_dist=True)
    loaded = capfd.readouterr().err
    assert reader.last_report is not None
    assert full_bar("loading", tmp_path, reader.last_report.bytes_wanted).match(last_line(loaded)), loaded
    assert torch.equal(got["t"], state()["t"])


@pytest.mark.parametrize("of_stock", [False, True])
def test_the_bytes_of_a_load_reach_what_it_wants(
    tmp_path: Path, of_stock: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int, int]] = []

    class Bar:
        def __init__(self, title: str, expected_bytes: int, bytes_done: Any, trace: Any) -> None:
            self.expected, self.done = expected_bytes, bytes_done

        def __enter__(self) -> None:
            seen.append((self.expected, self.done(), 0))

        def __exit__(self, *_: object) -> None:
            seen.append((self.expected, self.done(), 1))

    monkeypatch.setattr("bytecheckpoint.dcp.rank_load.progress_bar", Bar)
    dcp.save(state(), storage_writer=(dcp.FileSystemWriter if of_stock else BcpWriter)(tmp_path), no_dist=True)
    reader = BcpReader(tmp_path, config=SHOWN)
    got = {**state(), "t": torch.zeros(6 << 20, dtype=torch.int32)}  # loaded through a copy
    with torch.serialization.safe_globals([set]):
        dcp.load(got, storage_reader=reader, no_dist=True)
    assert reader.last_report is not None
    wanted = reader.last_report.bytes_wanted
    assert seen == [(wanted, 0, 0), (wanted, wanted, 1)]


def test_none_unless_asked_for(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    dcp.save({"t": torch.arange(10)}, storage_writer=BcpWriter(tmp_path), no_dist=True)
    dcp.load({"t": torch.arange(10)}, storage_reader=BcpReader(tmp_path), no_dist=True)
    assert capfd.readouterr().err == ""
    assert "bytecheckpoint-progress" not in {thread.name for thread in threading.enumerate()}


def test_it_ends_where_the_work_failed(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError), progress_bar("doing", 200, lambda: 50):
        raise KeyError
    text = capfd.readouterr().err
    assert last_line(text).startswith("doing:  25%|"), text
    assert text.endswith("\n")
    assert "bytecheckpoint-progress" not in {thread.name for thread in threading.enumerate()}


def test_a_failed_save_closes_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    class Failing(BcpSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            raise OSError("no such device")

    with pytest.raises(dcp.api.CheckpointException, match="no such device"):
        dcp.save(state(), storage_writer=BcpWriter(tmp_path, config=SHOWN), planner=Failing(), no_dist=True)
    assert "100%" not in capfd.readouterr().err
    assert "bytecheckpoint-progress" not in {thread.name for thread in threading.enumerate()}


def test_a_terminal_that_is_gone_does_not_fail_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def write(self, text: str) -> int:
            raise BrokenPipeError

        def flush(self) -> None:
            raise BrokenPipeError

    failed: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    monkeypatch.setattr(sys, "stderr", Gone())
    with progress_bar("doing", 1, lambda: 1):
        pass
    monkeypatch.undo()
    assert [hook.exc_type for hook in failed] == [BrokenPipeError]


def test_a_terminal_that_is_stuck_does_not_hold_up_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = threading.Event()

    class Stuck:
        def write(self, text: str) -> int:
            stuck.wait(timeout=60)
            return len(text)

        def flush(self) -> None:
            pass

    monkeypatch.setattr(sys, "stderr", Stuck())
    with progress_bar("doing", 1, lambda: 1):
        pass
    drawing = [thread for thread in threading.enumerate() if thread.name == "bytecheckpoint-progress"]
    assert len(drawing) == 1, "it waits, and nobody for it"
    stuck.set()
    drawing[0].join()


IN_A_TERMINAL = """
import os, sys, threading
from bytecheckpoint import Config
from bytecheckpoint.calls.trace import CallTrace
from bytecheckpoint.calls.progress import progress_bar

path = "/a/rather/long/path/of/a/run/step_1000"
traces = [CallTrace(Config(), "save", path, rank, 3) for rank in range(3)]
for trace, share in zip(traces, (4, 3, 2)):
    trace.enter("write")
    trace.expect(1000)
shown = threading.Event()
stderr = sys.stderr
class Tee:
    encoding = stderr.encoding
    def write(self, text):
        if "slowest rank" in text:
            shown.set()
        return stderr.write(text)
    def flush(self):
        stderr.flush()
    def fileno(self):
        return stderr.fileno()
    def isatty(self):
        return True
sys.stderr = Tee()
with progress_bar("saving", 1000, lambda: 1000 if shown.is_set() else 400, traces[0]):
    assert shown.wait(240)
"""


@pytest.mark.parametrize("width", [100, 30])
def test_the_phase_and_the_slowest_rank_stand_behind_the_bar(width: int) -> None:
    """All in one line, however narrow the terminal is."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, width))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    source = IN_A_TERMINAL if width > 60 else IN_A_TERMINAL.replace("shown.wait(240)", "not shown.wait(1)")
    with subprocess.Popen([sys.executable, "-c", source], stdout=theirs, stderr=theirs, env=environment) as running:
        os.close(theirs)
        said = b""
        while True:
            try:
                piece = os.read(ours, 1 << 16)
            except OSError:  # the other end is closed
                break
            said += piece
        assert running.wait(240) == 0, said
    os.close(ours)
    lines = [re.sub(r"\x1b\[A", "", line) for line in said.decode().replace("\n", "\r").split("\r")]
    assert max(map(len, lines)) <= width, lines
    if width > 60:
        assert any("write, slowest rank 0: 0 %" in line for line in lines), lines
    assert lines[-2].startswith("saving: ") or lines[-3].startswith("saving: "), lines


def test_a_file_gets_few_lines(capfd: pytest.CaptureFixture[str]) -> None:
    done = iter(range(10_000))
    seen = threading.Event()

    def bytes_done() -> int:
        number = next(done)
        if number == 5:
            seen.set()
        return number

    with progress_bar("doing", 10_000, bytes_done, CallTrace(None)):
        assert seen.wait(240)
    text = capfd.readouterr().err
    assert text.count("doing: ") == 2, "once at the beginning, once at the end"
