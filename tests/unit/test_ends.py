# SPDX-License-Identifier: Apache-2.0
"""Tests processes that end while a save is under way: by themselves, by SIGTERM, by Ctrl-C."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ending_ranks import Ended, EndingRanks, run_script

from bytecheckpoint import load_state_dict, verify

LIMIT_S = 60
Run = Callable[..., Ended]

# Every script begins with this. The planner keeps the save waiting until `told` is set, when the process is to end.
BEGIN = """
import logging, os, signal, sys, threading, time
import torch
import torch.distributed.checkpoint as dcp
import bytecheckpoint as bcp
from bytecheckpoint.staging import background as _background

logging.basicConfig(format="%(message)s")
path = sys.argv[1]
state = {"w": torch.full((500_000,), 7.0)}
told = threading.Event()
arrived = threading.Event()

class Waiting(bcp.BcpSavePlanner):
    def resolve_data(self, item):
        arrived.set()
        assert told.wait(30)
        return super().resolve_data(item)
"""
EXIT = """
bcp.async_save_state_dict(path, state, planner=Waiting())
threading.Timer(0.3, told.set).start()
"""
DCP_EXIT = """
dcp.async_save(state, storage_writer=bcp.BcpWriter(path), planner=Waiting(), no_dist=True)
threading.Timer(0.3, told.set).start()
"""
DCP_SHUTDOWN = """
dcp.async_save(state, storage_writer=bcp.BcpWriter(path), planner=Waiting(), no_dist=True)
assert arrived.wait(30)
threading.Timer(0.3, told.set).start()
bcp.shutdown()
if os.path.exists(path + "/.metadata"):
    print("committed")
"""
UNSEEN = """
bcp.async_save_state_dict("/proc/nowhere", state)
"""
SIGTERM = """
config = bcp.Config(handle_sigterm=True, on_staging_busy="double_buffer")
bcp.async_save_state_dict(path, state, planner=Waiting(), config=config)
bcp.async_save_state_dict(path + "-next", state, config=config)
assert arrived.wait(30)
threading.Timer(0.3, told.set).start()
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(30)
"""
SIGTERM_AFTER_REGISTER = """
with bcp.registered(config=bcp.Config(handle_sigterm=True)):
    dcp.async_save(state, checkpoint_id=path, planner=Waiting(), no_dist=True)
assert arrived.wait(30)
threading.Timer(0.3, told.set).start()
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(30)
"""
# The signal comes at once: the thread in which DCP saves may not have begun.
SIGTERM_OF_DCP = """
threading.Timer(0.3, told.set).start()
writer = bcp.BcpWriter(path, config=bcp.Config(handle_sigterm=True))
dcp.async_save(state, storage_writer=writer, planner=Waiting(), no_dist=True)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(30)
"""
# The signal comes in the middle of staging, before the save begins.
SIGTERM_WHILE_STAGING = """
class Odd:
    def __deepcopy__(self, memo):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)  # in which the handler runs
        return 7

told.set()
state["odd"] = Odd()
config = bcp.Config(handle_sigterm=True)
if sys.argv[2] == "own":
    bcp.async_save_state_dict(path, state, config=config)
elif sys.argv[2] == "registered":
    with bcp.registered(config=config):
        dcp.async_save(state, checkpoint_id=path, no_dist=True)
else:
    dcp.async_save(state, storage_writer=bcp.BcpWriter(path, config=config), no_dist=True)
time.sleep(30)
"""
SIGTERM_OF_TRAINER = (
    """
def on_sigterm(number, frame):
    print("trainer's own")
    sys.exit(5)
signal.signal(signal.SIGTERM, on_sigterm)
"""
    + SIGTERM
)
CTRL_C = """
handle = bcp.async_save_state_dict(path, state, planner=Waiting())
assert arrived.wait(30)
threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
begin = time.monotonic()
try:
    if sys.argv[2] == "future":
        handle.committed.result()
    elif sys.argv[2] == "stage":
        bcp.async_save_state_dict(path + "-next", state)
    else:
        bcp.shutdown()
except KeyboardInterrupt:
    print("interrupted")
assert time.monotonic() - begin < 20
told.set()
"""
# A background save fails, and nobody asks for its result.
FAILED = """
bcp.register()
dcp.async_save(state, checkpoint_id="/proc/nowhere", no_dist=True)
_background.wait_for_saves(30)
"""
FAILED_AND_RAISED = (
    FAILED
    + """
dcp.async_save(state, checkpoint_id=path, no_dist=True)
"""
)
FAILED_AND_KEPT = (
    FAILED
    + """
try:
    dcp.async_save(state, checkpoint_id=path, no_dist=True)
except bcp.CheckpointError as error:
    kept = error
for _ in range(2):
    dcp.async_save(state, checkpoint_id=path, no_dist=True).result(30)
"""
)
# Interrupts calls that begin a save, each time one place later, at 79 places, and keeps all exceptions. Each next save
# still commits, and the process still ends.
INTERRUPTED_AND_KEPT = """
from bytecheckpoint.staging import leases as _leases
_leases._UNUSED_WAIT_S, _leases._BEGIN_WITHIN_S = 1.0, 0.05
MODULES = ["bytecheckpoint." + name for name in (
    "staging.background", "staging.save_queue", "staging.staged_state", "staging.leases", "dcp.stager", "registration",
    "staging.save_handle")]
kept = []

def save():
    if sys.argv[2] == "own":
        return bcp.async_save_state_dict(path, state).committed
    if sys.argv[2] == "registered":
        with bcp.registered():
            return dcp.async_save(state, checkpoint_id=path, no_dist=True)
    return dcp.async_save(state, storage_writer=bcp.BcpWriter(path), no_dist=True)

def save_and_interrupt(at):
    seen = 0
    def look(frame, event, argument):
        nonlocal seen
        name = frame.f_globals.get("__name__", "")
        if event in ("call", "c_return") and name in MODULES and frame.f_code.co_name != "__del__":
            seen += 1
            if seen == at:
                sys.setprofile(None)
                raise KeyboardInterrupt
    sys.setprofile(look)
    try:
        future = save()
    finally:
        sys.setprofile(None)
    future.result(30)

def save_again():
    try:
        save().result(30)
    except bcp.CheckpointError as error:
        kept.append(error)
        assert "its result was not read" in str(error), error
        save().result(30)

for at in range(1, 80):
    try:
        save_and_interrupt(at)
    except BaseException as error:
        kept.append(error)
    save_again()
assert kept
"""
NO_THREAD = """
def start(thread):
    raise RuntimeError("can't start new thread")
threading.Thread.start = start
if sys.argv[2] == "own":
    bcp.async_save_state_dict(path, state)
else:
    bcp.register()
    dcp.async_save(state, checkpoint_id=path, no_dist=True)
"""
NO_THREAD_OF_DCP = """
start = threading.Thread.start
def refuse(thread):
    raise RuntimeError("can't start new thread")
threading.Thread.start = refuse
try:
    dcp.async_save(state, storage_writer=bcp.BcpWriter(path), no_dist=True)
except RuntimeError as error:
    kept = error
threading.Thread.start = start
if sys.argv[2] == "again":
    dcp.async_save(state, storage_writer=bcp.BcpWriter(path), no_dist=True)
"""
# The script has no main guard: the process that DCP starts to save runs it first, too, and may not start another one.
NO_GUARD = """
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

os.environ["MASTER_ADDR"] = "localhost"
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
if sys.argv[2] == "registered":
    bcp.register()
    arguments = {"checkpoint_id": path}
else:
    arguments = {"storage_writer": bcp.BcpWriter(path)}
dcp.async_save(state, async_checkpointer_type=AsyncCheckpointerType.PROCESS, **arguments).result()
"""
# The save waits forever, also after it is given up.
NEVER = """
class Never(bcp.BcpSavePlanner):
    def resolve_data(self, item):
        arrived.set()
        threading.Event().wait()

config = bcp.Config(exit_timeout_s=0.1, handle_sigterm=True)
bcp.save_state_dict(path, {"w": torch.full((500_000,), 7.0)})
if sys.argv[2] == "own":
    bcp.async_save_state_dict(path, state, planner=Never(), config=config)
else:
    bcp.register(config=config)
    dcp.async_save(state, checkpoint_id=path, planner=Never(), no_dist=True)
assert arrived.wait(30)
if sys.argv[3] == "SIGTERM":
    os.kill(os.getpid(), signal.SIGTERM)
"""
# The process ends while a save over an older checkpoint is under way.
ENDS = """
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

bcp.save_state_dict(path, {"w": torch.full((500_000,), 1.0)})
if sys.argv[2] == "own":
    bcp.async_save_state_dict(path, state, planner=Waiting())
elif sys.argv[2] == "registered":
    bcp.register()
    dcp.async_save(state, checkpoint_id=path, planner=Waiting(), no_dist=True)
else:
    bcp.register()
    os.environ["MASTER_ADDR"] = "localhost"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dcp.async_save(state, checkpoint_id=path, async_checkpointer_type=AsyncCheckpointerType.PROCESS)
    arrived.set()
assert arrived.wait(30)
threading.Timer(0.1, told.set).start()
if sys.argv[3] == "sys.exit":
    sys.exit(3)
elif sys.argv[3] == "os._exit":
    os._exit(4)
elif sys.argv[3] == "error":
    raise ZeroDivisionError
elif sys.argv[3] == "SIGINT":
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(30)
"""
CODES = {"sys.exit": 3, "os._exit": 4, "error": 1, "SIGINT": -signal.SIGINT, "return": 0}


@pytest.fixture
def run(ending_ranks: EndingRanks) -> Run:
    """Returns a function that runs a script with arguments in a process of its own."""

    def of_script(script: str, *arguments: object) -> Ended:
        (ended,) = ending_ranks.run(1, run_script, BEGIN + script, *arguments)
        return ended

    return of_script


def assert_committed(path: Path, value: float | None = 7.0) -> None:
    """Asserts that ``path`` is a whole checkpoint of ``value`` in each element, or of any one value if it is None."""
    state: dict[str, Any] = {"w": torch.zeros(500_000)}
    load_state_dict(path, state)
    assert torch.equal(state["w"], torch.full((500_000,), state["w"][0].item() if value is None else value))
    assert verify(path).is_whole


@pytest.mark.parametrize("script", [EXIT, DCP_EXIT], ids=["own", "dcp"])
def test_a_process_that_ends_waits_and_commits(tmp_path: Path, run: Run, script: str) -> None:
    done = run(script, tmp_path / "ckpt")
    assert (done.code, done.said) == (0, "")
    assert_committed(tmp_path / "ckpt")


def test_a_failure_nobody_looked_at_is_told_at_the_end(tmp_path: Path, run: Run) -> None:
    done = run(UNSEEN, tmp_path)
    assert done.code == 0
    assert "a background save to /proc/nowhere failed, and its result was not read: mkdir(/proc/nowhere)" in done.said


# What is registered before the first background save runs after what we do at the end.
FAILING = """
import atexit, ctypes
atexit.register(print, "last words")
config = bcp.Config(failed_save_exit_code=70, exit_timeout_s=0.1)
def begin():
    if sys.argv[2] == "own":
        return bcp.async_save_state_dict("/proc/nowhere", state, config=config).committed
    if sys.argv[2] == "never":
        class Never(bcp.BcpSavePlanner):
            def resolve_data(self, item):
                arrived.set()
                threading.Event().wait()
        future = bcp.async_save_state_dict(path, state, planner=Never(), config=config).committed
        assert arrived.wait(30)
        return future
    bcp.register(config=config)
    return dcp.async_save(state, checkpoint_id="/proc/nowhere", no_dist=True)
future = begin()
ctypes.CDLL(None).printf(b"of C\\n")
"""


@pytest.mark.parametrize(
    ("call", "ending", "code"),
    [
        ("own", "", 70),
        ("own", "future.exception()", 0),
        ("register", "sys.exit(3)", 70),
        ("never", "", 70),
    ],
)
def test_an_exit_code_for_failures_nobody_looked_at(tmp_path: Path, call: str, ending: str, code: int) -> None:
    command = [sys.executable, "-c", BEGIN + FAILING + ending, str(tmp_path / "ckpt"), call]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == code, done.stderr
    assert {"last words", "of C"} <= {*done.stdout.splitlines()}
    if code == 70 and call != "never":
        assert "failed, and its result was not read" in done.stderr


def test_a_committed_save_leaves_the_exit_code(tmp_path: Path) -> None:
    ending = "bcp.async_save_state_dict(path, state, config=bcp.Config(failed_save_exit_code=70))"
    command = [sys.executable, "-c", BEGIN + ending, str(tmp_path / "ckpt")]
    assert subprocess.run(command, timeout=LIMIT_S, check=False).returncode == 0
    assert_committed(tmp_path / "ckpt")


def test_sigterm_waits_for_saves_and_then_ends_the_process(tmp_path: Path, run: Run) -> None:
    done = run(SIGTERM, tmp_path / "ckpt")
    assert done.code == -signal.SIGTERM, done.said
    assert_committed(tmp_path / "ckpt")
    assert_committed(tmp_path / "ckpt-next")


@pytest.mark.parametrize("script", [SIGTERM_AFTER_REGISTER, SIGTERM_OF_DCP], ids=["register", "writer"])
def test_sigterm_waits_for_saves_of_dcp(tmp_path: Path, run: Run, script: str) -> None:
    done = run(script, tmp_path / "ckpt")
    assert done.code == -signal.SIGTERM, done.said
    assert_committed(tmp_path / "ckpt")


@pytest.mark.parametrize("way", ["own", "registered", "writer"])
def test_sigterm_while_a_state_is_staged_waits_for_its_save(tmp_path: Path, run: Run, way: str) -> None:
    done = run(SIGTERM_WHILE_STAGING, tmp_path / "ckpt", way)
    assert done.code == -signal.SIGTERM, done.said
    assert_committed(tmp_path / "ckpt")


def test_shutdown_waits_for_saves_of_dcp(tmp_path: Path, run: Run) -> None:
    done = run(DCP_SHUTDOWN, tmp_path / "ckpt")
    assert (done.code, done.said) == (0, "committed\n"), done.said


def test_sigterm_goes_on_to_the_handler_that_was_there(tmp_path: Path, run: Run) -> None:
    done = run(SIGTERM_OF_TRAINER, tmp_path / "ckpt")
    assert (done.code, done.said) == (5, "SIGTERM: waiting for background saves\ntrainer's own\n")
    assert_committed(tmp_path / "ckpt")


@pytest.mark.parametrize("wait", ["future", "stage", "shutdown"])
def test_ctrl_c_ends_a_wait_and_not_the_save(tmp_path: Path, run: Run, wait: str) -> None:
    done = run(CTRL_C, tmp_path / "ckpt", wait)
    assert (done.code, done.said) == (0, "interrupted\n"), done.said
    assert_committed(tmp_path / "ckpt")


def test_a_failure_that_is_raised_by_the_next_save_ends_the_process(tmp_path: Path, run: Run) -> None:
    done = run(FAILED_AND_RAISED, tmp_path / "ckpt")
    assert done.code == 1, done.said
    assert "a background save to /proc/nowhere failed, and its result was not read" in done.said


def test_a_failure_that_is_kept_keeps_no_later_save_waiting(tmp_path: Path, run: Run) -> None:
    done = run(FAILED_AND_KEPT, tmp_path / "ckpt")
    lost = "/proc: no journal has the saves that failed last: nowhere: StorageError: rank 0: StorageError: mkdir("
    assert done.code == 0, done.said
    assert done.said.startswith(lost), done.said
    assert done.said.count("\n") == 1, done.said  # nothing else is said
    assert_committed(tmp_path / "ckpt")


@pytest.mark.parametrize("way", ["own", "registered", "writer"])
def test_ctrl_c_that_is_kept_keeps_neither_the_next_save_nor_the_end_waiting(
    tmp_path: Path, run: Run, way: str
) -> None:
    done = run(INTERRUPTED_AND_KEPT, tmp_path / "ckpt", way)
    assert done.code == 0, done.said
    assert_committed(tmp_path / "ckpt")


@pytest.mark.parametrize("way", ["registered", "writer"])
def test_a_process_that_cannot_start_is_an_error_and_the_end(tmp_path: Path, way: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(BEGIN + NO_GUARD)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", script, tmp_path / "ckpt", way],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 1
    assert "Checkpoint background process is dead" in done.stderr
    assert not (tmp_path / "ckpt" / ".metadata").exists()


@pytest.mark.parametrize("way", ["own", "registered"])
def test_where_no_thread_can_be_had_the_caller_saves(tmp_path: Path, run: Run, way: str) -> None:
    done = run(NO_THREAD, tmp_path / "ckpt", way)
    assert done.code == 0, done.said
    assert "a background save runs in the calling thread: can't start new thread" in done.said
    assert_committed(tmp_path / "ckpt")


@pytest.mark.parametrize("then", ["end", "again"])
def test_where_dcp_gets_no_thread_nothing_waits_for_it(tmp_path: Path, run: Run, then: str) -> None:
    done = run(NO_THREAD_OF_DCP, tmp_path / "ckpt", then)
    assert (done.code, done.said) == (0, "")
    if then == "again":
        assert_committed(tmp_path / "ckpt")


@pytest.mark.parametrize("end", ["return", "SIGTERM"])
@pytest.mark.parametrize("way", ["own", "registered"])
def test_the_end_waits_for_a_stated_time(tmp_path: Path, run: Run, way: str, end: str) -> None:
    done = run(NEVER, tmp_path / "ckpt", way, end)
    assert done.code == (-signal.SIGTERM if end == "SIGTERM" else 0), done.said
    assert f"the save to {tmp_path / 'ckpt'} is given up" in done.said
    assert_committed(tmp_path / "ckpt")


@pytest.mark.parametrize("end", CODES)
@pytest.mark.parametrize("way", ["own", "registered"])
def test_each_end_leaves_a_whole_checkpoint(tmp_path: Path, run: Run, way: str, end: str) -> None:
    done = run(ENDS, tmp_path / "ckpt", way, end)
    assert done.code == CODES[end], done.said
    assert_committed(tmp_path / "ckpt", 1.0 if end == "os._exit" else 7.0)


@pytest.mark.parametrize("end", ["sys.exit", "os._exit", "SIGINT"])
def test_each_end_of_a_process_with_another_that_saves(tmp_path: Path, run: Run, end: str) -> None:
    done = run(ENDS, tmp_path / "ckpt", "process", end)
    assert done.code == CODES[end], done.said
    assert_committed(tmp_path / "ckpt", None if end == "os._exit" else 7.0)
