# SPDX-License-Identifier: Apache-2.0
"""Tests that neither signals that interrupt calls nor transfers that are cut short disturb a save or a load.

Nor does a file system that creates a file and says that it is missing.
"""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.fork_server import ForkServer
from support.preloading import preloaded
from support.saves import CONFIG, SaveRequest, are_equal, attempt, load, state

from bytecheckpoint import BcpReader, Config, verify

SOURCE = Path(__file__).with_name("short_transfers.c")
# The data take several slots, and a few hundred transfers once these are cut into parts.
NUM_ROWS = 14_000


def save_and_load(request: SaveRequest) -> None:
    assert attempt(request).errors == {}
    got = load(BcpReader(request.path, config=request.config), num_rows=request.num_rows)
    assert are_equal(got, state(request.generation, num_rows=request.num_rows))
    assert verify(request.path, config=request.config).is_whole


def save_and_load_disturbed(library: str, request: SaveRequest) -> int:
    """Saves and loads. Returns how many transfers were disturbed meanwhile; the tmp was created and denied once."""
    calls = ctypes.CDLL(library)
    before: int = calls.num_disturbed()
    save_and_load(request)
    assert calls.num_denied() > 0
    return int(calls.num_disturbed()) - before


def save_and_load_in_a_storm(request: SaveRequest) -> int:
    """Saves and loads. Returns how many signals came meanwhile."""
    signals = 0

    def count(number: int, frame: Any) -> None:
        nonlocal signals
        signals += 1

    signal.signal(signal.SIGALRM, count)
    signal.siginterrupt(signal.SIGALRM, True)  # calls are not restarted
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        save_and_load(request)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return signals


@pytest.fixture(scope="module")
def disturbing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ForkServer]]:
    """Returns the library that disturbs transfers, and a fork server whose processes use it."""
    library = preloaded(SOURCE, tmp_path_factory.mktemp("library"), untested="SHORT TRANSFERS")
    server = ForkServer(environment={"LD_PRELOAD": str(library)})
    yield str(library), server
    server.close()


@pytest.mark.parametrize("direct_io", [True, False], ids=["direct", "buffered"])
@pytest.mark.parametrize("io_threads", [1, 3])
def test_short_transfers(direct_io: bool, io_threads: int, disturbing: tuple[str, ForkServer], tmp_path: Path) -> None:
    library, server = disturbing
    config = replace(CONFIG, direct_io=direct_io, io_threads=io_threads)
    request = SaveRequest(tmp_path / "ckpt", 1, config=config, num_rows=NUM_ROWS)
    assert server.run(save_and_load_disturbed, library, request).unwrap() > 20


def test_storm_of_signals(server: ForkServer, tmp_path: Path) -> None:
    request = SaveRequest(tmp_path / "ckpt", 1, config=Config(ring_bytes=16 << 20), num_rows=6000)
    assert server.run(save_and_load_in_a_storm, request).unwrap() > 20
