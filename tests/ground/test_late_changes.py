# SPDX-License-Identifier: Apache-2.0
"""Two saves on machines that see late what the other one does, each stopped where a step of the protocol counts.

Each test fails if that step is left out or moved: the flush of the tmp, the second listing of a sweep, its order, the
last look before the rename. ``tests/model/commit.pml`` has a mutation for each.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.fork_server import ForkServer
from support.late import late
from support.mounts import mount_for_this_process
from support.ranks import run_ranks
from support.saves import SaveRequest, attempt, generation_on_disk, load_then_save, names_in, state

from bytecheckpoint import Config, Retention, load_state_dict, save_state_dict, scan_steps
from bytecheckpoint.errors import CheckpointSupersededError, StorageError

A, B = 1, 2


@pytest.fixture
def paths(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[Path]]:
    """Yields the path of a checkpoint, generation 0, as each machine sees it."""
    with contextlib.ExitStack() as stack:
        views = late(*request.param)(stack, tmp_path)
        paths = [view / "ckpt" for view in views]
        assert attempt(SaveRequest(paths[0], 0)).errors == {}
        yield paths


def save(request: SaveRequest) -> type[BaseException] | None:
    """Returns what the save raised."""
    (error,) = attempt(request).errors.values() or [None]
    return None if error is None else type(error)


class Saves:
    """The saves of both machines, generation 1 on A and 2 on B."""

    def __init__(self, server: ForkServer, paths: list[Path]) -> None:
        self._server, self._paths = server, paths
        self._pids: dict[int, int] = {}

    def start(self, machine: int, *, until: str = "") -> None:
        """Starts a save. Returns once it has stopped at a failpoint."""
        env = {"BCP_FAILPOINT": f"{until}=stop"} if until else {}
        request = SaveRequest(self._paths[machine - 1], machine)
        self._pids[machine] = self._server.start(save, request, env=env)
        assert not until or self._server.wait_stopped(self._pids[machine])

    def end(self, machine: int) -> type[BaseException] | None:
        """Lets a save go on. Returns what it raised."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pids[machine], signal.SIGCONT)
        raised: type[BaseException] | None = self._server.wait(self._pids[machine]).unwrap()
        return raised

    def stored(self) -> int | None:
        """Returns the generation that both machines read."""
        stored = [generation_on_disk(path) for path in self._paths]
        assert stored[0] == stored[1]
        return stored[0]


@pytest.fixture
def saves(failpoint_server: ForkServer, paths: list[Path]) -> Saves:
    return Saves(failpoint_server, paths)


@pytest.mark.parametrize("paths", [("unflushed",)], indirect=True)
def test_the_right_is_on_the_server_before_the_data(saves: Saves) -> None:
    """Without the flush B's sweep sees the data of A and not its tmp, and deletes what A goes on to commit."""
    saves.start(A, until="commit_checked")
    saves.start(B, until="sweep_directory_synced")
    assert saves.end(A) is CheckpointSupersededError
    assert saves.end(B) is None
    assert saves.stored() == B


@pytest.mark.parametrize("paths", [("blind=.tmp:4", "of=a")], indirect=True)
def test_a_sweep_lists_twice(saves: Saves) -> None:
    """B's listings lack the tmp of A until that one. Without the second listing it deletes the data of A."""
    saves.start(A, until="commit_decided")
    saves.start(B)
    assert saves.end(B) is CheckpointSupersededError
    assert saves.end(A) is None
    assert saves.stored() == A


@pytest.mark.parametrize("paths", [(), ("unflushed",)], indirect=True, ids=["at once", "unflushed"])
def test_a_sweep_reads_the_mark_last(saves: Saves) -> None:
    """A commits after B has listed its data. If B had read the mark before, it would delete what A has committed."""
    saves.start(A, until="commit_decided")
    saves.start(B, until="sweep_listed")
    assert saves.end(A) is None
    assert saves.end(B) is CheckpointSupersededError
    assert saves.stored() == A


@pytest.mark.parametrize("paths", [("unflushed",), ("unflushed", "unlink=30")], indirect=True, ids=["flush", "unlink"])
def test_a_removed_right_that_comes_back_is_none(saves: Saves) -> None:
    """B takes A's right away and commits. A's sync then brings its tmp back: only the last look tells A."""
    saves.start(A, until="commit_checked")
    saves.start(B)
    assert saves.end(B) is None
    assert saves.end(A) is CheckpointSupersededError
    assert saves.stored() == B


@pytest.mark.parametrize("paths", [("rename=30", "size=30")], indirect=True)
def test_who_has_read_the_old_checkpoint_reads_the_new_one(paths: list[Path], server: ForkServer) -> None:
    """A machine that has the old one in its cache loads what the other one has committed, and saves over it."""
    assert generation_on_disk(paths[1]) == 0
    for generation in (1, 3):
        assert attempt(SaveRequest(paths[0], generation)).errors == {}
        loaded, saved = load_then_save((0,), SaveRequest(paths[1], generation + 1))
        assert (loaded, saved.errors) == (generation, {})
        assert generation_on_disk(paths[0]) == generation + 1


def load_what_one_rank_saved(views: tuple[Path, Path], at: Path) -> list[float]:
    """Returns what this rank loads after each save that rank 0 makes alone, where rank 1 sees it after some looks."""
    mount_for_this_process("--bind", str(views[dist.get_rank()]), str(at))
    loaded, path = [], at / "ckpt"
    for generation in (1.0, 2.0):
        if dist.get_rank() == 0:
            save_state_dict(path, {"weight": torch.full((8,), generation)}, no_dist=True)
        dist.barrier()
        state = {"weight": torch.zeros(8)}
        load_state_dict(path, state)
        loaded.append(state["weight"].mean().item())
        dist.barrier()
    return loaded


@pytest.mark.parametrize("options", ["blind=ckpt:20", "blind=.metadata:20"])
def test_ranks_that_are_behind_read_again(options: str, tmp_path: Path) -> None:
    """A rank that does not see the checkpoint, or sees the one before, is waited for."""
    with contextlib.ExitStack() as stack:
        views = late(options, "of=a")(stack, tmp_path)
        (tmp_path / "at").mkdir()
        assert run_ranks(2, load_what_one_rank_saved, views, tmp_path / "at") == [[1.0, 2.0], [1.0, 2.0]]


@pytest.mark.parametrize("paths", [("create=3600", "blind=.distcp:1000000", "of=a")], indirect=True)
def test_a_file_that_may_be_seen_yet_is_not_called_damage(paths: list[Path]) -> None:
    """Long after the commit it is: then `prune(remove_corrupt=True)` may remove the checkpoint."""
    config = Config(visibility_timeout_s=0.5)
    with pytest.raises(StorageError, match="not known whether this checkpoint is damaged"):
        load_state_dict(paths[1], state(0), no_dist=True, config=config)
    run = paths[0].parent / "run"
    for step in (1, 2):
        assert attempt(SaveRequest(run / f"step-{step}", step)).errors == {}
    seen = paths[1].parent / "run"
    for age_s, judged in ((0, "unknown"), (3600, "corrupt")):
        then = time.time() - age_s
        for step in (1, 2):
            os.utime(run / f"step-{step}" / ".metadata", (then, then))
        assert [folder.state for folder in scan_steps(seen)] == [judged, judged]


@pytest.mark.parametrize("paths", [()], indirect=True)
def test_removed_files_that_a_dead_machine_left_go_when_nobody_can_have_them_open(paths: list[Path]) -> None:
    """NFS and FUSE keep a file that is removed while it is open under such a name, and the last close removes it."""
    path, run = paths[0], paths[0].parent / "run"
    for step in (1, 2, 3):
        assert attempt(SaveRequest(run / f"step-{step}", step)).errors == {}
    hours_ago = time.time() - 2 * 3600
    for folder in (path, run / "step-1", run / "step-2"):
        for name in (".nfs000000000001", ".fuse_hidden000001"):
            (folder / name).write_bytes(b"x" * 100)
            if folder != run / "step-2":
                os.utime(folder / name, (hours_ago, hours_ago))
    (path / ".nfs000000000002").write_bytes(b"x")
    assert attempt(SaveRequest(path, 4)).errors == {}
    assert [name for name in names_in(path) if name.startswith((".nfs", ".fuse"))] == [".nfs000000000002"]
    report = Retention(run, keep_latest=1).prune()
    assert report.removed == [str(run / "step-1")]
    assert len(report.warnings) == 1
    assert "step-2" in report.warnings[0]
    assert names_in(run / "step-2") == [".fuse_hidden000001", ".nfs000000000001"]
