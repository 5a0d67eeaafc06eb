# SPDX-License-Identifier: Apache-2.0
"""Tests prunes that die at a system call, or whose deletions fail: what loads is whole, and a later prune goes on.

strace records the calls that a prune makes on the run folder. The calls that change something are always tried, the
others with BCP_LONG=1 (``make torture``).
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from support.campaign import IS_LONG
from support.fork_server import ForkServer, Meeting
from support.mounts import mounted
from support.saves import Attempt, SaveRequest, generation_on_disk, save
from torch.distributed.checkpoint.planner import WriteItemType

from bytecheckpoint import Retention, RetentionReport
from bytecheckpoint.errors import CheckpointBusyError
from faults.paused_saves import save_paused
from faults.pruning import KEPT, make_run, prune_as_nobody, prune_when_told, save_template, states_in
from faults.rehearsal import for_each, one_of_each, spread
from faults.strace import Call, calls_in, injected, recorded, wait_until_stopped
from faults.unprivileged import NOBODY

REMOVING = ("unlink",)  # and unlinkat, which also removes folders
# Calls that change the disk, or are a step of the protocol.
CHANGING = (*REMOVING, "fsync", "flock")


class Pruned:
    """A run folder, and the calls that a prune makes on it."""

    def __init__(self, server: ForkServer, directory: Path) -> None:
        self._server = server
        self._template = directory / "template"
        server.run(save_template, SaveRequest(self._template, 1)).unwrap()
        root = self.copy(directory / "recorded")
        log = directory / "log"
        with self._started(root) as (pid, process), recorded(pid, log):
            process.send("go")
            report = server.wait(pid).unwrap()
        assert (report.warnings, states_in(root)) == ([], {KEPT: "complete"})
        self.calls = [call for call in calls_in(log, root, pid) if call.files and not call.thread]

    def copy(self, root: Path) -> Path:
        make_run(root, self._template)
        return root

    def kill(self, root: Path, call: Call) -> None:
        with self._started(root) as (pid, process):
            with injected(pid, root.with_suffix(".log"), call.name, "signal=KILL", call.number):
                process.send("go")
                outcome = self._server.wait(pid)
            assert outcome.was_killed, f"it ends otherwise: {outcome}"

    def fail(self, root: Path, call: Call, error: str) -> RetentionReport:
        with self._started(root) as (pid, process):
            with injected(pid, root.with_suffix(".log"), call.name, f"error={error}", call.number):
                process.send("go")
                report: RetentionReport = self._server.wait(pid).unwrap()
            return report

    def stop_once(self, root: Path, call: Call, meanwhile: Callable[[], None]) -> RetentionReport:
        """Calls ``meanwhile`` right after the prune has made ``call``, before it makes another."""
        log = root.with_suffix(".log")
        with self._started(root) as (pid, process):
            with injected(pid, log, call.name, "signal=STOP", call.number):
                process.send("go")
                wait_until_stopped(log)
                meanwhile()
                os.kill(pid, signal.SIGCONT)
                report: RetentionReport = self._server.wait(pid).unwrap()
            return report

    @contextmanager
    def _started(self, root: Path) -> Iterator[tuple[int, Connection]]:
        with closing(Meeting()) as meeting:
            pid = self._server.start(prune_when_told, meeting.address, root)
            process = meeting.accept()
            assert meeting.receive(process) == "ready"
            yield pid, process


@pytest.fixture(scope="module")
def pruned(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Pruned:
    return Pruned(server, tmp_path_factory.mktemp("pruned"))


def is_of(call: Call, names: tuple[str, ...]) -> bool:
    return call.name.startswith(names)


def assert_what_loads_is_whole(root: Path) -> None:
    states = states_in(root)
    assert states[KEPT] == "complete"
    assert states.get(1, "half") in ("complete", "half"), states
    assert states.get(2, "half") == "half", states
    report = Retention(root, keep_latest=1).prune()
    assert report.warnings == []
    assert states_in(root) == {KEPT: "complete"}


def test_marks_go_first_and_that_is_synced(pruned: Pruned) -> None:
    """A power loss may then undo later deletions, but cannot bring back a mark without its files."""
    calls = [call for call in pruned.calls if is_of(call, CHANGING)]
    at = {f"{call.name} {call.files}": place for place, call in enumerate(calls)}
    mark = next(place for key, place in at.items() if key.startswith("unlink") and key.endswith("step-1/.metadata"))
    of_step = [place for place, call in enumerate(calls) if "step-1" in call.files and is_of(call, REMOVING)]
    assert min(of_step) == mark
    synced = [place for place, call in enumerate(calls) if call.name == "fsync" and call.files == "step-1"]
    assert any(mark < place < sorted(of_step)[1] for place in synced), "not synced before anything else goes"
    for kept in (".", f"step-{KEPT}"):
        assert any(call.name == "fsync" and call.files == kept for call in calls[:mark]), f"{kept} is not synced before"
    tmp = max(place for place in of_step if ".tmp" in calls[place].files)
    assert [calls[place].files for place in of_step if place > tmp] == ["step-1"]


def test_kill_at_what_changes(pruned: Pruned, tmp_path: Path) -> None:
    points = [call for call in pruned.calls if is_of(call, REMOVING)]
    points += one_of_each(call for call in pruned.calls if not is_of(call, REMOVING))
    points += [call for call in pruned.calls if "tmp" in call.files and call not in points][:6]
    for_each(points, lambda call: kill_and_look(pruned, tmp_path / str(points.index(call)), call))


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_kill_at_every_call(pruned: Pruned, tmp_path: Path) -> None:
    points = pruned.calls
    for_each(points, lambda call: kill_and_look(pruned, tmp_path / str(points.index(call)), call))
    print(f"{len(points)} points")


def kill_and_look(pruned: Pruned, root: Path, call: Call) -> None:
    pruned.kill(pruned.copy(root), call)
    assert_what_loads_is_whole(root)


def fail_and_look(pruned: Pruned, root: Path, call: Call, error: str) -> None:
    report = pruned.fail(pruned.copy(root), call, error)
    assert report.warnings, "nobody is told"
    assert any(os.strerror(getattr(errno, error)) in warning for warning in report.warnings), report.warnings
    assert_what_loads_is_whole(root)


def test_deletes_that_fail(pruned: Pruned, tmp_path: Path) -> None:
    points = [call for call in pruned.calls if is_of(call, REMOVING)]
    errors = ("EACCES", "EBUSY", "EROFS", "EIO")

    def trial(call: Call) -> None:
        number = points.index(call)
        fail_and_look(pruned, tmp_path / str(number), call, errors[number % len(errors)])

    for_each(points, trial)


def test_a_sync_that_fails_stops_the_deletion(pruned: Pruned, tmp_path: Path) -> None:
    syncs = [call for call in pruned.calls if call.name == "fsync"]
    for_each(syncs, lambda call: fail_and_look(pruned, tmp_path / str(syncs.index(call)), call, "EIO"))
    root = pruned.copy(tmp_path / "before")
    report = pruned.fail(root, syncs[0], "EIO")
    assert (report.removed, report.swept) == ([], [])
    assert states_in(root) == {1: "complete", 2: "half", KEPT: "complete"}


def test_on_a_full_disk(pruned: Pruned, tmp_path: Path) -> None:
    """A full disk has no room for a tmp, and a full disk is why somebody prunes."""
    root = pruned.copy(tmp_path / "run")
    # The call that creates the tmp of step 1, which has none before.
    creating = next(
        call for call in pruned.calls if call.name.startswith("open") and "step-1/.metadata.*.tmp" in call.files
    )
    report = pruned.fail(root, creating, "ENOSPC")
    assert report.warnings == []
    assert states_in(root) == {KEPT: "complete"}


@pytest.mark.parametrize("swapped", ["step-1", "step-1/hf", "."])
def test_a_folder_that_turns_into_a_link(pruned: Pruned, tmp_path: Path, swapped: str) -> None:
    """The folder turns into a link after each call of the prune. What the link leads to looks the same, and stays."""
    outside = pruned.copy(tmp_path / "outside")
    before = sorted(outside.rglob("*"))
    # Starts at the call with which the removal of step 1 opens it. The run folder is open by then.
    begun = next(at for at, call in enumerate(pruned.calls) if is_of(call, ("flock",)))
    opens = max(at for at, call in enumerate(pruned.calls[:begun]) if call.files == "step-1")
    points = [call for call in pruned.calls[opens:] if call.files.startswith("step-1")]
    if swapped == "." or not IS_LONG:
        points = spread(points, 12 if swapped == "." else 24)

    def trial(call: Call) -> None:
        place = points.index(call)
        root = pruned.copy(tmp_path / str(place))

        def swap() -> None:
            if (root / swapped).exists():
                (root / swapped).rename(tmp_path / f"{place} moved")
                (root / swapped).symlink_to(outside / swapped)

        pruned.stop_once(root, call, swap)
        assert sorted(outside.rglob("*")) == before

    for_each(points, trial)


def test_what_is_mounted_in_a_folder_stays(pruned: Pruned, tmp_path: Path) -> None:
    """It stays even if it is a folder of the same file system."""
    root = pruned.copy(tmp_path / "run")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "precious").touch()
    mount = root / "step-1" / "hf" / "mount"
    with mounted(mount, "--bind", str(tmp_path / "outside"), untested="MOUNTS IN STEP FOLDERS"):
        report = Retention(root, keep_latest=1).prune()
        assert report.warnings == ["step-1 was removed, except for hf: another file system is mounted there"]
        assert (mount / "precious").exists()
    assert (tmp_path / "outside" / "precious").exists()
    assert (root / "step-1" / "hf" / "model").exists()


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Yields a folder that other users may enter; only the user of pytest may enter its folders."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def give_away(root: Path) -> None:
    if os.geteuid() == 0:
        for path in (root, *root.rglob("*")):
            os.chown(path, NOBODY, NOBODY)


@pytest.mark.parametrize("refused", ["step-1", "step-1/hf", "."])
def test_folders_without_the_right_to_write(
    pruned: Pruned, server: ForkServer, open_folder: Path, refused: str
) -> None:
    root = pruned.copy(open_folder / "run")
    give_away(root)
    (root / refused).chmod(0o555)
    report = server.run(prune_as_nobody, root).unwrap()
    assert any("Permission denied" in warning for warning in report.warnings), report
    assert states_in(root)[KEPT] == "complete"
    assert states_in(root)[1] == ("complete" if refused == "step-1" else "half")
    (root / refused).chmod(0o755)
    assert server.run(prune_as_nobody, root).unwrap().warnings == []
    assert states_in(root) == {KEPT: "complete"}


@pytest.mark.parametrize("name", [".metadata", "__0_0.*.distcp", "config.json"])
def test_files_that_may_not_change(pruned: Pruned, tmp_path: Path, name: str) -> None:
    root = pruned.copy(tmp_path / "run")
    (file,) = (root / "step-1").glob(name)
    if subprocess.run(["chattr", "+i", file], capture_output=True, check=False).returncode != 0:
        pytest.skip("IMMUTABLE FILES NOT TESTED: chattr is not there, or not allowed")
    try:
        report = Retention(root, keep_latest=1).prune()
        assert any(file.name in warning and "not permitted" in warning for warning in report.warnings)
        assert states_in(root) == {1: "complete" if name == ".metadata" else "half", KEPT: "complete"}
    finally:
        subprocess.run(["chattr", "-i", file], check=True)
    assert_what_loads_is_whole(root)


def test_a_live_save_is_left_alone(pruned: Pruned, server: ForkServer, meeting: Meeting, tmp_path: Path) -> None:
    """A save in another process replaces a checkpoint. Prunes do not disturb it, and it commits."""
    root = pruned.copy(tmp_path / "run")
    pid = server.start(save_paused, meeting.address, SaveRequest(root / "step-1", 2), WriteItemType.BYTE_IO)
    process = meeting.accept()
    assert meeting.receive(process) == "paused"
    for _ in range(3):
        report = Retention(root, keep_latest=1).prune()
        assert report.skipped == {str(root / "step-1"): "a save is under way"}
    assert states_in(root) == {1: "complete", KEPT: "complete"}
    process.send("go")
    assert server.wait(pid).unwrap() == Attempt({}, ())
    assert generation_on_disk(root / "step-1") == 2


def test_what_a_killed_save_leaves_is_swept(
    pruned: Pruned, server: ForkServer, meeting: Meeting, tmp_path: Path
) -> None:
    root = pruned.copy(tmp_path / "run")
    shutil.rmtree(root / "step-2")
    pid = server.start(save_paused, meeting.address, SaveRequest(root / "step-2", 2), WriteItemType.BYTE_IO)
    process = meeting.accept()
    assert meeting.receive(process) == "paused"
    assert states_in(root)[2] == "saving"
    assert Retention(root, keep_latest=1).prune().skipped == {str(root / "step-2"): "a save is under way"}
    os.kill(pid, signal.SIGKILL)
    assert server.wait(pid).was_killed
    assert states_in(root) == {2: "half", KEPT: "complete"}
    assert Retention(root, keep_latest=1).prune().swept == [str(root / "step-2")]


def test_saves_and_prunes_keep_each_other_out(
    pruned: Pruned, server: ForkServer, meeting: Meeting, tmp_path: Path
) -> None:
    """A prune that stops in the middle holds the path, and a save fails. When the prune dies, a save succeeds."""
    root = pruned.copy(tmp_path / "run")
    removals = [call for call in pruned.calls if is_of(call, ("unlink",)) and call.files.startswith("step-1/__")]
    pid = server.start(prune_when_told, meeting.address, root)
    process = meeting.accept()
    assert meeting.receive(process) == "ready"
    with injected(pid, tmp_path / "log", removals[0].name, "signal=STOP", removals[0].number):
        process.send("go")
        wait_until_stopped(tmp_path / "log")
        (error,) = server.run(save, SaveRequest(root / "step-1", 2)).unwrap().errors.values()
        assert type(error) is CheckpointBusyError
        assert Retention(root, keep_latest=1).prune().skipped.keys() == {str(root / "step-1")}
    os.kill(pid, signal.SIGKILL)
    assert server.wait(pid).was_killed
    assert server.run(save, SaveRequest(root / "step-1", 2)).unwrap() == Attempt({}, ())
    assert generation_on_disk(root / "step-1") == 2
