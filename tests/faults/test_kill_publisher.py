# SPDX-License-Identifier: Apache-2.0
"""Tests SIGKILL of a publisher at every named point of its saves: the last version stays, and the next one goes on."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from support.campaign import IS_LONG, Campaign
from support.fork_server import ForkServer

from bytecheckpoint import Config, Publisher, Subscriber, verify
from bytecheckpoint.errors import CheckpointBusyError
from bytecheckpoint.publishing.published import Versions
from faults.publishing import blank, is_at, publish_on, state_of

NUM_VERSIONS = 5
MOST_HITS = 11  # of a point that each save reaches once: two for each version, and its base


def test_kill(failpoint_server: ForkServer, tmp_path: Path, campaign: Campaign) -> None:
    """One publisher after the other dies; a subscriber that stands at an earlier version follows them all."""
    place, said = tmp_path / "published", tmp_path / "said"
    follower, followed = Subscriber(place, no_dist=True), blank()
    points: list[str] = failpoint_server.info["failpoints"]
    first = 1

    def trial(number: int, draw: random.Random) -> None:
        nonlocal first
        point = f"{points[number % len(points)]}:{draw.randint(1, MOST_HITS)}"
        said.write_text(str(first - 1))
        outcome = failpoint_server.run(
            publish_on, str(place), str(said), first, NUM_VERSIONS, env={"BCP_FAILPOINT": point}
        )
        if not outcome.was_killed:
            outcome.unwrap()  # it does not reach the point so often
        campaign.covered["killed"] += outcome.was_killed
        last = int(said.read_text())
        newest = Versions(place, Config()).newest()
        found = 0 if newest is None else newest.version
        assert last <= found <= last + outcome.was_killed, point
        campaign.covered["committed, and not said"] += found > last
        for state, taker in ((followed, follower), (blank(), Subscriber(place, registers=False, no_dist=True))):
            before = taker.version or 0
            assert taker.update(state) == (found if found > before else None), point
            assert taker.version == (found or None)
            assert not found or is_at(state, found), point
        for folder in sorted(place.glob("*-0*")):
            assert not (folder / ".metadata").exists() or verify(folder).is_whole, (point, folder.name)
        first = found + 1

    campaign.run(trial, short=len(points), long=20 * len(points))
    outcome = failpoint_server.run(publish_on, str(place), str(said), first, NUM_VERSIONS)
    outcome.unwrap()
    assert follower.update(followed) == first + NUM_VERSIONS - 1
    names = {path.name for path in place.iterdir()}
    assert not [name for name in names if not name.startswith(("base-", "delta-", "subscriber-", "publisher"))]
    halves = [path for path in place.iterdir() if path.is_dir() and not (path / ".metadata").exists()]
    assert not [path for path in halves if path.name != "publisher"], "the next publisher removes what dead ones left"


def test_a_publisher_that_stops_is_not_joined_by_another(failpoint_server: ForkServer, tmp_path: Path) -> None:
    place, said = tmp_path / "published", tmp_path / "said"
    pid = failpoint_server.start(publish_on, str(place), str(said), 1, 1, env={"BCP_FAILPOINT": "commit_decided=stop"})
    assert failpoint_server.wait_stopped(pid)
    with pytest.raises(CheckpointBusyError, match="another publisher is publishing"):
        Publisher(place, no_dist=True).publish(state_of(1), 1)
    os.kill(pid, signal.SIGCONT)
    failpoint_server.wait(pid).unwrap()
    got: dict[str, Any] = {"weights": torch.zeros_like(state_of(0)["weights"])}
    assert Subscriber(place, no_dist=True).update(got) == 1


def test_a_subscriber_reads_while_versions_come_and_go(server: ForkServer, tmp_path: Path, campaign: Campaign) -> None:
    """Nothing is kept for it: it is not registered, and only the newest version is protected."""
    place, said = tmp_path / "published", tmp_path / "said"
    taker, state = Subscriber(place, registers=False, no_dist=True), blank()
    last = 1000 if IS_LONG else 60
    pid = server.start(publish_on, str(place), str(said), 1, last, 1)
    while taker.version != last:
        if campaign.covered["updates"] % 3 == 0:
            taker, state = Subscriber(place, registers=False, no_dist=True), blank()  # by a base
        version = taker.update(state)
        if version is not None:
            assert taker.version == version
            assert is_at(state, version)
            campaign.covered["updates"] += 1
    server.wait(pid).unwrap()
