# SPDX-License-Identifier: Apache-2.0
"""Processes that end while a save is under way: by themselves, by SIGTERM, by Ctrl-C."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bytecheckpoint import load_state_dict

LIMIT_S = 60

# What every script begins with: a planner that keeps the save waiting until its process has been told to end.
BEGIN = """
import logging, os, signal, sys, threading, time
import torch
import torch.distributed.checkpoint as dcp
import bytecheckpoint as bcp

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
# At once: the thread that DCP saves in may not have begun.
SIGTERM_OF_DCP = """
threading.Timer(0.3, told.set).start()
writer = bcp.BcpWriter(path, config=bcp.Config(handle_sigterm=True))
dcp.async_save(state, storage_writer=writer, planner=Waiting(), no_dist=True)
os.kill(os.getpid(), signal.SIGTERM)
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


def run(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BEGIN + script, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def assert_committed(path: Path) -> None:
    state: dict[str, Any] = {"w": torch.zeros(500_000)}
    load_state_dict(path, state)
    assert torch.equal(state["w"], torch.full((500_000,), 7.0))


@pytest.mark.parametrize("script", [EXIT, DCP_EXIT], ids=["own", "dcp"])
def test_a_process_that_ends_waits_and_commits(tmp_path: Path, script: str) -> None:
    done = run(script, tmp_path / "ckpt")
    assert (done.returncode, done.stderr) == (0, "")
    assert_committed(tmp_path / "ckpt")


def test_a_failure_nobody_looked_at_is_told_at_the_end(tmp_path: Path) -> None:
    done = run(UNSEEN, tmp_path)
    assert done.returncode == 0
    assert "a background save to /proc/nowhere failed, and nobody looked: mkdir(/proc/nowhere)" in done.stderr


def test_sigterm_waits_for_saves_and_then_ends_the_process(tmp_path: Path) -> None:
    done = run(SIGTERM, tmp_path / "ckpt")
    assert done.returncode == -signal.SIGTERM, done.stderr
    assert_committed(tmp_path / "ckpt")
    assert_committed(tmp_path / "ckpt-next")


@pytest.mark.parametrize("script", [SIGTERM_AFTER_REGISTER, SIGTERM_OF_DCP], ids=["register", "writer"])
def test_sigterm_waits_for_saves_of_dcp(tmp_path: Path, script: str) -> None:
    done = run(script, tmp_path / "ckpt")
    assert done.returncode == -signal.SIGTERM, done.stderr
    assert_committed(tmp_path / "ckpt")


def test_shutdown_waits_for_saves_of_dcp(tmp_path: Path) -> None:
    done = run(DCP_SHUTDOWN, tmp_path / "ckpt")
    assert (done.returncode, done.stdout) == (0, "committed\n"), done.stderr


def test_sigterm_goes_on_to_the_handler_that_was_there(tmp_path: Path) -> None:
    done = run(SIGTERM_OF_TRAINER, tmp_path / "ckpt")
    assert (done.returncode, done.stdout) == (5, "trainer's own\n"), done.stderr
    assert_committed(tmp_path / "ckpt")


@pytest.mark.parametrize("wait", ["future", "stage", "shutdown"])
def test_ctrl_c_ends_a_wait_and_not_the_save(tmp_path: Path, wait: str) -> None:
    done = run(CTRL_C, tmp_path / "ckpt", wait)
    assert (done.returncode, done.stdout) == (0, "interrupted\n"), done.stderr
    assert_committed(tmp_path / "ckpt")
