# SPDX-License-Identifier: Apache-2.0
"""Tests SIGKILL at the system calls of a save: the old or the new checkpoint is on disk, and the path is free.

strace records the calls that a save makes on its directory; this file does not list them. Each point is a save of its
own, from the same beginning, that dies just before one of these calls. Sixty points are always tried, all of them with
BCP_LONG=1 (``make torture``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
from support.campaign import Campaign
from support.fork_server import ForkServer
from support.saves import assert_only_own_files, save, save_then_look

from faults.rehearsal import NEW, NEXT, OLD, Rehearsal, Scenario, for_each, is_of_journal, one_of_each, spread
from faults.strace import Call

# Each scenario with the choice of points that are always tried. The first two have twenty points each, which together
# contain the first and the last call of every kind.
SCENARIOS: dict[Scenario, Callable[[Sequence[Call]], list[Call]]] = {
    Scenario("first save", old=False): lambda calls: spread(calls, 20, one_of_each(reversed(calls))),
    Scenario("over a checkpoint"): lambda calls: spread(calls, 20, one_of_each(calls)),
    # How often the tmp of the save that died is read depends on the locks of the machine.
    Scenario("over remains", remains=True): lambda calls: spread([call for call in calls if call.name != "read"], 8),
    Scenario("file a record", file_a_record=True): lambda calls: spread(calls, 5),
    Scenario("coordinator of two", num_ranks=2): lambda calls: spread(calls, 4),
    Scenario("other of two", num_ranks=2, rank=1): lambda calls: spread(calls, 3),
}
# Calls that the save of a single rank always makes. These are prefixes: other architectures have longer names.
ALWAYS_MADE = ("open", "close", "flock", "fallocate", "pwrite", "pread", "ftruncate", "fsync", "rename", "getdents")
# Calls that change nothing on disk. fcntl changes only the flags of a descriptor.
READING = ("open", "close", "getdents", "newfstatat", "fstat", "statfs", "statx", "pread", "fcntl")


@pytest.fixture(scope="module")
def rehearse(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Scenario], Rehearsal]:
    return cache(lambda scenario: Rehearsal(scenario, server, tmp_path_factory.mktemp("rehearsal")))


@pytest.fixture(scope="module", params=SCENARIOS, ids=str)
def rehearsal(request: pytest.FixtureRequest, rehearse: Callable[[Scenario], Rehearsal]) -> Rehearsal:
    return rehearse(request.param)


def kill_and_look(rehearsal: Rehearsal, root: Path, call: Call) -> None:
    rehearsal.copy(root)
    coordinator_lives = rehearsal.scenario.rank != 0
    for peer in rehearsal.kill(root, call, save_then_look if coordinator_lives else save):
        assert not peer.timed_out, f"the other rank hangs:\n{peer.stacks}"
        if coordinator_lives:
            assert peer.unwrap() == [], "a coordinator that lives on, after its peer died, holds the path"
    before = OLD if rehearsal.scenario.old else None
    assert rehearsal.generation_on_disk(root) == (NEW if rehearsal.comes_after_the_commit(call) else before)
    rehearsal.save_all(root, NEXT)
    assert rehearsal.generation_on_disk(root) == NEXT
    assert_only_own_files(rehearsal.path(root))


def test_nothing_is_missed(rehearsal: Rehearsal) -> None:
    """The recording has the calls that a save must make, and calls that no test can hit change nothing on disk."""
    names = {call.name for call in rehearsal.calls}
    wanted = [*ALWAYS_MADE, "unlink" if rehearsal.scenario.old else "mkdir"]
    if rehearsal.scenario.num_ranks == 1:
        assert [name for name in wanted if not any(made.startswith(name) for made in names)] == []
    left_out = [call for call in rehearsal.left_out if not is_of_journal(call)]
    assert [call for call in left_out if not call.name.startswith(READING)] == []


def test_kill_at_calls(rehearsal: Rehearsal, tmp_path: Path) -> None:
    points = SCENARIOS[rehearsal.scenario](rehearsal.calls)
    for_each(points, lambda call: kill_and_look(rehearsal, tmp_path / str(points.index(call)), call))


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_kill_at_every_call(rehearsal: Rehearsal, tmp_path: Path, campaign: Campaign) -> None:
    points = rehearsal.calls
    for_each(points, lambda call: kill_and_look(rehearsal, tmp_path / str(points.index(call)), call))
    campaign.covered["calls"] = len(points)


@pytest.mark.long
def test_there_are_enough_calls(rehearse: Callable[[Scenario], Rehearsal], campaign: Campaign) -> None:
    campaign.covered["calls in all scenarios"] = sum(len(rehearse(scenario).calls) for scenario in SCENARIOS)
    assert campaign.covered.total() >= 300


def test_directories_of_a_dead_save_are_synced(server: ForkServer, tmp_path: Path) -> None:
    """A save that dies may leave directories whose names are not durable yet. The next save must sync them."""
    rehearsal = Rehearsal(Scenario("first save", old=False), server, tmp_path / "rehearsal")
    begun = next(number for number, call in enumerate(rehearsal.calls) if ".tmp" in call.files)

    def trial(call: Call) -> None:
        earlier = rehearsal.calls[: rehearsal.calls.index(call)]
        root = rehearsal.copy(tmp_path / str(len(earlier)))
        rehearsal.kill(root, call)
        both = [*earlier, *rehearsal.record(root)]
        for number, made in enumerate(both):
            if made.name.startswith("mkdir") and not is_of_journal(made):
                parent = str(Path(made.files).parent)
                assert any(c.name == "fsync" and c.files == parent for c in both[number:]), f"{parent} is not synced"

    for_each(rehearsal.calls[:begun], trial)
