# SPDX-License-Identifier: Apache-2.0
"""Tests runs in an object store: their steps, the newest, what a prune removes, and ``bcp``. The store is in memory."""

from __future__ import annotations

import errno
import itertools
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.cli_runs import as_json, run
from torch import nn

import bytecheckpoint
from bytecheckpoint import (
    BcpWriter,
    Config,
    Retention,
    latest,
    load_state_dict,
    prune,
    save_state_dict,
    scan_steps,
    verify,
)
from bytecheckpoint.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointSupersededError,
    ConfigError,
    StorageError,
    UnsupportedError,
)
from bytecheckpoint.object_store.client import StoreClient
from bytecheckpoint.object_store.commit import StoreCommit
from bytecheckpoint.object_store.stores import use_store

_numbers = itertools.count()


@pytest.fixture
def root() -> str:
    """Returns the URL of a run that has no steps yet."""
    return f"memory://{__name__}/{next(_numbers)}/run"


@pytest.fixture
def client(root: str) -> StoreClient:
    """Returns a client for the run."""
    return use_store(root, Config())


def save(root: str, *steps: int) -> None:
    for step in steps:
        save_state_dict(f"{root}/step-{step}", {"w": torch.full((1000,), float(step)), "step": step})


def loaded(url: str) -> int:
    found = {"w": torch.zeros(1000), "step": 0}
    load_state_dict(url, found)
    assert (found["w"] == found["step"]).all()
    return int(found["step"])


def states(root: str) -> dict[int, str]:
    return {folder.step: folder.state for folder in scan_steps(root)}


def names(client: StoreClient) -> set[str]:
    return {each.name for each in client.everything("")}


def test_a_run_that_has_not_begun(root: str) -> None:
    assert scan_steps(root) == []
    assert latest(root) is None
    assert prune(root, keep_latest=1).warnings == []


def test_steps_and_the_newest(root: str, client: StoreClient) -> None:
    save(root, 9, 100, 20)
    client.put("notes/readme", b"of somebody else")
    client.put("step-7/notes", b"no checkpoint")
    assert states(root) == {7: "unknown", 9: "complete", 20: "complete", 100: "complete"}
    folder = scan_steps(root)[-1]
    assert (folder.path, folder.name, folder.num_files) == (f"{root}/step-100", "step-100", 1)
    assert latest(root) == f"{root}/step-100"
    assert loaded(f"{root}/step-100") == 100
    client.delete(["step-100/.metadata"])
    assert states(root)[100] == "half"
    with pytest.warns(RuntimeWarning, match=r"step-100, which is half"):
        assert latest(root) == f"{root}/step-20"
    data = next(name for name in client.names("step-20") if name.endswith(".distcp"))
    client.delete([f"step-20/{data}"])
    assert states(root)[20] == "corrupt"
    assert states(root)[9] == "complete"


def test_bits_that_flipped_are_seen_by_a_deep_look(root: str, client: StoreClient) -> None:
    save(root, 1)
    name = next(name for name in names(client) if name.endswith(".distcp"))
    data = bytearray(client.get(name))
    data[4200] ^= 1
    client.put(name, bytes(data))
    assert states(root) == {1: "complete"}
    assert [folder.state for folder in scan_steps(root, deep=True)] == ["corrupt"]


def test_a_run_all_of_which_is_lost_is_an_error(root: str, client: StoreClient) -> None:
    save(root, 1)
    client.delete([name for name in names(client) if name.endswith(".distcp")])
    with pytest.raises(CheckpointError, match="none is whole: step-1 is corrupt"):
        latest(root)


def test_a_checkpoint_is_no_run(root: str) -> None:
    save(root, 1)
    with pytest.raises(ConfigError, match="is a checkpoint itself"):
        latest(f"{root}/step-1")
    with pytest.raises(CheckpointNotFoundError, match=r"it holds the checkpoint step-1: pass .*step-1"):
        load_state_dict(root, {"w": torch.zeros(1000)})


def test_the_newest_are_kept(root: str, client: StoreClient) -> None:
    save(root, 1, 2, 3, 10)
    client.put("step-1/logs/out", b"12345")
    going = [each for each in client.everything("") if each.name.startswith(("step-1/", "step-2/"))]
    dry = prune(root, keep_latest=2, dry_run=True)
    assert dry.removed == [f"{root}/step-1", f"{root}/step-2"]
    assert dry.bytes_freed == sum(each.num_bytes for each in going)
    assert states(root) == dict.fromkeys((1, 2, 3, 10), "complete")
    report = prune(root, keep_latest=2)
    assert (report.removed, report.kept, report.warnings) == (dry.removed, [3, 10], [])
    assert report.bytes_freed == dry.bytes_freed
    assert states(root) == {3: "complete", 10: "complete"}
    assert not [name for name in names(client) if name.startswith(("step-1/", "step-2/"))]
    assert loaded(latest(root) or "") == 10


def test_others_stay_if_asked(root: str, client: StoreClient) -> None:
    save(root, 1, 2)
    client.put("step-1/config.json", b"{}")
    report = prune(root, keep_latest=1, remove_others=False)
    assert report.removed == [f"{root}/step-1"]
    assert "1 objects that are not of a checkpoint" in report.warnings[0]
    assert {name for name in names(client) if name.startswith("step-1/")} == {"step-1/config.json"}


def test_what_dead_saves_left_goes_by_the_clock_of_the_store(root: str, client: StoreClient) -> None:
    save(root, 1)
    client.delete(["step-1/.metadata"])
    save(root, 2)
    report = prune(root, keep_latest=1)
    assert "half" in report.skipped[f"{root}/step-1"]
    assert states(root) == {1: "half", 2: "complete"}
    assert prune(root, keep_latest=1, grace_s=0).swept == [f"{root}/step-1"]
    assert states(root) == {2: "complete"}


def test_in_a_loop(root: str) -> None:
    keep = Retention(root, keep_latest=1)
    for step in (1, 2, 3):
        save(root, step)
        keep.after_save(step, rank=0)
        assert states(root) == {step: "complete"}


@pytest.fixture(params=["before", "after"])
def fails_at(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], list[str]]]:
    """Returns a function that makes the request of a number fail, before or after its effect."""
    kinds = ("everything", "head", "put_if", "delete")
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
    prune(root, keep_latest=1)
    num_calls = len(made)
    assert num_calls > 4
    for number in range(1, num_calls):
        fails_at(-1)
        save(root, 1, 2)
        fails_at(number)
        report = prune(root, keep_latest=1)
        fails_at(-1)
        found = states(root)
        assert found[2] == "complete"
        assert found.get(1, "half") in ("complete", "half"), (number, report)
        if found.get(1) == "complete":
            assert loaded(f"{root}/step-1") == 1
        prune(root, keep_latest=1, grace_s=0)
        assert states(root) == {2: "complete"}
        assert not [name for name in names(client) if name.startswith("step-1/")]


def test_a_save_that_had_begun_before_a_prune_is_not_committed(
    root: str, client: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(root, 1, 2)
    real = StoreCommit.check_files

    def prune_first(self: StoreCommit, checkpoint: Any) -> None:
        real(self, checkpoint)
        assert prune(root, keep_latest=1).removed == [f"{root}/step-1"]

    monkeypatch.setattr(StoreCommit, "check_files", prune_first)
    with pytest.raises(CheckpointSupersededError):
        save(root, 1)
    assert states(root) == {2: "complete"}
    assert not [name for name in names(client) if name.startswith("step-1/")]


def test_a_save_that_replaces_a_checkpoint_during_a_prune_stays(
    root: str, client: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(root, 1, 2)
    real = StoreClient.bury

    def save_first(self: StoreClient, *arguments: Any) -> bool:
        monkeypatch.setattr(StoreClient, "bury", real)
        save(root, 1)
        return real(self, *arguments)

    monkeypatch.setattr(StoreClient, "bury", save_first)
    report = prune(root, keep_latest=1)
    assert "changed" in report.skipped[f"{root}/step-1"]
    assert states(root) == {1: "complete", 2: "complete"}
    assert loaded(f"{root}/step-1") == 1


def test_a_save_that_begins_at_a_tombstone_stays(
    root: str, client: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the tombstone and its removal there is no checkpoint, and a new save may put one there."""
    save(root, 1, 2)
    real = StoreClient.is_buried

    def save_first(self: StoreClient, name: str) -> bool:
        monkeypatch.setattr(StoreClient, "is_buried", real)
        assert states(root) == {1: "half", 2: "complete"}
        with pytest.raises(CheckpointNotFoundError):
            loaded(f"{root}/step-1")
        save_state_dict(f"{root}/step-1", {"w": torch.full((1000,), 1.0), "step": 1}, overwrite=False)
        return real(self, name)

    monkeypatch.setattr(StoreClient, "is_buried", save_first)
    assert prune(root, keep_latest=1).removed == [f"{root}/step-1"]
    assert states(root) == {1: "complete", 2: "complete"}
    assert loaded(f"{root}/step-1") == 1
    assert verify(f"{root}/step-1").is_whole


def test_a_save_that_a_prune_takes_for_its_tombstone_is_put_again(
    root: str, client: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save commits between the look at the tombstone and its delete; its sweep finds the mark gone."""
    save(root, 1, 2)
    real_look, real_sweep = StoreClient.is_buried, StoreCommit._sweep
    begins_to_sweep, is_pruned = threading.Event(), threading.Event()

    def wait(self: StoreCommit, *arguments: Any) -> int:
        begins_to_sweep.set()
        assert is_pruned.wait(30)
        return real_sweep(self, *arguments)

    saving = threading.Thread(target=save, args=(root, 1))

    def save_first(self: StoreClient, name: str) -> bool:
        found = real_look(self, name)
        monkeypatch.setattr(StoreClient, "is_buried", real_look)
        monkeypatch.setattr(StoreCommit, "_sweep", wait)
        saving.start()
        assert begins_to_sweep.wait(30)
        return found

    monkeypatch.setattr(StoreClient, "is_buried", save_first)
    assert prune(root, keep_latest=1).removed == [f"{root}/step-1"]
    assert not client.exists("step-1/.metadata")
    is_pruned.set()
    saving.join()
    assert states(root) == {1: "complete", 2: "complete"}
    assert loaded(f"{root}/step-1") == 1


@pytest.mark.parametrize("remove_others", [True, False])
def test_a_checkpoint_in_a_checkpoint_stays(root: str, client: StoreClient, remove_others: bool) -> None:
    save(root, 1, 2)
    save_state_dict(f"{root}/step-1/ema", {"w": torch.full((1000,), 7.0), "step": 7})
    report = prune(root, keep_latest=1, remove_others=remove_others)
    assert report.removed == [f"{root}/step-1"]
    assert any("ema, a checkpoint of its own" in warning for warning in report.warnings)
    assert loaded(f"{root}/step-1/ema") == 7
    assert not client.exists("step-1/.metadata")


def test_ranks_that_commit_by_themselves_are_refused(root: str, client: StoreClient) -> None:
    with pytest.raises(UnsupportedError, match="use_collectives=False is for directories"):
        dcp.save({"step": 1}, storage_writer=BcpWriter(f"{root}/step-1"), use_collectives=False, no_dist=True)
    assert names(client) == set()


def test_the_metadata_that_a_save_returns_name_the_url(root: str) -> None:
    metadata = dcp.save({"w": torch.ones(3)}, storage_writer=BcpWriter(f"{root}/step-1"), no_dist=True)
    assert metadata is not None
    assert metadata.storage_meta is not None
    assert metadata.storage_meta.checkpoint_id == f"{root}/step-1"
    again = pickle.loads(pickle.dumps(metadata))
    assert [*again.state_dict_metadata] == ["w"]


def test_a_forked_child_is_refused(root: str) -> None:
    """The threads of obstore are not in the child, where every request would wait for ever."""
    save(root, 1)
    child = os.fork()
    if child == 0:
        try:
            scan_steps(root)
        except UnsupportedError as error:
            os._exit(0 if "was forked" in str(error) else 1)
        except BaseException:
            os._exit(2)
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


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
    report = prune(root, keep_latest=1)
    may_go_on.set()
    thread.join()
    assert "a load of this process reads it" in report.skipped[f"{root}/step-1"]
    assert found == [1]


# bytecheckpoint.save and load.


def train(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("role", [None, "actor"])
def test_a_training_state(root: str, client: StoreClient, role: str | None) -> None:
    model, optimizer = train(1)
    for step in (1, 2):
        state = {"model": model, "optimizer": optimizer, "extra_state": {"step": step}}
        bytecheckpoint.save(root, state, "ddp", global_steps=step, role=role)
    path = bytecheckpoint.find_latest_ckpt_path(root, role or "")
    assert path is not None
    assert path.endswith("/global_step_2")
    assert latest(root, role or "") == path
    other, its_optimizer = train(2)
    target: dict[str, Any] = {"model": other, "optimizer": its_optimizer, "extra_state": {}}
    bytecheckpoint.load(path, target, "ddp", role=role)
    assert target["extra_state"] == {"step": 2}
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name])
    folder = scan_steps(path.rpartition("/")[0])[-1]
    assert (folder.state, folder.components) == ("complete", ("extra_state", "optimizer", "model"))
    with pytest.raises(CheckpointExistsError):
        bytecheckpoint.save(root, state, "ddp", global_steps=2, role=role, overwrite=False)
    report = prune(path.rpartition("/")[0], keep_latest=1)
    assert report.removed == [path.replace("_2", "_1")]
    assert not [name for name in names(client) if "global_step_1/" in name]


def test_a_step_that_is_not_there_is_named(root: str) -> None:
    model, _ = train(1)
    bytecheckpoint.save(root, {"model": model}, "ddp", global_steps=5)
    with pytest.raises(CheckpointNotFoundError, match=r"has the steps 5: pass .*global_step_5"):
        bytecheckpoint.load(f"{root}/global_step_6", {"model": model}, "ddp")
    with pytest.raises(CheckpointNotFoundError, match="it holds the part model"):
        load_state_dict(f"{root}/global_step_5", {"w": torch.zeros(1)})


def test_a_tracker_that_names_a_step_that_is_gone(root: str, client: StoreClient) -> None:
    model, _ = train(1)
    for step in (1, 2):
        bytecheckpoint.save(root, {"model": model}, "ddp", global_steps=step)
    prune(root, keep_latest=1)
    client.put("latest_checkpointed_iteration.txt", b"1")
    with pytest.warns(RuntimeWarning, match="names step '1', which is not whole"):
        assert bytecheckpoint.find_latest_ckpt_path(root) == f"{root}/global_step_2"


# The command line.


def test_commands(root: str, client: StoreClient) -> None:
    save(root, 1, 2)
    url = f"{root}/step-2"
    assert [item["name"] for item in as_json("ls", url)["items"]] == ["step", "w"]
    assert as_json("verify", url)["is_whole"]
    assert [step["state"] for step in as_json("steps", root)["steps"]] == ["complete", "complete"]
    assert "mean 2" in run("show", url, "w").output
    difference = run("diff", f"{root}/step-1", url)
    assert difference.exit_code == 1
    assert "w" in difference.output
    assert "can be listed" in run("doctor", root).output
    name = next(name for name in names(client) if name.startswith("step-2/") and name.endswith(".distcp"))
    data = bytearray(client.get(name))
    data[4200] ^= 1
    client.put(name, bytes(data))
    damaged = run("verify", url)
    assert damaged.exit_code == 1
    assert name.rpartition("/")[2] in damaged.output


def test_commands_where_nothing_is(root: str) -> None:
    result = run("ls", root)
    assert result.exit_code == 2
    assert root in result.output
    half = run("ls", "s3:/bucket/run")
    assert half.exit_code == 2
    assert "the URL is incomplete" in half.output


def test_a_store_that_refuses(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    save(root, 1)

    def refuse(self: StoreClient, folder: str = "") -> Any:
        raise OSError(errno.EACCES, "Access Denied")

    monkeypatch.setattr(StoreClient, "_listed", refuse)
    with pytest.raises(StorageError, match=r"list\(memory://.*Access Denied") as raised:
        scan_steps(root)
    assert raised.value.errno == errno.EACCES
    assert "Access Denied" in prune(root, keep_latest=1).warnings[0]
