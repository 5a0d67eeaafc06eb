# SPDX-License-Identifier: Apache-2.0
"""Tests that our saves and loads open no socket, in the background either."""

from __future__ import annotations

from pathlib import Path

import torch
from support.fork_server import ForkServer, Meeting, meet
from support.saves import CONFIG

import bytecheckpoint
from faults.strace import traced


def save_and_load(address: bytes, path: Path) -> None:
    test = meet(address)
    test.send("ready")
    test.recv()
    state = {"a": torch.arange(1000.0)}
    bytecheckpoint.save_state_dict(path, state, no_dist=True, config=CONFIG)
    bytecheckpoint.async_save_state_dict(path, state, no_dist=True, config=CONFIG).committed.result()
    bytecheckpoint.load_state_dict(path, state, no_dist=True, config=CONFIG)
    bytecheckpoint.shutdown()


def test_no_socket_is_opened(server: ForkServer, meeting: Meeting, tmp_path: Path) -> None:
    log = tmp_path / "strace.log"
    pid = server.start(save_and_load, meeting.address, tmp_path / "ckpt")
    process = meeting.accept()
    assert meeting.receive(process) == "ready"
    with traced(pid, log, "-e", "trace=socket,bind,listen,connect,recvfrom,read", all_threads=True):
        process.send("go")
        server.wait(pid).unwrap()
    calls = log.read_text()
    assert "read(" in calls, "nothing was watched"
    for call in ("socket(", "bind(", "listen(", "connect("):
        assert call not in calls
