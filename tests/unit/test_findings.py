# SPDX-License-Identifier: Apache-2.0
"""Tests that findings name who and what cost time, and are silent about healthy runs and damaged records."""

from __future__ import annotations

import copy
import json
import random
import subprocess
import sys
from typing import Any

import pytest
from support.simulated_journal import (
    KINDS_OF_LOADS,
    KINDS_OF_SAVES,
    Job,
    Straggler,
    simulate_load,
    simulate_save,
)

from bytecheckpoint.findings.figures import rank_figures
from bytecheckpoint.observability import Finding, findings

# What the simulator does to a rank, by what it is to be called, and the phases in which it may show.
CALLED = {
    "more_bytes": ("more_bytes", {"write", "read"}),
    "slow_storage": ("slow_storage", {"write", "read"}),
    "slow_sync": ("slow_storage", {"sync"}),
    "slow_memory": ("slow_memory", {"copy", "checksum", "verify", "scatter"}),
    "late_arrival": ("late_arrival", {"exchange"}),
    "slow_planning": ("slow_cpu", {"plan"}),
    "shared_reading": ("shared_reading", {"read"}),
}


def random_job(rng: random.Random, *, tiny: bool = True) -> Job:
    return Job(
        rng.choice([1, 2, 3, 4, 5, 8, 16, 64, 200] if tiny else [2, 3, 4, 5, 8, 16, 64, 200]),
        bytes_per_rank=10 ** rng.uniform(3 if tiny else 8.7, 10.3),
        disk_bytes_per_s=10 ** rng.uniform(8.5, 9.5) if tiny else 1e9,
        ranks_per_host=rng.choice([1, 2, 4, 8]),
        is_async=rng.random() < 0.4,
        with_timelines=False,
    )


@pytest.mark.parametrize("block", range(4))
def test_healthy_calls_have_no_findings(block: int) -> None:
    """1,000 calls of 1 to 200 ranks and of a kilobyte to 20 GB a rank, with noise of 20 % in every phase."""
    rng = random.Random(block)
    for number in range(125):
        seed = rng.getrandbits(32)
        job = random_job(rng)
        before = [
            simulate_save(job, seed + at) for at in range(1, rng.choice([1, 4, 11]) if job.world_size < 20 else 1)
        ]
        assert findings(simulate_save(job, seed), before) == [], (block, number, job)
        reading = rng.choice(["independent", "cooperative"])
        assert findings(simulate_load(job, seed, reading=reading)) == [], (block, number, job)


def test_ten_thousand_healthy_ranks_have_no_findings() -> None:
    assert findings(simulate_save(Job(10_000, with_timelines=False), 1)) == []
    assert findings(simulate_load(Job(10_000, with_timelines=False), 1, reading="cooperative")) == []


def straggler_of(kind: str, job: Job, ranks: tuple[int, ...], rng: random.Random) -> Straggler:
    """Returns one that costs the call at least a third of its time."""
    # Copying is six times as fast as the disk and syncing a fraction of the call, so they must slow down more to show.
    factors = {"slow_memory": (20, 40), "slow_sync": (100, 150)}
    seconds = rng.uniform(0.6, 1.0) * job.bytes_per_rank / job.disk_bytes_per_s + 0.3
    return Straggler(kind, ranks, rng.uniform(*factors.get(kind, (3.0, 6.0))), seconds)


def simulated(kind: str, is_load: bool, job: Job, seed: int, straggler: Straggler) -> dict[str, Any]:
    if is_load:
        reading = "cooperative" if kind == "shared_reading" else "independent"
        return simulate_load(job, seed, straggler=straggler, reading=reading)
    return simulate_save(job, seed, straggler=straggler)


@pytest.mark.parametrize(
    ("kind", "is_load"), [*((kind, False) for kind in KINDS_OF_SAVES), *((kind, True) for kind in KINDS_OF_LOADS)]
)
def test_a_straggler_is_named(kind: str, is_load: bool) -> None:
    rng = random.Random(kind)
    for seed in range(60):
        job = random_job(rng, tiny=False)
        rank = rng.randrange(job.world_size)
        record = simulated(kind, is_load, job, seed, straggler_of(kind, job, (rank,), rng))
        found = findings(record)
        assert found, (seed, job)
        name, phases = CALLED[kind]
        assert (found[0].kind, found[0].rank) == (name, rank), (seed, job, found)
        assert found[0].phase in phases
        assert found[0].host == f"node{rank // job.ranks_per_host}"
        assert f"rank {rank}" in found[0].text
        total_s = record["report"]["total_s"]
        assert 0.1 * total_s <= found[0].seconds <= 1.05 * total_s or kind == "late_arrival"


@pytest.mark.parametrize("kind", ["slow_storage", "slow_memory", "late_arrival"])
def test_a_slow_host_is_one_finding(kind: str) -> None:
    rng = random.Random(kind)
    for seed in range(20):
        job = Job(64, with_timelines=False)
        host = rng.randrange(8)
        ranks = tuple(range(8 * host, 8 * host + 8))
        (found,) = findings(simulated(kind, False, job, seed, straggler_of(kind, job, ranks, rng)))
        assert (found.kind, found.rank, found.host) == (CALLED[kind][0], None, f"node{host}")


def test_many_slow_ranks_are_one_finding_that_names_the_worst() -> None:
    record = simulate_save(Job(512), 1, straggler=Straggler("slow_storage", tuple(range(0, 512, 16)), 4.0))
    (found,) = findings(record)
    ended = record["ranks"]["ended_s"]
    assert found.rank == ended.index(max(ended))
    assert "31 other ranks" in found.text


@pytest.mark.parametrize("phase", ["begin", "commit", "sweep", "assemble", "global_plan"])
def test_a_phase_of_the_coordinator_is_named(phase: str) -> None:
    record = simulate_save(Job(8), 3, straggler=Straggler(phase, (), seconds=5.0))
    (found,) = findings(record)
    assert (found.kind, found.phase) == ("coordinator_phase", "plan" if phase == "global_plan" else phase)
    assert found.seconds == pytest.approx(5.0, rel=0.02)


def planned_each_time(cache: str) -> dict[str, Any]:
    return simulate_save(
        Job(8, bytes_per_rank=1e6), 1, cache=cache, straggler=Straggler("global_plan", (), seconds=1.0)
    )


def test_advice_about_plans_needs_figures() -> None:
    (off,) = findings(planned_each_time("off"))
    assert "BcpSavePlanner" in off.advice
    (first,) = findings(planned_each_time("miss"))
    assert first.advice == ""  # the first plan must be made
    (again,) = findings(planned_each_time("miss"), [planned_each_time("miss")] * 5)
    assert "6 of 6 saves made a new plan" in again.advice
    assert "planner_cache_capacity=8" in again.advice


def test_a_save_that_is_slower_than_those_before() -> None:
    job = Job(8, with_timelines=False)
    before = [simulate_save(job, seed) for seed in range(1, 8)]
    slow = simulate_save(Job(8, disk_bytes_per_s=3e8, with_timelines=False), 9)
    (found,) = findings(slow, before)
    assert (found.kind, found.phase) == ("slower_than_before", "write")
    assert "the last 7 like it" in found.text
    assert findings(slow, before[:2]) == []  # too few to tell
    assert findings(slow, [record | {"world_size": 16} for record in before]) == []
    assert findings(slow, [simulate_load(job, seed) for seed in range(8)]) == []


def test_a_background_save_that_waits_for_the_one_before() -> None:
    job = Job(4, is_async=True, with_timelines=False)
    before = simulate_save(job, 1, at=1000.0)
    record = simulate_save(job, 2, at=1000.5)
    assert findings(record, [before]) == []
    record["report"]["blocked_s"] += 2.0
    (found,) = findings(record, [before])
    assert found.kind == "blocked"
    assert "double_buffer" in found.advice
    record["config"]["on_staging_busy"] = "double_buffer"
    assert "double_buffer" not in findings(record, [before])[0].advice
    assert findings(record | {"at": 5000.0}, [before]) == []  # the one before had ended


def test_a_limit_on_the_rate() -> None:
    record = simulate_save(Job(4), 1)
    assert record["report"]["write_s"] > 1
    rate = record["ranks"]["num_bytes"][0] / record["report"]["write_s"]
    record["config"]["write_bytes_per_s"] = int(rate)
    (found,) = findings(record)
    assert (found.kind, found.phase) == ("rate_limit", "write")
    record["config"]["write_bytes_per_s"] = int(rate * 3)
    assert findings(record) == []


def test_warnings_are_findings() -> None:
    record = simulate_save(Job(4), 1)
    record["report"]["warnings"] = ["sweep: unlink(a): denied", 5]
    (found,) = findings(record)
    assert (found.kind, found.seconds) == ("warning", 0.0)
    assert found.text.endswith("sweep: unlink(a): denied")


def test_ranks_that_hold_nothing() -> None:
    """One rank saves everything, as with a state that no rank shares."""
    record = simulate_save(Job(16, with_timelines=False), 4)
    columns = record["ranks"]
    for name in ("num_bytes", "num_records"):
        columns[name] = [columns[name][0]] + [0] * 15
    for name in ("copy", "checksum", "write", "wait_slot", "flush"):
        columns["phases"][name] = [columns["phases"][name][0]] + [0.0] * 15
    columns["ended_s"] = [columns["ended_s"][0]] + [0.1] * 15
    (found,) = findings(record)
    assert (found.kind, found.rank) == ("more_bytes", 0)
    assert "the others wrote 0 bytes" in found.text


def test_a_clock_that_may_be_wrong_accuses_nobody() -> None:
    record = simulate_save(Job(8), 1, straggler=Straggler("late_arrival", (3,), seconds=1.0))
    assert findings(record)[0].kind == "late_arrival"
    for error in (0.9, None):
        record["ranks"]["clock_error_s"][3] = error
        assert [found for found in findings(record) if found.kind == "late_arrival"] == []


def test_findings_are_json() -> None:
    found = findings(simulate_save(Job(8), 1, straggler=Straggler("slow_storage", (3,), 4.0)))
    value = json.loads(json.dumps([each.to_dict() for each in found], allow_nan=False))
    assert value[0].keys() == Finding(kind="").to_dict().keys()


ODD_VALUES = [None, True, "x", -1, 1e300, float("nan"), float("inf"), 10**400, [], {}, [1], {"a": 1}, [None] * 8]


def test_damaged_records_raise_nothing() -> None:
    """Each value of a record, at every depth, is replaced and removed."""
    whole = simulate_save(Job(8, is_async=True), 1, straggler=Straggler("slow_storage", (3,), 4.0))
    whole["config"]["write_bytes_per_s"] = 10**9
    before = [simulate_save(Job(8, is_async=True), seed) for seed in range(2, 7)]
    rng = random.Random(1)
    for path in paths_in(whole):
        for odd in rng.sample(ODD_VALUES, 4):
            record = copy.deepcopy(whole)
            parent: Any = record
            for key in path[:-1]:
                parent = parent[key]
            parent[path[-1]] = odd
            findings(record, before)
            findings(whole, [record, *before])
            if isinstance(parent, dict):
                del parent[path[-1]]
                findings(record, [record])
    for odd in ({}, {"kind": "save"}, {"kind": "load", "ranks": []}):
        assert findings(odd, [odd]) == []


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Returns the places of values, of lists only the first."""
    keys = list(value) if isinstance(value, dict) else [0] if isinstance(value, list) and value else []
    found = [(*path, key) for key in keys]
    return found + [deeper for key in keys if key != "timelines" for deeper in paths_in(value[key], (*path, key))]


def test_a_column_that_does_not_fit_is_left_out() -> None:
    record = simulate_save(Job(4), 1)
    record["ranks"]["ended_s"].pop()
    record["ranks"]["phases"]["write"][1] = float("nan")
    record["ranks"]["phases"]["unknown"] = [1, 2, 3, 4]
    figures = rank_figures(record)
    assert "ended_s" not in figures.columns
    assert "write" not in figures.phases
    assert figures.phases["unknown"] == [1, 2, 3, 4]
    record["ranks"]["rank"][0] = 1
    assert rank_figures(record).ranks == []  # two ranks of one number


def test_it_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import bytecheckpoint.findings.findings"
    subprocess.run([sys.executable, "-c", code], check=True)
