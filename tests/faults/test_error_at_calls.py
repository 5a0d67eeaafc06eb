# SPDX-License-Identifier: Apache-2.0
"""Tests ENOSPC and EIO at every write, reservation, truncation, sync, rename and close of a save, and EIO at its reads.

The calls come from a recording.

If a call before the rename fails, every rank gets the reason, the old checkpoint loads, nothing of the failed save is
left, and the same process can save again. If a call after it fails, the save is committed, with an error or a warning,
and nothing is deleted.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.fork_server import ForkServer
from support.saves import Attempt, assert_only_own_files, data_files, names_in

from bytecheckpoint.errors import CheckpointError, DurabilityUnknownError, SaveFailedError, StorageError
from faults.rehearsal import NEW, NEXT, OLD, Rehearsal, Scenario, for_each, is_of_journal
from faults.strace import Call, without_ids

WRITING = ("pwrite", "fsync", "fdatasync", "fallocate", "ftruncate", "rename", "mkdir")
# The kinds of calls that each scenario tries. The other kinds would only repeat those of another scenario.
SCENARIOS = {
    Scenario("over a checkpoint"): (*WRITING, "pread", "close"),
    Scenario("over a checkpoint, without syncs", sync=False): ("close",),
    Scenario("first save", old=False): ("fsync", "mkdir", "rename"),
    Scenario("over remains", remains=True): ("fsync",),
    Scenario("several files", file_a_record=True): ("pwrite", "fsync", "ftruncate"),
    Scenario("several slots", num_rows=14_000): ("pwrite",),
    Scenario("coordinator of two", num_ranks=2): ("pwrite", "fsync", "rename"),
    Scenario("other of two", num_ranks=2, rank=1): WRITING,
}


@pytest.fixture(scope="module", params=SCENARIOS, ids=str)
def rehearsal(
    request: pytest.FixtureRequest, server: ForkServer, tmp_path_factory: pytest.TempPathFactory
) -> Rehearsal:
    return Rehearsal(request.param, server, tmp_path_factory.mktemp("rehearsal"))


@dataclass(frozen=True)
class Outcome:
    """The result that a failed call must lead to.

    Attributes:
        raised: Error on all ranks; a SaveFailedError has a StorageError as the reason of the rank that failed.
        commits: True if the new checkpoint is there.
        keeps_files: True if the rename was attempted, so nothing is deleted.
        warned: Text of the only warning.
    """

    raised: type[CheckpointError] | None = None
    commits: bool = False
    keeps_files: bool = False
    warned: str = ""


def outcome_of(rehearsal: Rehearsal, call: Call, error: str) -> Outcome:
    earlier = rehearsal.calls[: rehearsal.calls.index(call)]
    if is_of_journal(call):
        return Outcome(commits=True)  # a line of the journal is written behind the commit, and may be lost
    if call.name == "close":
        return outcome_of_close(call, earlier)
    if call.name.startswith("rename"):
        return Outcome(StorageError, keeps_files=error != "ENOSPC")  # with ENOSPC the rename surely did not happen
    if any(other.name.startswith("rename") for other in earlier):
        is_first = not any(rehearsal.comes_after_the_commit(other) for other in earlier if other.name == call.name)
        if call.name.startswith("pread"):
            return Outcome(commits=True, keeps_files=True, warned="files of older saves were not removed: ")
        if is_first:
            return Outcome(DurabilityUnknownError, commits=True, keeps_files=True)
        return Outcome(commits=True, keeps_files=True, warned="removing files of older saves failed: fsync")
    if call.name == "fallocate" and error == "EIO":
        return Outcome(commits=True)  # the file system cannot reserve space; the writes will show whether there is any
    if call.name.startswith("pread"):
        # The save reads its own data files before the commit. Only the sweep needs what was there before.
        return Outcome(StorageError) if ".distcp" in call.files else Outcome(commits=True)
    if ".tmp" in call.files:
        return Outcome(StorageError)
    if any(other.name.startswith(("fallocate", "pwrite")) and ".distcp" in other.files for other in (*earlier, call)):
        return Outcome(SaveFailedError)
    if has_begun(earlier):
        return Outcome(commits=True)  # the sweep before the save; the next sweep removes what this one cannot
    return Outcome(StorageError)


def has_begun(calls: list[Call]) -> bool:
    """Whether the save has the right to commit. Before, it looks at the tmp of one that died."""
    return any(call.name == "flock" and ".tmp" in call.files for call in calls)


def outcome_of_close(call: Call, earlier: list[Call]) -> Outcome:
    """Returns what a failed close leads to: it may be the first to report a loss of unsynced data, or is harmless."""
    was_closed = any(other.name == "close" and other.files == call.files for other in earlier)
    if ".distcp" in call.files and not was_closed:
        return Outcome(SaveFailedError)  # even if the file has been synced
    if ".tmp" in call.files:
        return Outcome(StorageError)  # the flush before others are looked for, or that of the metadata
    return Outcome(commits=True)


def assert_is_told(outcome: Outcome, attempt: Attempt, call: Call, error: str, root: Path, rank: int) -> None:
    if outcome.raised is None:
        assert attempt.errors == {}
        return
    (told,) = attempt.errors.values()
    assert type(told) is outcome.raised
    if isinstance(told, SaveFailedError):
        assert "undone" in str(told)
        assert list(told.reasons) == [rank]
        told = told.reasons[rank]
    assert isinstance(told, StorageError)
    assert told.errno == getattr(errno, error)
    assert without_ids(str(Path(told.path).relative_to(root))) in call.files.split(", ")
    assert told.path in str(told)


def fail_and_look(rehearsal: Rehearsal, root: Path, call: Call, error: str, outcome: Outcome) -> None:
    path = rehearsal.path(rehearsal.copy(root))
    old_names = [".metadata", *data_files(path)] if rehearsal.scenario.old else []
    names_before = names_in(path)
    with rehearsal.failing(root, call, error) as attempts:
        for attempt in attempts:
            assert_is_told(outcome, attempt, call, error, root, rehearsal.scenario.rank)
        warnings = [text for attempt in attempts for text in attempt.warnings]
        assert len(warnings) == bool(outcome.warned)
        assert all(outcome.warned in text for text in warnings)
        before = OLD if rehearsal.scenario.old else None
        assert rehearsal.generation_on_disk(root) == (NEW if outcome.commits else before)
        if outcome.keeps_files:
            assert set(old_names) < set(names_in(path))
            assert not any(name.endswith(".tmp") for name in names_in(path))
        elif outcome.commits:
            assert_only_own_files(path)
        else:
            earlier = rehearsal.calls[: rehearsal.calls.index(call)] if call in rehearsal.calls else rehearsal.calls
            # Once it has begun, it has also swept what was there.
            assert names_in(path) == (sorted(old_names) if has_begun(earlier) else names_before)
    assert rehearsal.generation_on_disk(root) == NEXT
    assert_only_own_files(path)


def points_of(rehearsal: Rehearsal) -> list[Call]:
    calls = [call for call in rehearsal.calls if call.name.startswith(SCENARIOS[rehearsal.scenario])]
    # A save does not write to directories, so only the long form tests that a failed close of one is harmless.
    return [call for call in calls if call.name != "close" or ".metadata" in call.files or ".distcp" in call.files]


def test_nothing_is_missed(rehearsal: Rehearsal) -> None:
    """Every call that writes can be made to fail, and the recording has such calls for every file of the save."""

    def files(kind: str) -> set[str]:
        return {call.files for call in rehearsal.calls if call.name.startswith(kind) and "*" in call.files}

    scenario = rehearsal.scenario
    assert [call for call in rehearsal.left_out if call.name.startswith(WRITING) and not is_of_journal(call)] == []
    assert len(files("ftruncate")) == (3 if scenario.file_a_record else 1) + (scenario.rank == 0)
    assert files("pwrite") == files("ftruncate")
    if scenario.sync:
        assert files("fsync") == files("pwrite")
    else:
        # Instead the save closes each file, or a copy of its descriptor, before the commit.
        assert files("fsync") == set()
        assert {call.files for call in points_of(rehearsal) if "*" in call.files} == files("pwrite")


@pytest.mark.parametrize("error", ["ENOSPC", "EIO"])
def test_error_at_calls(error: str, rehearsal: Rehearsal, tmp_path: Path) -> None:
    points = [call for call in points_of(rehearsal) if error == "EIO" or not call.name.startswith("pread")]

    def trial(call: Call) -> None:
        outcome = outcome_of(rehearsal, call, error)
        fail_and_look(rehearsal, tmp_path / str(points.index(call)), call, error, outcome)

    for_each(points, trial)


@pytest.mark.parametrize("number", [1, 2])
def test_error_in_any_of_several_threads(number: int, server: ForkServer, tmp_path: Path) -> None:
    """Two threads make four writes; the first, or the second, write of each thread fails."""
    scenario = Scenario("several threads", io_threads=2, num_rows=14_000)
    rehearsal = Rehearsal(scenario, server, tmp_path / "rehearsal")
    call = Call("pwrite64", number, thread=1, files="new/ckpt/__0_0.*.distcp")
    fail_and_look(rehearsal, tmp_path / "root", call, "EIO", Outcome(SaveFailedError))


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_error_at_every_call(rehearsal: Rehearsal, tmp_path: Path) -> None:
    """Calls that only read fail too: the old checkpoint is there with an error, or the new; the next save succeeds."""

    def trial(call: Call) -> None:
        root = rehearsal.copy(tmp_path / str(rehearsal.calls.index(call)))
        names_before = names_in(rehearsal.path(root))
        with rehearsal.failing(root, call, "EIO") as attempts:
            errors = [error for attempt in attempts for error in attempt.errors.values()]
            assert len(errors) in (0, len(attempts))
            assert len({type(error) for error in errors}) <= 1
            assert all(isinstance(error, CheckpointError) for error in errors)
            fails = errors and type(errors[0]) is not DurabilityUnknownError
            before = OLD if rehearsal.scenario.old else None
            assert rehearsal.generation_on_disk(root) == (before if fails else NEW), errors
            assert {name for name in names_in(rehearsal.path(root)) if name.endswith(".tmp")} <= set(names_before)
        assert rehearsal.generation_on_disk(root) == NEXT
        assert_only_own_files(rehearsal.path(root))

    for_each(rehearsal.calls, trial)
