# SPDX-License-Identifier: Apache-2.0
"""Tests what a prune removes from an object store, and what saves beside it do. The store is in memory."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from support.store_runs import copy_ranks, loaded, names, save, states

from bytecheckpoint import Config, Retention, latest, save_state_dict, scan_steps, verify
from bytecheckpoint.errors import CheckpointBusyError, CheckpointNotFoundError, CheckpointSupersededError
from bytecheckpoint.storage.folders import folder_at
from bytecheckpoint.storage.object_store import commit, tombstones
from bytecheckpoint.storage.object_store import removal as store_removal
from bytecheckpoint.storage.object_store.client import StoreClient
from bytecheckpoint.storage.object_store.commit import StoreCommit
from bytecheckpoint.storage.object_store.stores import use_store


@pytest.fixture(autouse=True)
def requests_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests prune what they have just saved, of which no request is on its way."""
    monkeypatch.setattr(store_removal, "_LONGEST_REQUEST", timedelta(0))


def of_step_1(client: StoreClient) -> list[str]:
    return sorted(name for name in names(client) if name.startswith("step-1/"))


def test_the_newest_are_kept(root: str, client: StoreClient) -> None:
    save(root, 1, 2, 3, 10)
    client.put("step-1/logs/out", b"12345")
    going = [each for each in client.everything("") if each.name.startswith(("step-1/", "step-2/"))]
    dry = Retention(root, keep_latest=2).prune(dry_run=True)
    assert dry.removed == [f"{root}/step-1", f"{root}/step-2"]
    assert dry.bytes_freed == sum(each.num_bytes for each in going)
    assert states(root) == dict.fromkeys((1, 2, 3, 10), "complete")
    report = Retention(root, keep_latest=2).prune()
    assert (report.removed, report.kept, report.warnings) == (dry.removed, [3, 10], [])
    assert report.bytes_freed == dry.bytes_freed
    assert states(root) == {3: "complete", 10: "complete"}
    assert not [name for name in names(client) if name.startswith(("step-1/", "step-2/"))]
    assert loaded(latest(root) or "") == 10


def test_what_dead_saves_left_goes_by_the_clock_of_the_store(root: str, client: StoreClient) -> None:
    save(root, 1)
    client.delete(["step-1/.metadata"])
    save(root, 2)
    report = Retention(root, keep_latest=1).prune()
    assert "half" in report.skipped[f"{root}/step-1"]
    assert states(root) == {1: "half", 2: "complete"}
    assert Retention(root, keep_latest=1, grace_s=0).prune().swept == [f"{root}/step-1"]
    assert states(root) == {2: "complete"}


@pytest.fixture(params=["before", "after"])
def fails_at(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], list[str]]]:
    """Returns a function that makes the request of a number fail, before or after its effect."""
    kinds = ("everything", "head", "put_if", "delete", "delete_once")
    when, made = [-1], [""]

    def failing(kind: str) -> None:
        real = getattr(StoreClient, kind)

        def call(self: StoreClient, *arguments: Any) -> Any:
            number = len(made)
            made.append(kind)
            if number == when[0] and request.param == "before":
                raise OSError(errno.EIO, "injected")
            found = real(self, *arguments)
            if number == when[0]:
                raise OSError(errno.EIO, "injected")
            return found

        monkeypatch.setattr(StoreClient, kind, call)

    for kind in kinds:
        failing(kind)

    def begin(number: int) -> list[str]:
        when[0] = number
        del made[1:]
        return made

    yield begin
    when[0] = -1


def test_a_prune_that_fails_anywhere_is_finished_by_the_next(
    root: str, client: StoreClient, fails_at: Callable[[int], list[str]]
) -> None:
    save(root, 1, 2)
    made = fails_at(-1)
    Retention(root, keep_latest=1).prune()
    num_calls = len(made)
    assert num_calls > 4
    for number in range(1, num_calls):
        fails_at(-1)
        save(root, 1, 2)
        fails_at(number)
        report = Retention(root, keep_latest=1).prune()
        fails_at(-1)
        found = states(root)
        assert found[2] == "complete"
        assert found.get(1, "half") in ("complete", "half"), (number, report)
        if found.get(1) == "complete":
            assert loaded(f"{root}/step-1") == 1
        save(root, 2)  # what a prune leaves goes when it is older than the newest checkpoint
        Retention(root, keep_latest=1, grace_s=0).prune()
        assert states(root) == {2: "complete"}
        assert not [name for name in names(client) if name.startswith("step-1/")]


def test_a_save_that_had_begun_before_a_prune_is_not_committed(
    root: str, client: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(root, 1, 2)
    real = StoreCommit.check_files

    def prune_first(self: StoreCommit, checkpoint: Any, ranks: Any = None) -> None:
        real(self, checkpoint)
        assert Retention(root, keep_latest=1).prune().removed == [f"{root}/step-1"]

    monkeypatch.setattr(StoreCommit, "check_files", prune_first)
    with pytest.raises(CheckpointSupersededError):
        save(root, 1)
    assert states(root) == {2: "complete"}
    assert not [name for name in names(client) if name.startswith("step-1/")]


def test_a_save_that_replaces_a_checkpoint_during_a_prune_stays(
    root: str, client: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(root, 1, 2)
    real = tombstones.bury

    def save_first(*arguments: Any) -> Any:
        monkeypatch.setattr(store_removal, "bury", real)
        save(root, 1)
        return real(*arguments)

    monkeypatch.setattr(store_removal, "bury", save_first)
    report = Retention(root, keep_latest=1).prune()
    assert "changed" in report.skipped[f"{root}/step-1"]
    assert states(root) == {1: "complete", 2: "complete"}
    assert loaded(f"{root}/step-1") == 1


def test_a_save_that_begins_at_a_tombstone_stays(
    root: str, client: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the tombstone and its removal there is no checkpoint, and a new save may put one there."""
    save(root, 1, 2)
    real = StoreClient.delete

    def save_first(self: StoreClient, going: Any) -> None:
        monkeypatch.setattr(StoreClient, "delete", real)
        assert states(root) == {1: "half", 2: "complete"}
        with pytest.raises(CheckpointNotFoundError):
            loaded(f"{root}/step-1")
        save_state_dict(f"{root}/step-1", {"w": torch.full((1000,), 1.0), "step": 1}, overwrite=False)
        real(self, going)

    monkeypatch.setattr(StoreClient, "delete", save_first)
    assert Retention(root, keep_latest=1).prune().removed == [f"{root}/step-1"]
    assert states(root) == {1: "complete", 2: "complete"}
    assert loaded(f"{root}/step-1") == 1
    assert verify(f"{root}/step-1").is_whole


def test_a_prune_does_not_take_a_save_for_its_tombstone(
    root: str, client: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save has begun at the tombstone, and is not committed yet when the prune looks at it for the last time."""
    save(root, 1, 2)
    real_delete, real_check = StoreClient.delete, StoreCommit.check_files
    has_begun, is_pruned = threading.Event(), threading.Event()

    def wait(self: StoreCommit, checkpoint: Any, ranks: Any = None) -> None:
        has_begun.set()
        assert is_pruned.wait(30)
        real_check(self, checkpoint)

    saving = threading.Thread(target=save, args=(root, 1))

    def begin(self: StoreClient, going: Any) -> None:
        monkeypatch.setattr(StoreClient, "delete", real_delete)
        monkeypatch.setattr(StoreCommit, "check_files", wait)
        saving.start()
        assert has_begun.wait(30)
        real_delete(self, going)

    monkeypatch.setattr(StoreClient, "delete", begin)
    assert Retention(root, keep_latest=1).prune().removed == [f"{root}/step-1"]
    assert not client.exists("step-1/.metadata")
    is_pruned.set()
    saving.join()
    assert states(root) == {1: "complete", 2: "complete"}
    assert loaded(f"{root}/step-1") == 1


def test_two_saves_at_one_tombstone(root: str, client: StoreClient, monkeypatch: pytest.MonkeyPatch) -> None:
    client.put("step-1/.metadata", b"removed " + b"0" * 32)
    real = tombstones.claim

    def claim_twice(*arguments: Any) -> Any:
        assert real(*arguments) is not None
        return real(*arguments)

    monkeypatch.setattr(commit, "claim", claim_twice)
    with pytest.raises(CheckpointBusyError, match="has begun here at the same moment"):
        save(root, 1)
    monkeypatch.setattr(commit, "claim", real)
    save(root, 1)
    assert loaded(f"{root}/step-1") == 1


def test_files_of_a_save_that_may_be_under_way_stay(root: str, client: StoreClient) -> None:
    """Its commit does not know of the checkpoint that is removed, and would name them where there is none again."""
    save(root, 1, 2)
    young = "step-1/__0_0.0123456789abcdef.distcp"
    client.put(young, b"being written")
    report = Retention(root, keep_latest=1).prune()
    assert report.removed == [f"{root}/step-1"]
    assert "1 data files that a save may be writing" in report.warnings[0]
    assert of_step_1(client) == [young]
    assert states(root) == {1: "half", 2: "complete"}
    save(root, 3)
    assert Retention(root, keep_latest=2, grace_s=0).prune().swept == [f"{root}/step-1"]
    assert of_step_1(client) == []


def test_the_tombstone_of_a_young_mark_is_removed_later(
    root: str, client: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request of its commit could still arrive, and would commit it again where there is none."""
    save(root, 1, 2)
    monkeypatch.setattr(store_removal, "_LONGEST_REQUEST", timedelta(minutes=15))
    assert Retention(root, keep_latest=1).prune().removed == [f"{root}/step-1"]
    assert of_step_1(client) == ["step-1/.metadata"]
    assert states(root) == {2: "complete"}
    assert Retention(root, keep_latest=1).prune().warnings == []
    assert of_step_1(client) == ["step-1/.metadata"]
    monkeypatch.setattr(store_removal, "_LONGEST_REQUEST", timedelta(0))
    save(root, 3)
    assert Retention(root, keep_latest=2).prune().removed == []
    assert of_step_1(client) == []


def test_a_second_prune_does_not_take_a_young_tombstone_for_an_old_one(
    root: str, client: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_removal, "_LONGEST_REQUEST", timedelta(minutes=15))
    save(root, 1)
    client.put("step-1/__0_0.0123456789abcdef.distcp", b"being written")
    save(root, 2)
    assert Retention(root, keep_latest=1).prune().removed == [f"{root}/step-1"]
    save(root, 3)
    assert Retention(root, keep_latest=2, grace_s=0).prune().swept == [f"{root}/step-1"]
    assert of_step_1(client) == ["step-1/.metadata"]
    assert states(root) == {2: "complete", 3: "complete"}


def test_a_prune_that_fails_in_the_middle_says_that_it_is_no_checkpoint_any_more(
    root: str, client: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(root, 1, 2)

    def refuse(self: StoreClient, going: Any) -> None:
        raise OSError(errno.EIO, "SlowDown")

    monkeypatch.setattr(StoreClient, "delete", refuse)
    report = Retention(root, keep_latest=1).prune()
    assert report.removed == []
    assert report.warnings == ["step-1: it is no checkpoint any more, but not all of it is gone: SlowDown"]


def test_a_part_of_which_a_tombstone_is_left_is_not_there(root: str, client: StoreClient) -> None:
    save_state_dict(f"{root}/step-1/model", {"w": torch.ones(3)})
    client.put("step-1/optimizer/.metadata", b"removed " + b"0" * 32)
    assert folder_at(f"{root}/step-1/model").is_there()
    assert not folder_at(f"{root}/step-1/optimizer").is_there()
    assert [folder.components for folder in scan_steps(root)] == [("model",)]


def test_parts_of_ranks_that_committed_by_themselves_go(root: str, client: StoreClient, tmp_path: Path) -> None:
    """Such a checkpoint can only have been copied there."""
    copy_ranks(client, tmp_path, "step-1")
    save(root, 2)
    assert states(root) == {1: "complete", 2: "complete"}
    report = Retention(root, keep_latest=1).prune()
    assert (report.removed, report.warnings) == ([f"{root}/step-1"], [])
    assert of_step_1(client) == []


def test_the_tombstone_of_a_save_that_died_is_removed_after_its_grace(root: str, client: StoreClient) -> None:
    client.put("step-1/.metadata", b"saving " + b"0" * 32)
    save(root, 2)
    assert Retention(root, keep_latest=1).prune().warnings == []
    assert of_step_1(client) == ["step-1/.metadata"]
    assert states(root) == {2: "complete"}
    settings = Config(commit_deadline_s=1e-6)
    assert Retention(root, keep_latest=1, grace_s=0, config=settings).prune().warnings == []
    assert of_step_1(client) == []


def test_a_prune_of_parts_that_died_is_finished(root: str, client: StoreClient) -> None:
    """It had replaced the mark of the model, and removed the model, and nothing else."""

    def save_parts(step: int) -> None:
        for part in ("optimizer", "model"):
            save_state_dict(f"{root}/step-{step}/{part}", {"w": torch.ones(3)})

    save_parts(1)
    client.delete([name for name in names(client) if name.startswith("step-1/model/")])
    client.put("step-1/model/.metadata", b"removed " + b"0" * 32)
    save_parts(2)
    assert {folder.step: folder.state for folder in scan_steps(root)} == {1: "half", 2: "complete"}
    assert Retention(root, keep_latest=1, grace_s=0).prune().swept == [f"{root}/step-1"]
    assert of_step_1(client) == ["step-1/model/.metadata"]
    assert states(root) == {2: "complete"}
    assert Retention(root, keep_latest=1).prune().warnings == []
    assert of_step_1(client) == []


@pytest.mark.parametrize("remove_others", [True, False])
def test_a_checkpoint_in_a_checkpoint_stays(root: str, client: StoreClient, remove_others: bool) -> None:
    save(root, 1, 2)
    save_state_dict(f"{root}/step-1/ema", {"w": torch.full((1000,), 7.0), "step": 7})
    report = Retention(root, keep_latest=1, remove_others=remove_others).prune()
    assert report.removed == [f"{root}/step-1"]
    assert any("ema, a checkpoint of its own" in warning for warning in report.warnings)
    assert loaded(f"{root}/step-1/ema") == 7
    assert not client.exists("step-1/.metadata")


def test_a_checkpoint_of_another_library_in_a_checkpoint_stays(root: str, client: StoreClient) -> None:
    save(root, 1, 2)
    theirs = ["step-1/hf/model.safetensors", "step-1/jax/_METADATA", "step-1/jax/params.w/0.0"]
    for name in (*theirs, "step-1/logs/out"):
        client.put(name, b"12345")
    report = Retention(root, keep_latest=1).prune()
    assert report.warnings == [
        f"step-1 was removed, except for {name}, a checkpoint of its own" for name in ("hf", "jax")
    ]
    assert of_step_1(client) == theirs
    save(root, 1)
    save(root, 3)
    assert Retention(root, keep_latest=1, remove_foreign=True).prune().warnings == []
    assert of_step_1(client) == []


def test_a_sweep_leaves_a_checkpoint_of_another_library(root: str, client: StoreClient) -> None:
    client.put("step-1/model.safetensors", b"12345")
    client.put("step-1/__0_0.distcp", b"12345")
    save(root, 2)
    report = Retention(root, keep_latest=1, grace_s=0).prune()
    assert "only remove_foreign=True removes" in report.skipped[f"{root}/step-1"]
    assert of_step_1(client) == ["step-1/__0_0.distcp", "step-1/model.safetensors"]
    assert Retention(root, keep_latest=1, grace_s=0, remove_foreign=True).prune().swept == [f"{root}/step-1"]


def test_what_a_load_of_this_process_reads_stays(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    save(root, 1, 2)
    reads, may_go_on = threading.Event(), threading.Event()
    real = StoreClient.read

    def wait(self: StoreClient, *arguments: Any) -> Any:
        reads.set()
        assert may_go_on.wait(30)
        return real(self, *arguments)

    monkeypatch.setattr(StoreClient, "read", wait)
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(loaded(f"{root}/step-1")))
    thread.start()
    assert reads.wait(30)
    monkeypatch.setattr(StoreClient, "read", real)
    report = Retention(root, keep_latest=1).prune()
    may_go_on.set()
    thread.join()
    assert "a load of this process reads it" in report.skipped[f"{root}/step-1"]
    assert found == [1]


def test_the_newest_is_what_the_store_was_sent_last(root: str, client: StoreClient) -> None:
    save(root, 10, 20, 30, 15)
    with pytest.warns(RuntimeWarning, match="step-15 is the newest, by the time of its commit, but step-20, step-30"):
        assert latest(root) == f"{root}/step-15"
    report = Retention(root, keep_latest=2).after_save()
    assert report is not None
    assert (report.kept, states(root)) == ([15, 30], {15: "complete", 30: "complete"})
    client.put("latest_checkpointed_iteration.txt", b"30")
    with pytest.warns(RuntimeWarning, match="because the tracker names it, but step-15 was committed last"):
        assert latest(root) == f"{root}/step-30"


def test_a_run_that_was_uploaded_is_told_by_its_numbers(root: str, client: StoreClient) -> None:
    save(root, 10, 20, 30)
    copy = use_store(f"{root}-copy", Config())
    for step in (30, 10, 20):
        for name in sorted(name for name in names(client) if name.startswith(f"step-{step}/")):  # the mark first
            copy.put(name, client.get(name))
    assert latest(f"{root}-copy") == f"{root}-copy/step-30"
    assert Retention(f"{root}-copy", keep_latest=1).prune().kept == [30]
