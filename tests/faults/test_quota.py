# SPDX-License-Identifier: Apache-2.0
"""Tests saves of a user, a project or a subvolume whose quota is used up before or during the save.

Every rank gets the error, the old checkpoint stays, the save gives back what it took, and once there is room again the
same processes save the next generation.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from support.campaign import IS_LONG, Campaign
from support.fork_server import ForkServer, Meeting
from support.saves import BOTH_RANKS, Attempt, SaveRequest, assert_only_own_files, generation_on_disk, names_in

from bytecheckpoint.errors import SaveFailedError, StorageError
from faults.quotas import KINDS, Quota
from faults.unprivileged import save_as_nobody, save_twice_as_nobody

OLD, NEW, NEXT = 1, 2, 3
KIB = 1024
# A save takes some 240 KiB, most of it in its data file. For a rename btrfs needs 512 KiB more.
ROOMS_KIB = (*range(0, 400, 8), *range(400, 2000, 100)) if IS_LONG else (0, 100, 400, 2000)
# A file system may keep so much for the names of files that have been there.
SLACK_BYTES = 32 * KIB


@pytest.fixture(params=KINDS)
def quota(request: pytest.FixtureRequest, home: Path) -> Iterator[Quota]:
    quota = Quota(request.param, home)
    yield quota
    quota.close()


@contextmanager
def limited_save(
    server: ForkServer, quota: Quota, room_bytes: int | None, num_files: int = 0, *, num_ranks: int = 1, **writer: bool
) -> Iterator[StorageError | None]:
    """Saves over a checkpoint, with a quota of ``room_bytes`` and ``num_files`` above what is used.

    Yields the error that every rank got, after checking that the save is undone; None if the new checkpoint is there.
    When the context ends, the limit ends too, and the same processes save the next generation.
    """
    path = quota.path / "ckpt"
    ranks = BOTH_RANKS[:num_ranks]
    assert server.run(save_as_nobody, SaveRequest(path, OLD)).unwrap() == Attempt({}, ())
    names, used_bytes = names_in(path), quota.used_bytes()
    store = quota.path.parent.with_name("store")
    store.unlink(missing_ok=True)
    with closing(Meeting()) as meeting:
        pids = []
        for rank in ranks:
            first = SaveRequest(path, NEW, rank, num_ranks, str(store), writer=writer)
            pids.append(server.start(save_twice_as_nobody, meeting.address, first, replace(first, generation=NEXT)))
        processes = [meeting.accept() for _ in ranks]
    for process in processes:
        assert Meeting.receive(process) == "ready"
    quota.limit(None if room_bytes is None else used_bytes + room_bytes, num_files and quota.num_files() + num_files)
    for process in processes:
        process.send("go")
    attempts = [Meeting.receive(process) for process in processes]
    errors = [error for attempt in attempts for error in attempt.errors.values()]
    if errors:
        assert len({(type(error), str(error)) for error in errors}) == 1, errors
        assert len(errors) == num_ranks
        assert names_in(path) == names
        assert quota.used_bytes() <= used_bytes + SLACK_BYTES, "space is not given back"
        assert generation_on_disk(path) == OLD
        error = next(iter(errors[0].reasons.values())) if isinstance(errors[0], SaveFailedError) else errors[0]
        assert isinstance(error, StorageError), repr(error)
        yield error
    else:
        assert generation_on_disk(path, ranks) == NEW
        yield None
    quota.limit(None)
    for process in processes:
        process.send("go")
    for pid in pids:
        assert server.wait(pid).unwrap() == Attempt({}, ())
    assert generation_on_disk(path, ranks) == NEXT
    assert_only_own_files(path)
    shutil.rmtree(path)


@pytest.mark.parametrize("one_file", [True, False], ids=["one file", "a file a record"])
@pytest.mark.timeout(1200)
def test_bytes(one_file: bool, quota: Quota, server: ForkServer, campaign: Campaign) -> None:
    outcomes = set()
    for room in ROOMS_KIB:
        with limited_save(server, quota, room * KIB, single_file_per_rank=one_file) as error:
            outcomes.add(error is None)
            if error:
                assert error.errno in quota.kind.errnos, error
                campaign.covered[f"at {str(error).partition('(')[0].rpartition(' ')[2]}"] += 1
    assert outcomes == {False, True}


def test_files(quota: Quota, server: ForkServer) -> None:
    """The quota allows too few files for the data files of a save."""
    if not quota.kind.limits:
        pytest.skip("NUMBERS OF FILES NOT LIMITED: btrfs cannot")
    for num_files in (1, 2):
        with limited_save(server, quota, None, num_files, single_file_per_rank=False) as error:
            assert error
            assert error.errno in quota.kind.errnos
            assert "create" in str(error)


def test_several_ranks(quota: Quota, server: ForkServer) -> None:
    """The first rank that asks for space gets what there is."""
    with limited_save(server, quota, 300 * KIB, num_ranks=2) as error:
        assert error
        assert error.errno in quota.kind.errnos
