# SPDX-License-Identifier: Apache-2.0
"""Several models (roles) of one job, each with its own folders, and the tracker file that names the newest step."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from torch import nn

from bytecheckpoint import (
    CheckpointReport,
    Config,
    Retention,
    SaveHandle,
    find_latest_ckpt_path,
    load,
    save,
    scan_steps,
    shutdown,
)
from bytecheckpoint.checkpoint.roles import check_role, known_roles
from bytecheckpoint.errors import CheckpointError, CheckpointNotFoundError, ConfigError, StorageError
from bytecheckpoint.training_state.tracker import TRACKER, write_tracker
from frameworks.holding import Gate

LIMIT_S = 60.0


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    shutdown(LIMIT_S)


def model_of(value: float) -> nn.Module:
    model = nn.Linear(40, 30)
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model


def value_of(model: nn.Module) -> float:
    values = {value for parameter in model.parameters() for value in parameter.flatten().tolist()}
    assert len(values) == 1
    return float(values.pop())


# Roles.


def test_known_roles_and_those_of_the_variable() -> None:
    assert known_roles({}) == ("default", "actor", "critic", "ref", "rm")
    assert known_roles({"BYTECHECKPOINT_ROLE_SUFFIX": " Judge,, teacher "})[5:] == ("judge", "teacher")
    for bad in ("a/b", "..", "good,."):
        with pytest.raises(ConfigError, match="cannot be the name of a folder"):
            known_roles({"BYTECHECKPOINT_ROLE_SUFFIX": bad})
    assert check_role(None) == check_role("") == ""
    assert check_role("Actor") == "actor"
    with pytest.raises(ConfigError, match=r"role='judge'.*critic.*BYTECHECKPOINT_ROLE_SUFFIX=judge"):
        check_role("judge")


def test_roles_of_the_variable_are_roles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BYTECHECKPOINT_ROLE_SUFFIX", "JUDGE")
    save(tmp_path, {"model": model_of(1)}, "ddp", global_steps=1, role="Judge")
    assert find_latest_ckpt_path(tmp_path, "judge") == str(tmp_path / "judge" / "global_step_1")


def test_a_role_is_found_by_any_of_its_paths_and_never_another(tmp_path: Path) -> None:
    for role, value in (("actor", 1), ("critic", 2)):
        save(tmp_path, {"model": model_of(value)}, "ddp", global_steps=5, role=role)
    model = model_of(0)
    step = tmp_path / "actor" / "global_step_5"
    assert find_latest_ckpt_path(tmp_path, role="actor") == str(step)
    assert find_latest_ckpt_path(tmp_path) is None
    for path, role in ((step, None), (step, "actor"), (tmp_path / "global_step_5", "actor")):
        model = model_of(0)
        load(path, {"model": model}, "ddp", role=role)
        assert value_of(model) == 1
    with pytest.raises(CheckpointNotFoundError, match=r"of role 'critic'.*critic has the steps 5: pass '.*critic"):
        load(step, {"model": model}, "ddp", role="critic")
    with pytest.raises(CheckpointNotFoundError, match=r"of role 'rm'"):
        load(tmp_path / "global_step_5", {"model": model}, "ddp", role="rm")
    with pytest.raises(CheckpointNotFoundError, match=r"steps of the roles actor, critic: pass role='actor'"):
        load(tmp_path / "global_step_5", {"model": model}, "ddp")
    assert value_of(model) == 1


def save_two_roles_at_once(path: Path) -> None:
    """Saves two roles that wait for each other.

    With one thread, process group or staging buffer they would deadlock.
    """
    meet = threading.Barrier(2)
    met: set[str] = set()

    monkeypatch = pytest.MonkeyPatch()
    with monkeypatch.context() as patch:
        from bytecheckpoint.training_state import saving

        class Met(saving.BcpWriter):
            def prepare_local_plan(self, plan: Any) -> Any:
                met.add(threading.current_thread().name)
                meet.wait(LIMIT_S)
                return super().prepare_local_plan(plan)

        patch.setattr(saving, "BcpWriter", Met)
        handles = [
            save(path, {"model": model_of(value)}, "ddp", True, 1, role=role)
            for role, value in (("actor", 3), ("critic", 4))
        ]
        for handle in handles:
            handle.committed.result(LIMIT_S)
    dist.barrier()
    for role, value in (("actor", 3), ("critic", 4)):
        assert (path / role / TRACKER).read_text() == "1"
        model = model_of(0)
        load(find_latest_ckpt_path(path, role) or "", {"model": model}, "ddp", role=role)
        assert value_of(model) == value
    assert met == {"bytecheckpoint-background-actor", "bytecheckpoint-background-critic"}
    shutdown(LIMIT_S)


def test_two_roles_save_at_once(tmp_path: Path) -> None:
    run_ranks(2, save_two_roles_at_once, tmp_path, limit_s=120)
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["actor", "critic"]


# The tracker.


def test_it_is_written_durably_after_the_last_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def note(descriptor: int) -> None:
        name = Path(f"/proc/self/fd/{descriptor}").readlink().name
        synced.append(name)
        assert (tmp_path / "global_step_1" / "model" / ".metadata").exists()
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    save(tmp_path, {"model": model_of(1)}, "ddp", global_steps=1)
    assert synced == [f".{TRACKER}.tmp"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_1", TRACKER]


@pytest.mark.parametrize("part", ["extra_state", "optimizer", "model"])
@pytest.mark.parametrize("fast", [False, True])
def test_it_never_names_a_step_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, fast: bool
) -> None:
    model = model_of(1)
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), momentum=0.5), "extra_state": {"a": 1}}
    save(tmp_path, state, "ddp", global_steps=1)
    Gate(monkeypatch, part, OSError(5, "broken"))
    with pytest.raises(CheckpointError, match="broken"):
        save(tmp_path, state, "ddp", fast, 2).committed.result(LIMIT_S)
    assert (tmp_path / TRACKER).read_text() == "1"
    assert find_latest_ckpt_path(tmp_path) == str(tmp_path / "global_step_1")
    load(tmp_path / "global_step_1", state, "ddp")


def test_a_tracker_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / f".{TRACKER}.tmp").mkdir()
    with pytest.raises(StorageError, match=f"write.*{TRACKER}") as raised:
        write_tracker(tmp_path, 3)
    assert raised.value.errno
    (tmp_path / f".{TRACKER}.tmp").rmdir()
    (tmp_path / f".{TRACKER}.tmp").write_text("what a killed process left")
    write_tracker(tmp_path, 3)
    write_tracker(tmp_path, 2)  # a save of an earlier step is allowed
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(TRACKER, "2")]


def test_without_a_tracker_the_highest_whole_step_is_the_newest(tmp_path: Path) -> None:
    assert find_latest_ckpt_path(tmp_path / "nowhere") is None
    assert find_latest_ckpt_path(tmp_path) is None
    for step in (1, 2, 10):
        save(tmp_path, {"model": model_of(step)}, "ddp", global_steps=step)
    (tmp_path / "global_step_99").mkdir()
    wanted = str(tmp_path / "global_step_10")
    for text in ("7", "", "half a", "99", "10 "):
        (tmp_path / TRACKER).write_text(text)
        if text == "10 ":
            assert find_latest_ckpt_path(tmp_path) == wanted
        else:
            with pytest.warns(RuntimeWarning, match="taking .*global_step_10"):
                assert find_latest_ckpt_path(tmp_path) == wanted
    (tmp_path / TRACKER).unlink()
    with pytest.warns(RuntimeWarning, match="is not there: taking .*global_step_10"):
        assert find_latest_ckpt_path(tmp_path) == wanted
    (tmp_path / "global_step_10" / "model" / ".metadata").write_bytes(b"junk")
    with pytest.warns(RuntimeWarning, match="taking .*global_step_2"):
        assert find_latest_ckpt_path(tmp_path) == str(tmp_path / "global_step_2")
    with pytest.raises(ConfigError, match="s3"):
        find_latest_ckpt_path("hdfs://bucket/run")


def test_a_run_in_which_nothing_is_whole_does_not_begin_anew(tmp_path: Path) -> None:
    save(tmp_path, {"model": model_of(1)}, "ddp", global_steps=1)
    (tmp_path / "global_step_1" / "model" / ".metadata").write_bytes(b"junk")
    with pytest.raises(CheckpointError, match=r"none is whole: global_step_1 is corrupt"):
        find_latest_ckpt_path(tmp_path)
    shutil.rmtree(tmp_path / "global_step_1")
    with pytest.warns(RuntimeWarning, match="names step '1', which is not whole: taking none"):
        assert find_latest_ckpt_path(tmp_path) is None


def test_a_step_whose_data_are_cut_is_not_the_newest(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, {"model": model_of(step)}, "ddp", global_steps=step)
    data = next((tmp_path / "global_step_2" / "model").glob("*.distcp"))
    os.truncate(data, 4096)
    with pytest.warns(RuntimeWarning) as said:
        assert find_latest_ckpt_path(tmp_path) == str(tmp_path / "global_step_1")
    assert "passing over" in str(said[0].message)
    assert "names step '2', which is not whole: taking" in str(said[1].message)


def test_a_save_whose_tracker_cannot_be_written_says_that_it_is_committed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / TRACKER)
    with pytest.raises(StorageError, match="it is a FIFO") as told:
        save(tmp_path, {"model": model_of(1)}, "ddp", global_steps=1)
    step = f"{tmp_path}/global_step_1"
    assert str(told.value).endswith(f"{step} is committed, all parts, and loads; the tracker names no step")
    load(tmp_path / "global_step_1", {"model": model_of(0)}, "ddp")


def test_a_tracker_that_stays_behind(tmp_path: Path) -> None:
    """The next one cannot be written, as with a quota: the older step is found, with a warning."""
    save(tmp_path, {"model": model_of(1)}, "ddp", global_steps=1)
    (tmp_path / f".{TRACKER}.tmp").mkdir()
    with pytest.raises(StorageError, match="global_step_2 is committed, all parts, and loads; the tracker still names"):
        save(tmp_path, {"model": model_of(2)}, "ddp", global_steps=2)
    with pytest.warns(RuntimeWarning, match="because the tracker names it, but.* global_step_2 was committed last"):
        assert find_latest_ckpt_path(tmp_path) == f"{tmp_path}/global_step_1"


def test_a_tracker_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / TRACKER).mkdir()
    assert find_latest_ckpt_path(tmp_path) is None
    with pytest.raises(StorageError):
        save(tmp_path, {"model": model_of(1)}, "ddp", global_steps=1)
    with pytest.warns(RuntimeWarning, match="the tracker cannot be read, so the time of the commit decides"):
        assert find_latest_ckpt_path(tmp_path) == f"{tmp_path}/global_step_1"


# Step folders of such a run, as scan_steps and Retention see them.


def state_of(value: float) -> dict[str, Any]:
    model = model_of(value)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "extra_state": {"value": value}}


def test_step_folders_are_told_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2, 3, 4, 5):
        save(tmp_path, state_of(step), "ddp", global_steps=step)
    (tmp_path / "global_step_2" / "optimizer" / ".metadata").unlink()
    data = next((tmp_path / "global_step_3" / "model").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-1])
    Gate(monkeypatch, "model", OSError(5, "broken"))
    for step in (4, 6):
        with pytest.raises(CheckpointError):
            save(tmp_path, state_of(step), "ddp", global_steps=step)
    monkeypatch.undo()
    save(tmp_path, {"model": model_of(7)}, "ddp", global_steps=5)  # files of the older save that remain do not count
    folders = {folder.step: folder for folder in scan_steps(tmp_path)}
    assert [folder.state for folder in folders.values()] == ["complete", "half", "corrupt", "half", "complete", "half"]
    assert folders[1].components == ("extra_state", "optimizer", "model")
    assert len(folders[1].save_ids) == 3
    assert folders[1].num_files == 3
    assert folders[1].num_bytes == sum(file.stat().st_size for file in Path(folders[1].path).rglob("*.distcp"))
    assert folders[1].summary().startswith("global_step_1: complete, ")
    assert "optimizer" in folders[2].reason
    assert "model" in folders[3].reason
    assert "different saves" in folders[4].reason
    first = next((tmp_path / "global_step_1" / "extra_state").glob("*.distcp"))
    broken = bytearray(first.read_bytes())
    broken[len(broken) // 2] ^= 1
    first.write_bytes(broken)
    assert scan_steps(tmp_path)[0].is_complete
    assert scan_steps(tmp_path, deep=True)[0].state == "corrupt"


def test_retention_removes_steps_with_all_their_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(1, 6):
        save(tmp_path, state_of(step), "ddp", global_steps=step)
    (tmp_path / "global_step_2" / "notes.txt").write_text("mine")
    Gate(monkeypatch, "model", OSError(5, "broken"))
    with pytest.raises(CheckpointError):
        save(tmp_path, state_of(6), "ddp", global_steps=0)  # half a save, and older than the complete ones
    monkeypatch.undo()
    report = Retention(tmp_path, keep_latest=2, keep_every=3, grace_s=0).after_save(5)
    assert report is not None
    assert report.kept == [3, 4, 5]
    assert [Path(path).name for path in report.removed] == ["global_step_1", "global_step_2"]
    assert [Path(path).name for path in report.swept] == ["global_step_0"]
    assert report.warnings == []
    assert report.bytes_freed > 2 * 3 * 40 * 30 * 4
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *(f"global_step_{n}" for n in (3, 4, 5)),
        TRACKER,
    ]
    load(find_latest_ckpt_path(tmp_path) or "", state_of(0), "ddp")


def test_retention_keeps_what_is_not_of_the_checkpoint_if_told_so(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, state_of(step), "ddp", global_steps=step)
    (tmp_path / "global_step_1" / "notes.txt").write_text("mine")
    report = Retention(tmp_path, keep_latest=1, remove_others=False).prune()
    assert [path.name for path in (tmp_path / "global_step_1").iterdir()] == ["notes.txt"]
    assert "notes.txt" in report.warnings[0]


def test_retention_leaves_alone_what_is_saved_or_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2, 3):
        save(tmp_path, state_of(step), "ddp", global_steps=step)
    retention = Retention(tmp_path, keep_latest=1)
    gate = Gate(monkeypatch, "model")
    handle = save(tmp_path, state_of(4), "ddp", True, 2)
    assert gate.arrived.wait(LIMIT_S)

    from bytecheckpoint.training_state import loading

    pruned = []

    class Pruning(loading.BcpReader):
        """Prunes before the first part of a load, and between the parts."""

        def __init__(self, path: Any, **kwargs: Any) -> None:
            if Path(path).name in ("model", "optimizer"):
                pruned.append(retention.prune())
            super().__init__(path, **kwargs)

    monkeypatch.setattr(loading, "BcpReader", Pruning)
    load(tmp_path / "global_step_1", state_of(0), "ddp")
    assert "a load in this process is reading it" in pruned[0].skipped[str(tmp_path / "global_step_1")]
    assert str(tmp_path / "global_step_1") in pruned[1].protected  # it was loaded last
    gate.open(monkeypatch)
    handle.committed.result(LIMIT_S)
    # Step 2 was saved again, and its tracker names it: it is the newest.
    assert [Path(path).name for path in retention.prune().removed] == ["global_step_1", "global_step_3"]


def test_folders_of_others_are_none_of_ours(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, state_of(step), "ddp", global_steps=step)
    theirs = tmp_path / "global_step_0" / "model"
    theirs.mkdir(parents=True)
    (theirs / "config.json").touch()
    assert [folder.state for folder in scan_steps(tmp_path)] == ["unknown", "complete", "complete"]
    Retention(tmp_path, keep_latest=1, grace_s=0).prune()
    assert (theirs / "config.json").exists()


def test_memory_of_several_roles_is_bounded_by_what_the_user_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, "model")
    first: SaveHandle[CheckpointReport] = save(tmp_path, state_of(1), "ddp", True, 1, role="actor")
    assert gate.arrived.wait(LIMIT_S)
    with pytest.raises(CheckpointError, match="on_staging_busy"):
        save(tmp_path, state_of(2), "ddp", True, 1, role="critic", config=Config(on_staging_busy="raise"))
    gate.open(monkeypatch)
    first.committed.result(LIMIT_S)
