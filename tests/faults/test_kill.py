# SPDX-License-Identifier: Apache-2.0
"""SIGKILL at every named point of a save: what is on disk is the old checkpoint or the new one, and the path is free.

Every case says at which hit of its point the process dies, and which generation must then load. A point that is not
reached lets the save end normally, which fails the case.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from faults.fork_server import ForkServer, Outcome
from faults.saves import (
    BOTH_RANKS,
    SaveRequest,
    assert_only_own_files,
    generation_on_disk,
    names_in,
    save,
    save_then_look,
)

OLD, NEW, NEXT = 1, 2, 3

BEFORE_COMMIT = (
    "begin_directory",
    "begin_tmp_created",
    "begin_locked",
    "begin_done",
    "write_file_created",
    "write_data",
    "write_data_done",
    "write_files_synced",
    "write_directory_synced",
    "commit_checked",
    "commit_metadata_written",
    "commit_metadata_synced",
)
AFTER_COMMIT = ("commit_renamed", "commit_directory_synced", "commit_done")
WRITES = tuple(name for name in BEFORE_COMMIT if name.startswith("write_"))


@dataclass(frozen=True)
class Case:
    """Death at the ``hit``-th hit of ``point``.

    Attributes:
        survives: Generation that must load afterwards.
        leftovers: An earlier save was killed too, so that the sweep at begin has a tmp and data files to remove.
        file_a_record: Several files and slots, so that points in a loop are hit in the middle of it.
    """

    point: str
    survives: int = OLD
    hit: int = 1
    leftovers: bool = False
    file_a_record: bool = False

    def __str__(self) -> str:
        return f"{self.point}:{self.hit}" + "-leftovers" * self.leftovers + "-file_a_record" * self.file_a_record


CASES = (
    *(Case(point) for point in BEFORE_COMMIT),
    *(Case(point, survives=NEW) for point in AFTER_COMMIT),
    # A sweep runs twice: at begin, and after the commit. At begin there is something to remove only after a death.
    Case("sweep_listed"),
    Case("sweep_listed", leftovers=True),
    Case("sweep_tmp_removed", leftovers=True),
    Case("sweep_directory_synced", leftovers=True),
    Case("sweep_file_removed", leftovers=True),
    Case("sweep_listed", survives=NEW, hit=2),
    Case("sweep_directory_synced", survives=NEW),
    Case("sweep_directory_synced", survives=NEW, hit=2, leftovers=True),
    Case("sweep_file_removed", survives=NEW),
    Case("write_file_created", hit=3, file_a_record=True),
    Case("write_data", hit=2, file_a_record=True),
    Case("sweep_file_removed", survives=NEW, hit=2, file_a_record=True),
)
# A first save has nothing to sweep: only the listing is reached.
FIRST_CASES = (
    *(case for case in CASES if not case.leftovers and not case.point.startswith("sweep_")),
    Case("sweep_listed"),
    Case("sweep_listed", survives=NEW, hit=2),
)


def kill_at(case: Case) -> dict[str, str]:
    return {"BCP_FAILPOINT": f"{case.point}:{case.hit}"}


def ranks_of(request: SaveRequest, store: Path) -> list[SaveRequest]:
    return [replace(request, rank=rank, num_ranks=2, store=str(store)) for rank in BOTH_RANKS]


def run_both(server: ForkServer, requests: Sequence[SaveRequest]) -> list[Outcome]:
    pids = [server.start(save, request) for request in requests]
    return [server.wait(pid) for pid in pids]


def assert_saved(outcomes: Sequence[Outcome]) -> None:
    for outcome in outcomes:
        assert outcome.unwrap().errors == {}


def leave_remains(failpoint_server: ForkServer, request: SaveRequest) -> None:
    """Of a save that dies when its files are complete: a tmp and its data files."""
    before = names_in(request.path)
    assert failpoint_server.run(save, request, env=kill_at(Case("commit_checked"))).was_killed
    assert len(names_in(request.path)) >= len(before) + 2


def test_every_point_has_a_case(failpoint_server: ForkServer) -> None:
    assert {case.point for case in CASES} == set(failpoint_server.info["failpoints"])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kill_over_a_checkpoint(case: Case, failpoint_server: ForkServer, server: ForkServer, tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    request = SaveRequest(path, NEW, writer={"single_file_per_rank": not case.file_a_record})
    assert_saved([server.run(save, replace(request, generation=OLD))])
    if case.leftovers:
        leave_remains(failpoint_server, replace(request, generation=77))
    outcome = failpoint_server.run(save, request, env=kill_at(case))
    assert outcome.was_killed, f"{case} was not reached: {outcome}"
    assert generation_on_disk(path) == case.survives
    assert_saved([server.run(save, replace(request, generation=NEXT))])
    assert generation_on_disk(path) == NEXT
    assert_only_own_files(path)


@pytest.mark.parametrize("case", FIRST_CASES, ids=str)
def test_kill_in_the_first_save(case: Case, failpoint_server: ForkServer, server: ForkServer, tmp_path: Path) -> None:
    path = tmp_path / "new" / "ckpt"
    # overwrite=False commits by another system call.
    request = SaveRequest(path, NEW, writer={"single_file_per_rank": not case.file_a_record, "overwrite": False})
    outcome = failpoint_server.run(save, request, env=kill_at(case))
    assert outcome.was_killed, f"{case} was not reached: {outcome}"
    assert generation_on_disk(path) == (NEW if case.survives == NEW else None)
    assert_saved([server.run(save, SaveRequest(path, NEXT))])
    assert generation_on_disk(path) == NEXT
    assert_only_own_files(path)


@pytest.mark.parametrize("case", [case for case in CASES if not case.file_a_record], ids=str)
def test_kill_the_coordinator_of_two(
    case: Case, failpoint_server: ForkServer, server: ForkServer, tmp_path: Path
) -> None:
    path = tmp_path / "ckpt"
    assert_saved(run_both(server, ranks_of(SaveRequest(path, OLD), tmp_path / "store1")))
    if case.leftovers:
        leave_remains(failpoint_server, SaveRequest(path, 77))
    requests = ranks_of(SaveRequest(path, NEW), tmp_path / "store2")
    dies = failpoint_server.start(save, requests[0], env=kill_at(case))
    lives = failpoint_server.start(save, requests[1])
    outcome = failpoint_server.wait(dies)
    assert outcome.was_killed, f"{case} was not reached: {outcome}"
    peer = failpoint_server.wait(lives)
    assert not peer.timed_out, f"the other rank hangs:\n{peer.stacks}"
    assert generation_on_disk(path, BOTH_RANKS) == case.survives
    assert_saved(run_both(server, ranks_of(SaveRequest(path, NEXT), tmp_path / "store3")))
    assert generation_on_disk(path, BOTH_RANKS) == NEXT
    assert_only_own_files(path)


@pytest.mark.parametrize("point", WRITES)
def test_kill_the_other_of_two(point: str, failpoint_server: ForkServer, server: ForkServer, tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    assert_saved(run_both(server, ranks_of(SaveRequest(path, OLD), tmp_path / "store1")))
    requests = ranks_of(SaveRequest(path, NEW), tmp_path / "store2")
    lives = failpoint_server.start(save_then_look, requests[0])
    outcome = failpoint_server.run(save, requests[1], env=kill_at(Case(point)))
    assert outcome.was_killed, f"{point} was not reached: {outcome}"
    tmps = failpoint_server.wait(lives).unwrap()
    assert tmps == [], "a coordinator that lives on, after its peer died, holds the path"
    assert generation_on_disk(path, BOTH_RANKS) == OLD
    assert_saved(run_both(server, ranks_of(SaveRequest(path, NEXT), tmp_path / "store3")))
    assert generation_on_disk(path, BOTH_RANKS) == NEXT
    assert_only_own_files(path)
