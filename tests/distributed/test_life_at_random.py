# SPDX-License-Identifier: Apache-2.0
"""A training job in which groups, ranks, exits, forks, restarts and prunes happen at random times.

After each round, every checkpoint that is reported as complete loads, bit for bit, into one rank. The newest of them is
no older than the last save that was reported as committed.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from support.campaign import Campaign
from support.ending_ranks import EndingRanks

from bytecheckpoint import StepFolder, load_state_dict, scan_steps, verify
from bytecheckpoint.training_state.stored import Stored
from distributed.training_life import COMMITTED, live
from distributed.worlds import full

ROUNDS_OF_A_RUN = 20


@pytest.fixture
def campaign(capsys: pytest.CaptureFixture[str]) -> Iterator[Campaign]:
    drawn = Campaign("life at random")
    yield drawn
    with capsys.disabled():
        print(f"\n{drawn}")


def check_whole(folder: StepFolder, num_ranks: set[int]) -> None:
    """Asserts that all of the checkpoint is there, with the values of its step."""
    components = [Path(folder.path, name) for name in folder.components] or [Path(folder.path)]
    for component in components:
        assert not verify(component).problems
    key = "weight" if folder.components else "model.weight"
    got = {key: torch.zeros(8, 4)}
    load_state_dict(Path(folder.path, "model") if folder.components else folder.path, got, no_dist=True)
    assert torch.equal(got[key], full(folder.step)), folder
    if folder.components:
        return
    of_ranks = {name: -1 for name in Stored(folder.path) if name.startswith("of_rank.")}
    assert len(of_ranks) in num_ranks, (folder, of_ranks)
    load_state_dict(folder.path, of_ranks, no_dist=True)
    assert {*of_ranks.values()} == {folder.step}


@pytest.mark.timeout(7200)
def test_life_at_random(tmp_path: Path, campaign: Campaign) -> None:
    with closing(EndingRanks()) as ranks:

        def trial(number: int, draw: random.Random) -> None:
            root = tmp_path / f"run-{number // ROUNDS_OF_A_RUN}"
            (root / "run").mkdir(parents=True, exist_ok=True)
            stores = tmp_path / f"stores-{number}"
            stores.mkdir()
            num_ranks = draw.choice((1, 2, 2, 3, 4))
            ended = ranks.run(num_ranks, live, num_ranks, root, stores, str(draw.random()), grace_s=5.0)
            codes = [of_rank.code for of_rank in ended]
            assert None not in codes, ended
            campaign.covered["ranks that died" if any(codes) else "quiet rounds"] += (
                sum(code != 0 for code in codes) or 1
            )
            begun, committed = defaultdict(set), set()
            for line in (root / "log").read_text().splitlines():
                what, step, of_ranks = line.split()
                begun[int(step)].add(int(of_ranks))
                if what == COMMITTED:
                    committed.add(int(step))
            whole = [folder for folder in scan_steps(root / "run") if folder.is_complete]
            for folder in whole:
                check_whole(folder, begun[folder.step])
            campaign.covered["whole checkpoints loaded"] += len(whole)
            newest = max((folder.step for folder in whole), default=0)
            assert newest >= max(committed, default=0), (newest, committed, ended)

        campaign.run(trial, short=12, long=1000)
