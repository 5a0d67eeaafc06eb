# SPDX-License-Identifier: Apache-2.0
"""Calls under way are seen from outside, with ``bcp top`` too, whatever other processes hold or do."""

from __future__ import annotations

import gc
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import bytecheckpoint
from bytecheckpoint import BcpLoadPlanner, BcpReader, BcpSavePlanner, BcpWriter, Config
from bytecheckpoint.calls.trace import CallTrace
from bytecheckpoint.errors import CheckpointNotFoundError, CorruptCheckpointError
from bytecheckpoint.native import _core
from bytecheckpoint.runtime.live_pages import LiveCall, ranks_here, read_live_pages

HEAD = struct.Struct("<8sqqqqI")


def trace_of(path: str, rank: int = 1, world_size: int = 4) -> CallTrace:
    trace = CallTrace(Config(), "save", path, rank, world_size)
    trace.enter("plan")
    return trace


def only(path: str) -> LiveCall:
    (call,) = ranks_here("save", path)
    return call


def test_what_a_page_says(tmp_path: Path) -> None:
    before = time.time()
    trace = trace_of(str(tmp_path))
    trace.expect(5000)
    call = only(str(tmp_path))
    assert (call.pid, call.kind, call.rank, call.world_size) == (os.getpid(), "save", 1, 4)
    assert (call.phase, call.bytes_done, call.bytes_expected) == ("plan", 0, 5000)
    assert before <= call.began_at <= time.time()
    assert 0 <= call.phase_s <= time.time() - before
    assert not call.is_stopped
    assert trace.spans is not None
    trace.spans.leave()
    assert ranks_here("save", str(tmp_path)) == []


def test_phases_have_the_numbers_of_the_engine(tmp_path: Path) -> None:
    trace = trace_of(str(tmp_path))
    for phase in _core.PHASES:
        trace.enter(phase)
        assert only(str(tmp_path)).phase == phase


def of_loads() -> list[str]:
    """Returns the phases of the loads of this process that are shown as under way."""
    return [call.phase for call in read_live_pages().calls if call.pid == os.getpid() and call.kind == "load"]


def test_a_reader_that_is_kept_is_no_load(tmp_path: Path) -> None:
    """Metadata are read without a load, and errors are kept with the frames in which they were raised."""
    gc.collect()  # the readers of other tests
    dcp.save({"w": torch.ones(3)}, storage_writer=BcpWriter(tmp_path / "ck"), no_dist=True)
    reader, nowhere = BcpReader(tmp_path / "ck"), BcpReader(tmp_path / "nowhere")
    metadata = reader.read_metadata()
    with pytest.raises(CheckpointNotFoundError):
        nowhere.read_metadata()
    assert of_loads() == []
    # The hooks by hand: what nobody watches is shown while it runs.
    planner = BcpLoadPlanner()
    planner.set_up_planner({"w": torch.zeros(3)}, metadata, True)
    reader.set_up_storage_reader(metadata, True)
    assert of_loads() == ["plan"]
    plan = reader.prepare_local_plan(planner.create_local_plan())
    (plan,) = reader.prepare_global_plan(planner.create_global_plan([plan]))
    assert of_loads() == ["exchange"]
    (tmp_path / "ck" / next(iter(metadata.storage_data.values())).relative_path).unlink()
    with pytest.raises(CorruptCheckpointError) as kept:
        reader.read_data(planner.finish_plan(plan), planner)
    assert of_loads() == []
    assert kept.value.__traceback__ is not None


@contextmanager
def held(content: bytes) -> Iterator[None]:
    """Holds a page as any process may make one."""
    page = os.memfd_create("bytecheckpoint-call")
    try:
        os.write(page, content)
        yield
    finally:
        os.close(page)


def page(header: Any, magic: bytes = b"BCPLIVE1", phase: int = 1, done: int = 0, expected: int = 0) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return HEAD.pack(magic, phase, 0, done, expected, len(text)) + text


def header(**changes: Any) -> dict[str, Any]:
    values = {"kind": "save", "path": "/p", "rank": 0, "world_size": 1, "pid": os.getpid(), "at": 1.0}
    return {**values, **changes}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"BCPLIVE1",
        page(header(), magic=b"BCPLIVE9"),
        page(b"no JSON"),
        page(b'{"pid": 1'),
        page(b"\xff\xfe\x00"),
        page(b"[" * 3000),
        page(b"9" * 3000),
        page([]),
        page({}),
        page(header(rank="x")),
        page(header(rank=None)),
        page(header(rank=1e300 * 1e10)),
        page(header(at="now")),
        page(header(at=float("inf"))),
        page(header(at=float("nan"))),
        page(header(rank=-1)),
        page(header(rank=10**300)),
        page(header(world_size=-5)),
        page(header(pid={})),
    ],
)
def test_pages_of_others_do_no_harm(content: bytes) -> None:
    before = {(call.path, call.began_at) for call in read_live_pages().calls}
    with held(content):
        pages = read_live_pages()
    assert [call for call in pages.calls if (call.path, call.began_at) not in before and call.pid == os.getpid()] == []
    assert pages.num_unknown >= 1


def test_a_page_of_another_process_is_not_shown_as_ours() -> None:
    with held(page(header(path="/of another", pid=os.getpid() + 1))):
        assert ranks_here("save", "/of another") == []


def test_numbers_that_cannot_be_are_kept_within_bounds() -> None:
    with held(page(header(path="/odd"), done=-1, expected=-(1 << 62))):
        call = only("/odd")
        shown = top("--once")
    assert (call.bytes_done, call.bytes_expected) == (0, 0)
    assert "/odd" in shown


def test_a_forked_child_does_not_show_the_call_again(tmp_path: Path) -> None:
    trace = trace_of(str(tmp_path))
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)  # until the parent has looked
        os._exit(0)
    try:
        assert only(str(tmp_path)).pid == os.getpid()
    finally:
        os.close(writing)
        os.close(reading)
        os.waitpid(child, 0)
    assert trace.spans is not None


HOLDING = """
import sys, os
from bytecheckpoint import Config
from bytecheckpoint.calls.trace import CallTrace
trace = CallTrace(Config(), "load", sys.argv[1], 0, 2)
trace.enter("read")
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_process_that_is_stopped_and_one_that_has_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDING, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"ready\n"
        (call,) = ranks_here("load", str(tmp_path))
        assert (call.pid, call.phase, call.is_stopped) == (other.pid, "read", False)
        other.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, other.pid, os.WSTOPPED)
        (call,) = ranks_here("load", str(tmp_path))
        assert call.is_stopped
        assert "stopped by a signal" in top("--once", str(tmp_path))
        other.kill()
        other.wait()
        assert ranks_here("load", str(tmp_path)) == []


def top(*arguments: str) -> str:
    command = [sys.executable, "-m", "bytecheckpoint", "top", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


class Pausing(BcpSavePlanner):
    """Waits in the middle of a save until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.is_there, self.may_go = threading.Event(), threading.Event()

    def resolve_data(self, write_item: Any) -> Any:
        self.is_there.set()
        assert self.may_go.wait(240)
        return super().resolve_data(write_item)


def test_top_shows_a_save_and_the_last_calls(tmp_path: Path) -> None:
    run = tmp_path / "run"
    bytecheckpoint.save_state_dict(run / "step_1", {"t": torch.arange(500)}, no_dist=True)
    assert bytecheckpoint.observability.flush()
    planner, path = Pausing(), run / "step_2"
    handle = bytecheckpoint.async_save_state_dict(path, {"t": torch.arange(1000)}, no_dist=True, planner=planner)
    assert planner.is_there.wait(240)
    shown, shown_all = top("--once", str(run)), top()  # stdout is no terminal
    elsewhere = top("--once", str(tmp_path / "other"))
    document = json.loads(top("--json", str(run)))
    planner.may_go.set()
    handle.committed.result()
    assert re.search(rf"^ *{os.getpid()} +0/1 +save .* write ", shown, re.MULTILINE), shown
    assert f"save {path}: 1 rank here" in shown
    assert str(path) in shown_all
    assert str(path) not in elsewhere
    assert re.search(r"last calls:\n +\S+ \S+ +save +step_1 ", shown), shown
    (call,) = document["calls"]
    assert (call["pid"], call["path"], call["phase"]) == (os.getpid(), str(path), "write")
    assert [record["path"] for record in document["last"]] == ["step_1"]
    assert str(path) not in top("--once", str(run)).replace("last calls", "")


def test_hostile_text_cannot_move_the_cursor() -> None:
    bad = "/p\x1b[2J\nsave ok\u202e\x9b"
    with held(page(header(path=bad, kind="sa\x1b[0mve"))):
        shown = top("--once")
        assert json.loads(top("--json"))["calls"]
    assert "\\x1b[2J\\nsave ok\\u202e\\x9b" in shown
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", shown)


def test_a_journal_of_somebody_else_does_no_harm(tmp_path: Path) -> None:
    lines = [
        {"format": 1, "kind": "save"},
        {"format": 1, "kind": "save", "at": float("inf"), "path": "\x1b[2J", "report": {"total_s": float("nan")}},
        {"format": 1, "kind": "load", "at": 1e17, "path": 5, "report": {"total_s": "x", "total_bytes_wanted": 1e308}},
        {"format": 1, "kind": "load", "at": -1e308, "report": [1, 2]},
    ]
    (tmp_path / ".bcp").mkdir()
    (tmp_path / ".bcp" / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shown = top("--once", str(tmp_path))
    assert "\\x1b[2J" in shown
    assert "\x1b" not in shown
    assert [each["kind"] for each in json.loads(top("--json", str(tmp_path)))["last"]] == [
        "save",
        "save",
        "load",
        "load",
    ]


def test_top_draws_again_until_it_is_interrupted(tmp_path: Path) -> None:
    trace = trace_of(str(tmp_path))
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 60))
    command = [sys.executable, "-m", "bytecheckpoint", "top", "--interval", "0.1"]
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    streams: dict[str, Any] = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    with subprocess.Popen(command, **streams, env=environment, start_new_session=True) as running:
        os.close(theirs)
        said = b""
        while said.count(b"\x1b[H") < 3:
            assert select.select([ours], [], [], 120)[0], said
            said += os.read(ours, 1 << 16)
        running.send_signal(signal.SIGINT)
        while select.select([ours], [], [], 120)[0]:
            try:
                said += os.read(ours, 1 << 16)
            except OSError:  # the other end is closed
                break
        assert running.wait(120) == 0
    os.close(ours)
    assert b" save " in said
    lines = [re.sub(rb"\x1b\[[HJK]", b"", line) for line in said.split(b"\r\n")]
    assert max(map(len, lines)) <= 60, lines
    assert b"Traceback" not in said
    assert trace.spans is not None
