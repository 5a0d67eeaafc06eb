# SPDX-License-Identifier: Apache-2.0
"""Tests ranks on one host that see different disks at one path, as containers do.

The save fails on all ranks, and the error names the rank whose disk differs. Nothing is committed on either disk, and
the checkpoint that some ranks see stays.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from support.fork_server import LIMIT_S, ForkServer
from support.jobs import Job, run_job
from support.mounts import mount_for_this_process
from support.saves import Attempt, SaveRequest, assert_only_own_files, generation_on_disk, names_in, save

from bytecheckpoint.errors import SaveFailedError, StorageError

OLD, NEW, NEXT = 1, 2, 3


@pytest.fixture(scope="module", autouse=True)
def namespaces() -> None:
    tried = subprocess.run(
        ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if tried.returncode != 0:
        pytest.skip(f"RANKS WITH MOUNTS OF THEIR OWN NOT TESTED: {tried.stderr.strip()}")


def save_on_own_disk(at: Path, request: SaveRequest) -> tuple[Attempt, list[str]]:
    """Saves on a disk of its own. Returns the result, and the names that this rank sees at the path."""
    mount_for_this_process("-t", "tmpfs", "-o", "size=8m", "none", str(at))
    return save(request), names_in(request.path)


def save_and_look(at: Path, request: SaveRequest) -> tuple[Attempt, list[str]]:
    return save(request), names_in(request.path)


@pytest.mark.parametrize(
    ("old", "disk", "num_ranks", "alone"),
    [
        (True, "ckpt", 2, 1),
        (True, "", 2, 1),
        (True, "", 2, 0),
        (False, "ckpt", 4, 2),
        (False, "", 2, 1),
        (False, "", 2, 0),
    ],
)
def test_rank_with_a_disk_of_its_own(
    old: bool, disk: str, num_ranks: int, alone: int, server: ForkServer, tmp_path: Path
) -> None:
    """
    Args:
        disk: The mount point, below the parent of the checkpoint.
    """
    path = tmp_path / "shared" / "ckpt"
    path.mkdir(parents=True)
    if old:
        run_job(server, SaveRequest(path, OLD))
    elif not disk:
        path.rmdir()
    before = names_in(path)
    job = Job(
        server,
        SaveRequest(path, NEW),
        num_ranks,
        function=save_and_look,
        function_of={alone: save_on_own_disk},
        arguments=(tmp_path / "shared" / disk,),
    )
    outcomes = [outcome.unwrap() for outcome in job.wait()]
    errors = [error for attempt, _ in outcomes for error in attempt.errors.values()]
    assert len(errors) == num_ranks
    assert len({(type(error), str(error)) for error in errors}) == 1, errors
    assert isinstance(errors[0], (StorageError, SaveFailedError))
    assert "the path is not shared between the ranks" in str(errors[0])
    # If the coordinator is alone, the error names the others, because it does not see them.
    named = alone or 1
    if disk or (old and alone == 0):
        assert f"does not see what was written by rank {named} to {path}" in str(errors[0])
    else:
        assert f"rank {named} does not see the directory" in str(errors[0])
    for rank, (_, names) in enumerate(outcomes):
        if rank == alone:
            assert not any(name.startswith(".metadata") for name in names)
        elif alone != 0:
            assert names == before
    assert generation_on_disk(path) == (OLD if old else None)
    run_job(server, SaveRequest(path, NEXT), num_ranks)
    assert generation_on_disk(path, job.ranks) == NEXT
    assert_only_own_files(path)
