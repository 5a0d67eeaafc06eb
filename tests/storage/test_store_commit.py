# SPDX-License-Identifier: Apache-2.0
"""Saves below a URL happen completely or not at all, whatever a store answers. The store is one in memory."""

from __future__ import annotations

import errno
import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from bytecheckpoint import (
    BcpLoadPlanner,
    BcpSavePlanner,
    BcpWriter,
    Config,
    load_state_dict,
    registered,
    save_state_dict,
    verify,
)
from bytecheckpoint.errors import (
    CheckpointChangedError,
    CheckpointError,
    CheckpointSupersededError,
    CorruptCheckpointError,
    SaveCancelledError,
    SaveFailedError,
    StorageError,
)
from bytecheckpoint.storage.object_store import commit
from bytecheckpoint.storage.object_store.client import PART_BYTES, StoreClient
from bytecheckpoint.storage.object_store.folder import StoreFolder
from bytecheckpoint.training_state.stored import Stored

NUMEL = 3_000_000  # of float32: two parts


@pytest.fixture
def url(root: str) -> str:
    """Returns a URL below which there is nothing; ``client`` is for the same."""
    return root


def state(step: int) -> dict[str, Any]:
    return {"w": torch.full((NUMEL,), float(step)), "nested": {"b": torch.arange(step)}, "step": step}


def loaded(url: str) -> int:
    """The step of the checkpoint there, after all of it was compared."""
    found: dict[str, Any] = {"w": torch.zeros(NUMEL), "step": 0}
    load_state_dict(url, found)
    assert (found["w"] == found["step"]).all()
    assert verify(url).is_whole
    return int(found["step"])


def data_files(client: StoreClient) -> set[str]:
    return {name for name in client.names() if name.endswith(".distcp")}


@pytest.mark.parametrize("numel", [0, 1, (8 << 20) // 4 - 3000, 4 << 20])
def test_sizes_around_that_of_a_part(url: str, numel: int) -> None:
    """The last part is whole, short, or the only one."""
    value = torch.arange(numel, dtype=torch.float32)
    save_state_dict(url, {"w": value})
    found = {"w": torch.zeros(numel)}
    load_state_dict(url, found)
    assert torch.equal(found["w"], value)


def test_a_rank_that_writes_more_than_one_object_may_hold(
    url: str, client: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a limit of three parts. The real one is 9,900, which are 77 GiB."""
    monkeypatch.setattr(StoreFolder, "most_file_bytes", 3 * PART_BYTES)
    values = {f"w{i}": torch.full((1_500_000,), float(i)) for i in range(12)}  # 6 MB each
    report = save_state_dict(url, values)
    assert report.total_bytes > 72_000_000
    assert len(data_files(client)) == 3
    found = {name: torch.zeros(1_500_000) for name in values}
    load_state_dict(url, found)
    assert all(torch.equal(found[name], values[name]) for name in values)
    assert verify(url).is_whole
    with pytest.raises(SaveFailedError, match=r"UnsupportedError: .*shard the tensor"):
        save_state_dict(url, {"w": torch.zeros(7_000_000)})
    load_state_dict(url, found)
    assert len(data_files(client)) == 3


@pytest.mark.parametrize("raised", [KeyboardInterrupt, SystemExit])
def test_what_a_handler_of_a_signal_raises_ends_a_request(
    url: str, monkeypatch: pytest.MonkeyPatch, raised: type[BaseException]
) -> None:
    """It arrives in the main thread while the engine waits for the store. The caller gets it, and no error of ours."""
    save_state_dict(url, state(1))

    def interrupt(self: StoreClient, name: str) -> Any:
        assert threading.current_thread() is threading.main_thread()
        raise raised("of a handler")

    monkeypatch.setattr(StoreClient, "open", interrupt)
    with pytest.raises(raised, match="of a handler"):
        Stored(url, Config(io_timeout_s=0))
    monkeypatch.undo()
    assert loaded(url) == 1


def test_what_only_another_thread_raises_is_an_error_of_the_store(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A panic in obstore is no Exception. It must not be raised in the main thread, which may be training."""

    class Panic(BaseException):
        pass

    def panic(self: StoreClient, *arguments: Any) -> Any:
        raise Panic("in Rust")

    save_state_dict(url, state(1))
    with monkeypatch.context() as patch:
        patch.setattr(StoreClient, "open", panic)
        with pytest.raises(StorageError, match="Panic: in Rust"):
            Stored(url, Config(io_timeout_s=60))
        sum(range(100_000))  # whatever waits to be raised here is raised now
    assert loaded(url) == 1


def test_damage_between_what_is_wanted(url: str, client: StoreClient) -> None:
    """A small gap is read to save a request, but what is damaged there does not matter."""
    save_state_dict(url, {name: torch.full((200_000,), 1.0) for name in "abc"})  # 0.8 MB each
    (name,) = data_files(client)
    data = bytearray(client.get(name))
    data[len(data) // 2] ^= 1
    client.put(name, bytes(data))
    found = {name: torch.zeros(200_000) for name in "ac"}
    load_state_dict(url, found)
    assert all(bool((value == 1.0).all()) for value in found.values())
    with pytest.raises(CorruptCheckpointError):
        load_state_dict(url, {"b": torch.zeros(200_000)})


def test_calls_of_dcp_after_register(url: str) -> None:
    with registered():
        dcp.save(state(5), checkpoint_id=url, no_dist=True)
        future = dcp.async_save(state(6), checkpoint_id=url, no_dist=True)
        future.result(60)
        found = {"w": torch.zeros(NUMEL), "step": 0}
        dcp.load(found, checkpoint_id=url, no_dist=True)
    assert found["step"] == 6
    assert loaded(url) == 6


def failing(monkeypatch: pytest.MonkeyPatch, name: str, number: int, after: bool = False) -> None:
    """Call ``name`` of a client number ``number`` fails, ``after`` it has had its effect or before."""
    whole: Callable[..., Any] = getattr(StoreClient, name)
    calls = itertools.count()

    def fail(self: StoreClient, *args: Any, **kwargs: Any) -> Any:
        if next(calls) != number:
            return whole(self, *args, **kwargs)
        if after:
            whole(self, *args, **kwargs)
        raise OSError(errno.EIO, "the connection was reset")

    monkeypatch.setattr(StoreClient, name, fail)


def test_a_lost_reply_of_the_commit(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    save_state_dict(url, state(1))
    with monkeypatch.context() as patched:
        failing(patched, "put_if", 0, after=True)
        save_state_dict(url, state(2))
    assert loaded(url) == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_whatever_is_raised_behind_the_commit_removes_nothing_of_it(
    url: str, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """Ctrl-C in the sweep, for one: the save seems to have failed, and its files must stay all the same."""
    save_state_dict(url, state(1))

    def interrupt(self: StoreClient) -> Any:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(StoreClient, "entries", interrupt)
        with pytest.raises((error, CheckpointError)):
            save_state_dict(url, state(2))
    assert loaded(url) == 2


def test_a_commit_that_did_not_arrive(url: str, client: StoreClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may still arrive: so the data files stay."""
    save_state_dict(url, state(1))
    with monkeypatch.context() as patched:
        failing(patched, "put_if", 0)
        with pytest.raises(StorageError, match="not known whether the save is committed"):
            save_state_dict(url, state(2))
    assert loaded(url) == 1
    assert len(data_files(client)) == 2


def test_a_store_that_does_not_say_what_is_there(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit.time, "sleep", lambda seconds: None)
    with monkeypatch.context() as patched:
        failing(patched, "put_if", 0, after=True)
        patched.setattr(StoreClient, "get_with_meta", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "no answer")))
        with pytest.raises(StorageError, match="not known whether the save is committed"):
            save_state_dict(url, state(1))
    assert loaded(url) == 1


@pytest.mark.parametrize("of_first", [0, 1], ids=["create", "replace"])
def test_of_two_saves_at_once_one_commits(url: str, client: StoreClient, of_first: int) -> None:
    if of_first:
        save_state_dict(url, state(of_first))

    class Overtaken(BcpSavePlanner):
        def finish_plan(self, *args: Any) -> Any:  # the slower save has begun
            done.append(save_state_dict(url, state(2), no_dist=True))
            return super().finish_plan(*args)

    done: list[Any] = []
    with pytest.raises(CheckpointSupersededError, match="another one committed"):
        save_state_dict(url, state(3), planner=Overtaken())
    assert len(done) == 1
    assert loaded(url) == 2
    assert len(data_files(client)) == 1


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("name", ["head", "open", "read", "entries", "delete"])
def test_each_call_of_a_save_that_fails(
    url: str, monkeypatch: pytest.MonkeyPatch, name: str, number: int, after: bool
) -> None:
    """Old or new, whole; and an error if it is the old one."""
    save_state_dict(url, state(1))
    wanted = 2
    with monkeypatch.context() as patched:
        failing(patched, name, number, after)
        try:
            save_state_dict(url, state(2))
        except StorageError as error:
            wanted = 1 if error.errno == errno.EIO else 0
    assert loaded(url) == wanted


@pytest.mark.parametrize("number", range(2))
def test_an_upload_that_fails(url: str, client: StoreClient, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """After so many parts: nothing waits for the slots, and nothing is left."""
    save_state_dict(url, state(1))
    whole = StoreClient.upload

    def fail(self: StoreClient, name: str, parts: Any) -> Any:
        def some() -> Any:
            yield from itertools.islice(parts, number)
            raise OSError(errno.ECONNRESET, "the connection was reset")

        class Some:
            fail = parts.fail

            def __iter__(self) -> Any:
                return some()

        return whole(self, name, Some())

    with monkeypatch.context() as patched:
        patched.setattr(StoreClient, "upload", fail)
        with pytest.raises(SaveFailedError, match="connection was reset"):
            save_state_dict(url, state(2))
    assert loaded(url) == 1
    assert len(data_files(client)) == 1


def test_an_upload_to_what_is_gone(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A URL is no directory that a rank may not see: the error is that of the store."""

    def fail(*_: Any) -> Any:
        raise FileNotFoundError(errno.ENOENT, "there is no such upload")

    monkeypatch.setattr(StoreClient, "upload", fail)
    with pytest.raises(SaveFailedError, match="there is no such upload") as caught:
        save_state_dict(url, state(1))
    assert "not shared" not in str(caught.value)


def test_a_save_that_is_cancelled(url: str, client: StoreClient) -> None:
    save_state_dict(url, state(1))
    writer = BcpWriter(url)

    class Cancelling(BcpSavePlanner):
        def resolve_data(self, item: Any) -> Any:
            writer.cancel()
            return super().resolve_data(item)

    with pytest.raises(CheckpointException) as caught:
        dcp.save(state(2), storage_writer=writer, planner=Cancelling(), no_dist=True)
    failed = caught.value.failures[0][0]
    assert isinstance(failed, SaveFailedError)
    assert isinstance(failed.reasons[0], SaveCancelledError)
    assert loaded(url) == 1
    assert len(data_files(client)) == 1


def test_the_sweep_leaves_what_may_be_being_written(
    url: str, client: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.put_if("__7_0.0123456789abcdef.distcp", b"of a save that runs, or of one that died", None)
    client.put_if("notes.txt", b"of somebody else", None)
    save_state_dict(url, state(1))
    assert "__7_0.0123456789abcdef.distcp" in client.names()
    monkeypatch.setattr(commit, "_LEAST_GRACE_S", 0.0)
    config = Config(commit_deadline_s=1e-9)
    with pytest.raises(CheckpointSupersededError, match="1e-09 s have passed"):
        save_state_dict(url, state(2), config=config)
    monkeypatch.setattr(commit, "sweep_grace_s", lambda deadline_s: -1.0)
    save_state_dict(url, state(3))
    assert "__7_0.0123456789abcdef.distcp" not in client.names()
    assert "notes.txt" in client.names()
    assert loaded(url) == 3


def test_a_checkpoint_that_is_replaced_while_it_is_read(url: str) -> None:
    """What is loaded is of one save: the load begins again, or says that there is a newer one."""
    save_state_dict(url, state(1))

    class Late(BcpLoadPlanner):
        def create_local_plan(self) -> Any:
            if not done:
                done.append(save_state_dict(url, state(2), no_dist=True))
            return super().create_local_plan()

    done: list[Any] = []
    with pytest.raises(CheckpointChangedError):
        load_state_dict(url, {"w": torch.zeros(NUMEL), "step": 0}, planner=Late())
    assert loaded(url) == 2


def test_two_urls_in_two_threads(url: str) -> None:
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for step in (1, 2):
                save_state_dict(f"{url}/{number}", state(10 * number + step), no_dist=True)
            assert loaded(f"{url}/{number}") == 10 * number + 2
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
