# SPDX-License-Identifier: Apache-2.0
"""Tests power cuts during a save and right after it, on real file systems that then forget all that is not durable.

The loss is real: on the same disks, saves that do not sync are gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.campaign import IS_LONG, Campaign
from support.fork_server import ForkServer
from support.jobs import Job, run_job
from support.mounts import DISKS, Disk, cut_power, save_then_cut
from support.saves import SaveRequest, assert_only_own_files, generation_on_disk
from torch.distributed.checkpoint.api import CheckpointException

from bytecheckpoint import BcpWriter, Config, read, verify
from faults.points import CASES, Case, Start, prepare
from faults.rehearsal import NEW, NEXT, OLD

# The points where it changes what is durable. The long form has all others, and other beginnings.
ALWAYS = (
    Case("begin_directory_made", start=Start.NOTHING, hit=2),
    Case("write_files_synced", start=Start.NOTHING),
    Case("commit_metadata_synced"),
    Case("commit_renamed", survives=NEW),
    Case("commit_directory_synced", survives=NEW),
    Case("sweep_file_removed", survives=NEW),
)
NUM_RANKS = (1, 2)


@pytest.fixture(scope="module", params=DISKS)
def disk(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disk]:
    disk = Disk(request.param, tmp_path_factory.mktemp("disk"))
    yield disk
    disk.close()


@pytest.fixture
def root(disk: Disk, request: pytest.FixtureRequest) -> Path:
    """Returns a path on the disk that only this test uses, and that does not exist yet."""
    return disk.path / request.node.name


def save_next(server: ForkServer, path: Path, num_ranks: int) -> None:
    """Saves again: the path must be free, and what was lost or left must not disturb the save."""
    run_job(server, SaveRequest(path, NEXT), num_ranks)
    assert generation_on_disk(path, tuple(range(num_ranks))) == NEXT
    assert_only_own_files(path)


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
@pytest.mark.parametrize("start", [Start.NOTHING, Start.CHECKPOINT], ids=lambda start: start.value)
def test_what_was_saved_stays(
    start: Start, num_ranks: int, disk: Disk, root: Path, server: ForkServer, failpoint_server: ForkServer
) -> None:
    path = root / "new" / "ckpt"
    prepare(start, path, server, failpoint_server, num_ranks)
    job = Job(server, SaveRequest(path, NEW), num_ranks, function=save_then_cut, arguments=(disk.path,))
    for outcome in job.wait():
        assert outcome.unwrap().errors == {}
    disk.power_returns()
    assert generation_on_disk(path, job.ranks) == NEW
    save_next(server, path, num_ranks)


def cut_at(
    case: Case,
    num_ranks: int,
    disk: Disk,
    path: Path,
    server: ForkServer,
    failpoint_server: ForkServer,
    *,
    sync: bool = True,
) -> None:
    """Cuts the power when a save has reached the point of ``case``."""
    prepare(case.start, path, server, failpoint_server, num_ranks)
    stops = num_ranks - 1 if case.is_of_every_rank else 0
    request = case.request(path)
    request = replace(request, writer={**request.writer, "sync_files": sync})
    job = Job(failpoint_server, request, num_ranks, env={stops: case.env("=stop")})
    assert job.stops(stops), f"{case} was not reached: {job.wait()}"
    cut_power(disk.path)
    job.kill(job.ranks)
    job.wait()
    disk.power_returns()


def link_then_cut(run: str, disk: Path, sync_first: bool) -> int:
    """Saves two steps, the second one with links to the first, and cuts the power. Returns the bytes linked."""
    for step, sync in ((1, sync_first), (2, True)):
        writer = BcpWriter(f"{run}/step-{step}", sync_files=sync, config=Config(link_unchanged=True))
        state = {"base": torch.arange(300_000), "adapter": torch.full((1000,), float(step))}
        dcp.save(state, storage_writer=writer, no_dist=True)
    cut_power(disk)
    assert writer.last_report is not None
    return writer.last_report.bytes_linked


@pytest.mark.parametrize("sync_first", [True, False])
def test_what_was_linked_stays(sync_first: bool, disk: Disk, root: Path, server: ForkServer) -> None:
    """Also if the save that wrote it did not sync."""
    root.mkdir()
    assert server.run(link_then_cut, str(root), disk.path, sync_first).unwrap() > 300_000 * 8
    disk.power_returns()
    for step in (1, 2) if sync_first else (2,):
        verify(root / f"step-{step}").raise_if_damaged()
        found = read(root / f"step-{step}")
        assert torch.equal(found["base"], torch.arange(300_000))
        assert torch.equal(found["adapter"], torch.full((1000,), float(step)))


# Both saves are committed, and only their own syncs have run: a sweep syncs only before it removes something.
@pytest.mark.parametrize(
    "case",
    [Case("commit_done", survives=NEW, start=Start.NOTHING), Case("sweep_listed", survives=NEW, hit=2)],
    ids=str,
)
def test_loss_is_seen(case: Case, disk: Disk, root: Path, server: ForkServer, failpoint_server: ForkServer) -> None:
    """A save without syncs is lost where the same save with syncs is there, so the tests here would see a loss."""
    found = []
    for sync in (True, False):
        path = root / str(sync) / "ckpt"
        cut_at(case, 1, disk, path, server, failpoint_server, sync=sync)
        try:
            found.append(generation_on_disk(path))
        except (AssertionError, CheckpointException):
            found.append(None)  # not even whole
    assert found[0] == NEW
    assert found[1] != NEW, "nothing was lost"


def may_be_found(case: Case) -> tuple[int | None, ...]:
    if case.point == "commit_renamed":  # the rename is not synced yet, so either is right
        return (replace(case, survives=OLD).found_after, NEW)
    return (case.found_after,)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_power_cut(
    num_ranks: int, disk: Disk, root: Path, server: ForkServer, failpoint_server: ForkServer, campaign: Campaign
) -> None:
    of_all = [case for case in CASES if num_ranks == 1 or not case.file_a_record]  # rank 1 has only one tensor
    always = ALWAYS[num_ranks - 1 :: len(NUM_RANKS)]  # one rank saves half of the cases, two ranks the others
    for case in of_all if IS_LONG else always:
        path = root / str(case) / "ckpt"
        cut_at(case, num_ranks, disk, path, server, failpoint_server)
        found = generation_on_disk(path, tuple(range(num_ranks)))
        assert found in may_be_found(case), case
        save_next(server, path, num_ranks)
        campaign.covered["points"] += 1
        campaign.covered["found new" if found == NEW else "found old" if found == OLD else "found nothing"] += 1
