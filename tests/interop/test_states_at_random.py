# SPDX-License-Identifier: Apache-2.0
"""Nested states that are drawn at random, saved by each of our calls and by stock DCP, and loaded by each."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from support.campaign import Campaign
from support.drawn_states import draw_state
from support.equality import assert_equal, blank, settled

import bytecheckpoint
from bytecheckpoint import (
    BcpLoadPlanner,
    BcpReader,
    BcpSavePlanner,
    BcpWriter,
    async_save_state_dict,
    load_state_dict,
    save_state_dict,
)

State = dict[str, Any]


def _save_in_background(path: Path, state: State) -> None:
    async_save_state_dict(path, state, no_dist=True).committed.result(60)


def _save_registered(path: Path, state: State) -> None:
    with bytecheckpoint.registered():
        dcp.save(state, checkpoint_id=path, no_dist=True)


def _load_registered(path: Path, state: State) -> None:
    with bytecheckpoint.registered():
        dcp.load(state, checkpoint_id=path, no_dist=True)


SAVES: dict[str, Callable[[Path, State], Any]] = {
    "save_state_dict": lambda path, state: save_state_dict(path, state, no_dist=True),
    "async_save_state_dict": _save_in_background,
    "writer": lambda path, state: dcp.save(state, storage_writer=BcpWriter(path), no_dist=True),
    "writer and planner": lambda path, state: dcp.save(
        state, storage_writer=BcpWriter(path), planner=BcpSavePlanner(), no_dist=True
    ),
    "registered": _save_registered,
    "stock save": lambda path, state: dcp.save(state, storage_writer=dcp.FileSystemWriter(path), no_dist=True),
}
LOADS: dict[str, Callable[[Path, State], Any]] = {
    "load_state_dict": lambda path, state: load_state_dict(path, state, no_dist=True),
    "reader": lambda path, state: dcp.load(state, storage_reader=BcpReader(path), no_dist=True),
    "reader and planner": lambda path, state: dcp.load(
        state, storage_reader=BcpReader(path), planner=BcpLoadPlanner(), no_dist=True
    ),
    "registered load": _load_registered,
    "stock load": lambda path, state: dcp.load(state, storage_reader=dcp.FileSystemReader(path), no_dist=True),
}


@pytest.fixture
def campaign(capsys: pytest.CaptureFixture[str]) -> Iterator[Campaign]:
    drawn = Campaign("states at random")
    yield drawn
    with capsys.disabled():
        print(f"\n{drawn}")


def test_what_one_call_saves_every_call_loads(campaign: Campaign, tmp_path: Path) -> None:
    def trial(number: int, draw: random.Random) -> None:
        state = draw_state(draw)
        save = draw.choice([*SAVES])
        path = tmp_path / str(number)
        SAVES[save](path, state)
        wanted = settled(state)
        for name, load in LOADS.items():
            got = blank(state)
            try:
                load(path, got)
                assert_equal(settled(got), wanted)
            except BaseException as error:
                error.add_note(f"saved by {save}, loaded by {name}: {state}")
                raise
        campaign.covered[save] += 1

    campaign.run(trial, short=40, long=2000)
    assert campaign.covered.keys() >= SAVES.keys()
