# SPDX-License-Identifier: Apache-2.0
"""If a rank fails while ranks share their reading, all ranks raise its error, and none hangs."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.equality import assert_equal
from support.failing_hooks import BcpFailsLate, FailsLate, Reason, Unreadable
from support.ranks import RanksFailed, failures, run_ranks
from torch.distributed.checkpoint import DefaultLoadPlanner

from bytecheckpoint import BcpLoadPlanner, BcpReader, BcpWriter, Config
from bytecheckpoint.dcp import rank_load
from bytecheckpoint.errors import CorruptCheckpointError, InvalidPlanError, RankError, StorageError
from bytecheckpoint.sharing import exchange as _exchange
from bytecheckpoint.sharing import relay as _relay
from distributed.shared_loads import COOPERATIVE, on_machines_of, replicated

MIB = 1 << 20
# For tests with `path`: ranks take units from one another's memory, or send them as messages, as between machines.
BOTH_WAYS = pytest.mark.parametrize("path", ["together", "apart"], indirect=True)


def load(path: str, planner: DefaultLoadPlanner | None = None, config: Config = COOPERATIVE) -> None:
    if "apart" in Path(path).name:
        on_machines_of(1)
    got = replicated(filled=False) | {"step": 0}
    dcp.load(got, storage_reader=BcpReader(path, config=config), planner=planner)
    assert_equal(got, replicated(filled=True) | {"step": 7})


@pytest.fixture
def path(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    saved = replicated(filled=True) | {"step": 7}
    path = tmp_path / getattr(request, "param", "together")
    dcp.save(saved, storage_writer=BcpWriter(path))
    return path


def data_file(path: str | Path) -> Path:
    return max(Path(path).glob("*.distcp"), key=lambda file: file.stat().st_size)


def damage(path: str | Path, offset: int) -> None:
    with data_file(path).open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


def own_copy(path: str) -> str:
    """Copies the checkpoint for this rank alone, and returns the path of the copy."""
    copy = f"{path}.{dist.get_rank()}"
    shutil.copytree(path, copy)
    return copy


def assert_all(found: dict[int, BaseException], ranks: int, kind: type[BaseException], text: str) -> None:
    assert {rank: type(error) for rank, error in found.items()} == dict.fromkeys(range(ranks), kind), found
    for error in found.values():
        with pytest.raises(kind, match=text):
            raise error


def is_of_another_rank(error: BaseException) -> bool:
    return any(note.startswith("raised on rank ") for note in getattr(error, "__notes__", []))


def read_damaged(path: str) -> dict[int, BaseException]:
    found = failures(partial(load, path))
    assert_all(found, 4, CorruptCheckpointError, r"read\(.*distcp, offset=5242880, 262144 bytes\): the block has CRC")
    # Only the rank that read the block raised the error itself.
    assert sum(not is_of_another_rank(error) for error in found.values()) == 1
    return found


@BOTH_WAYS
def test_a_damaged_block_is_an_error_on_all_ranks(path: Path) -> None:
    damage(path, 5 * MIB + 1000)
    run_ranks(4, read_damaged, str(path))


def read_unverified_on_rank_0(path: str) -> None:
    found = failures(partial(load, path, config=Config(shared_reading="cooperative", verify=dist.get_rank() != 0)))
    assert_all(found, 2, CorruptCheckpointError, r"read\(.*distcp, offset=0, 262144 bytes\): the block has CRC")
    assert not is_of_another_rank(found[1])  # rank 0 has read the block, and rank 1 found it out


@BOTH_WAYS
def test_what_a_rank_reads_without_verifying_is_verified_by_the_others(path: Path) -> None:
    damage(path, 1000)
    run_ranks(2, read_unverified_on_rank_0, str(path))


def read_a_copy_that_differs(path: str, spoil: Callable[[str], None], text: str) -> None:
    copy = own_copy(path)
    if dist.get_rank() == 1:
        spoil(copy)
    found = failures(partial(load, copy))
    assert_all(found, 3, CorruptCheckpointError, text)
    assert all(getattr(error, "path", "").startswith(f"{path}.1") for error in found.values())
    dist.barrier()
    if dist.get_rank() == 1:
        shutil.rmtree(copy)
        shutil.copytree(path, copy)
    dist.barrier()
    load(copy)  # the failed load left nothing behind


def spoil_much(path: str) -> None:
    """Damages so many blocks that this rank itself reads some of them."""
    for offset in range(MIB, 20 * MIB, 256 << 10):
        damage(path, offset)


def remove(path: str) -> None:
    data_file(path).unlink()


def cut(path: str) -> None:
    os.truncate(data_file(path), 3 * MIB)


@pytest.mark.parametrize(
    ("spoil", "text"),
    [(spoil_much, "block has CRC"), (remove, "is missing"), (cut, "the file has only 3145728 bytes")],
)
def test_a_rank_whose_disk_fails_fails_all(path: Path, spoil: Callable[[str], None], text: str) -> None:
    run_ranks(3, read_a_copy_that_differs, str(path), spoil, text)


class FailingRun:
    """A SharedRun of rank 1 whose disk fails after ``at`` units."""

    def __init__(self, run: Any, at: int) -> None:
        self._run = run
        self._left = at

    def next_own(self, wait: bool) -> Any:
        read = self._run.next_own(wait)
        self._left -= read is not None
        if self._left < 0:
            raise StorageError("pread(disk): Input/output error", "disk", 5)
        return read

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)


def disk_fails(path: str) -> None:
    begin = _relay.Relay._begin
    for at in (0, 1, 2):

        def failing(relay: Any, at: int = at) -> None:
            if at == 0 and relay._rank == 1:
                raise StorageError("mmap(ring of slots): Cannot allocate memory", "ring", 12)
            begin(relay)
            if relay._rank == 1:
                relay._job = FailingRun(relay._job, at)

        _relay.Relay._begin = failing  # type: ignore[method-assign]
        assert_all(failures(partial(load, path)), 4, StorageError, "Cannot allocate" if at == 0 else "Input/output")
        _relay.Relay._begin = begin  # type: ignore[method-assign]
        load(path)


@BOTH_WAYS
def test_a_disk_that_fails_in_the_middle(path: Path) -> None:
    run_ranks(4, disk_fails, str(path))


def hooks_raise(path: str, failing: Any) -> None:
    for hook in ("resolve_tensor", "commit_tensor", "load_bytes"):
        for rank in (0, 2):
            found = failures(partial(load, path, failing(hook=hook, rank=rank)))
            assert_all(found, 3, Reason, f"{hook} on rank {rank}")
    found = failures(partial(load, path, failing(hook="load_bytes", rank=1, error=Unreadable("this", "that"))))
    assert_all(found, 3, RankError, "Unreadable: this and that")
    found = failures(partial(load, path, failing(hook="load_bytes", rank=1, error=KeyboardInterrupt("stop"))))
    assert type(found[1]) is KeyboardInterrupt
    assert {type(found[0]), type(found[2])} == {RankError}
    assert str(found[0]) == "KeyboardInterrupt: stop"
    load(path)


@pytest.mark.parametrize("failing", [FailsLate, BcpFailsLate])
def test_a_hook_of_the_planner_raises(path: Path, failing: Any) -> None:
    run_ranks(3, hooks_raise, str(path), failing)


def interrupted(path: str) -> None:
    receive = _relay.Relay._receive

    def receive_and_press(relay: Any) -> None:
        if dist.get_rank() == 1 and len(relay._announced) == 1:
            os.kill(os.getpid(), signal.SIGINT)
        receive(relay)

    _relay.Relay._receive = receive_and_press  # type: ignore[method-assign]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    found = failures(partial(load, path))
    _relay.Relay._receive = receive  # type: ignore[method-assign]
    assert type(found[1]) is KeyboardInterrupt
    assert [type(found[rank]) for rank in (0, 2)] == [RankError, RankError]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    load(path)


@BOTH_WAYS
def test_ctrl_c_on_one_rank_ends_the_load_on_all(path: Path) -> None:
    run_ranks(3, interrupted, str(path))


def interrupted_when_done(path: str) -> None:
    begin = _exchange.Exchange._round

    def round_and_press(exchange: Any, job: Any, statement: Any) -> Any:
        done = begin(exchange, job, statement)
        if dist.get_rank() == 1 and statement.is_done:
            raise KeyboardInterrupt
        return done

    _exchange.Exchange._round = round_and_press  # type: ignore[method-assign]
    # Objects are sent in a separate round, in which rank 1 has nothing left to do.
    got = replicated(filled=False) | {"step": 0} if dist.get_rank() != 1 else {}
    reader = BcpReader(path, config=COOPERATIVE)
    found = failures(partial(dcp.load, got, storage_reader=reader, planner=BcpLoadPlanner()))
    assert [type(found[rank]) for rank in range(3)] == [RankError, KeyboardInterrupt, RankError]


def test_ctrl_c_on_a_rank_that_waits_for_the_others(path: Path) -> None:
    run_ranks(3, interrupted_when_done, str(path))


def lose_a_rank(path: str, step: str) -> None:
    if dist.get_rank() == 1:
        target: Any = _exchange.Exchange if step == "_gather" else _relay.Relay
        setattr(target, step, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    try:
        load(path)
    except BaseException as error:
        raise ValueError(f"seen by {dist.get_rank()}: {getattr(error, 'failures', error)}") from None


# Before and after others may read what the rank has read; before it says that it has taken what others have read.
@BOTH_WAYS
@pytest.mark.parametrize("step", ["_send_read", "_reclaim", "_take", "_gather"])
def test_a_rank_that_is_killed_ends_the_load_on_all(path: Path, step: str) -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(4, lose_a_rank, str(path), step, limit_s=40)
    text = str(caught.value)
    assert "rank 1 did not end, or died" in text
    assert all(f"seen by {rank}" in text for rank in (0, 2, 3)), text


def different_checkpoints(path: str, other: str) -> None:
    found = failures(partial(load, path if dist.get_rank() == 0 else other))
    assert_all(found, 2, InvalidPlanError, "read different checkpoints")


def test_ranks_that_read_different_checkpoints_of_other_writers(tmp_path: Path) -> None:
    for name in ("one", "two"):
        saved = replicated(filled=True) | {"step": 7}
        dcp.save(saved, storage_writer=dcp.FileSystemWriter(tmp_path / name))
    run_ranks(2, different_checkpoints, str(tmp_path / "one"), str(tmp_path / "two"))


def partial_on_one_rank(path: str) -> None:
    got = replicated(filled=False) | {"absent": torch.ones(2)}
    planner = BcpLoadPlanner(allow_partial_load=dist.get_rank() == 1)
    found = failures(lambda: dcp.load(got, storage_reader=BcpReader(path, config=COOPERATIVE), planner=planner))
    assert list(found) == [0]
    planner = BcpLoadPlanner(allow_partial_load=True)
    rank_load._COPY_BYTES = MIB if dist.get_rank() == 1 else 64 * MIB  # so it has more rounds than rank 0
    if dist.get_rank() == 1:
        got["t0"] = got["t0"].double()
    dcp.load(got, storage_reader=BcpReader(path, config=COOPERATIVE), planner=planner)
    assert torch.equal(got["t0"].int(), replicated(filled=True)["t0"])
    assert torch.equal(got["absent"], torch.ones(2))


def test_a_rank_that_leaves_out_what_is_missing(path: Path) -> None:
    run_ranks(2, partial_on_one_rank, str(path))
