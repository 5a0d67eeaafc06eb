# SPDX-License-Identifier: Apache-2.0
"""With ``use_collectives=False`` each rank commits a part of its own, and loads that part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.ranks import failures, run_ranks
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from bytecheckpoint import BcpReader, BcpWriter, verify
from bytecheckpoint.errors import (
    CheckpointBusyError,
    CheckpointChangedError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
)


class Counter:
    """A Stateful: DCP asks it for its state, and gives it back."""

    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "seen": torch.full((3,), self.count)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert torch.equal(state["seen"], torch.full((3,), state["count"]))
        self.count = state["count"]


def state(generation: int) -> dict[str, Any]:
    """Returns a state that differs from rank to rank."""
    rank = dist.get_rank()
    return {
        "weight": torch.arange(100_000, dtype=torch.float32) + 7 * rank + generation,
        f"only_on_{rank}": torch.full((5,), rank),
        "step": 10 * rank + generation,
        "counter": Counter(100 * rank + generation),
    }


def blank() -> dict[str, Any]:
    rank = dist.get_rank()
    return {
        "weight": torch.zeros(100_000),
        f"only_on_{rank}": torch.zeros(5, dtype=torch.int64),
        "step": -1,
        "counter": Counter(-1),
    }


def assert_loads(reader: dcp.StorageReader, generation: int) -> None:
    got, wanted = blank(), state(generation)
    dcp.load(got, storage_reader=reader)
    for name, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(got[name], value)
        elif isinstance(value, Counter):
            assert got[name].count == value.count
        else:
            assert got[name] == value


def names(path: str) -> list[str]:
    return sorted(entry.name for entry in Path(path).iterdir() if entry.is_file())


def save_and_load(path: str) -> None:
    rank = dist.get_rank()
    for generation in (1, 2):
        metadata = dcp.save(state(generation), storage_writer=BcpWriter(path), use_collectives=False)
        assert metadata.storage_data
        assert_loads(BcpReader(path), generation)
        assert_loads(dcp.FileSystemReader(path), generation)
        dist.barrier()
    listing = names(path)
    marks = [f"__{r}.metadata" for r in range(dist.get_world_size())]
    assert [name for name in listing if name.endswith(".metadata")] == marks
    assert len(listing) == 2 * len(marks), "files of the first generation are swept"
    report = verify(path)
    assert report.is_whole
    assert len(report.save_ids) == report.num_files == len(marks)
    dist.barrier()
    # A save with collectives replaces all parts.
    dcp.save({"weight": torch.ones(4)}, storage_writer=BcpWriter(path))
    assert not [name for name in names(path) if name in marks]
    dist.barrier()
    # Parts must not hide it.
    with pytest.raises(CheckpointExistsError, match=r"\.metadata of a save with collectives is there"):
        dcp.save(state(3), storage_writer=BcpWriter(path), use_collectives=False)
    got = {"weight": torch.zeros(4)}
    dcp.load(got, storage_reader=BcpReader(path))
    assert torch.equal(got["weight"], torch.ones(4)), rank


def part_of_another_rank(path: str, stock: bool) -> None:
    rank = dist.get_rank()
    if rank < 2:
        writer = dcp.FileSystemWriter(path) if stock else BcpWriter(path)
        group = dist.new_group([0, 1], use_local_synchronization=True)
        dcp.save(state(1), storage_writer=writer, use_collectives=False, process_group=group)
        got = blank()
        dcp.load(got, storage_reader=BcpReader(path), process_group=group)
        assert torch.equal(got["weight"], state(1)["weight"])
    dist.barrier()
    found = failures(lambda: dcp.load(blank(), storage_reader=BcpReader(path)))
    assert type(found[2]) is CheckpointNotFoundError
    assert "rank" in str(found[2])
    assert "__0.metadata, __1.metadata" in str(found[2])


def refused_while_another_saves(path: str) -> None:
    """A save of all ranks and a save of one rank exclude each other. Saves of different ranks do not."""
    from bytecheckpoint.native import _C

    rank = dist.get_rank()
    common: dict[str, Any] = {
        "directory": path,
        "overwrite": True,
        "take_over": False,
        "sync": False,
        "direct_io": True,
        "reserve_bytes": 0,
        "about": b"",
        "deadline_s": 60.0,
        "visibility_timeout_s": 0.0,
        "io_timeout_s": 60.0,
    }
    own = _C.Commit(save_id=_C.draw_save_id(), rank=rank, **common)
    dist.barrier()
    with pytest.raises(CheckpointBusyError):
        _C.Commit(save_id=_C.draw_save_id(), rank=None, **common)
    with pytest.raises(CheckpointBusyError):
        _C.Commit(save_id=_C.draw_save_id(), rank=1 - rank, **common)
    dist.barrier()
    own.abandon()
    dist.barrier()
    if rank == 0:
        everything = _C.Commit(save_id=_C.draw_save_id(), rank=None, **common)
        with pytest.raises(CheckpointBusyError):
            _C.Commit(save_id=_C.draw_save_id(), rank=5, **common)
        everything.abandon()
    dist.barrier()


def fails_on_one_rank(path: str) -> None:
    """One rank fails. Nothing undoes what the other ranks commit, and the failing rank keeps its old part."""
    rank = dist.get_rank()
    dcp.save(state(1), storage_writer=BcpWriter(path), use_collectives=False)
    dist.barrier()
    if rank == 1:
        value = {"weight": torch.ones(2, 2).to_sparse()}
        with pytest.raises(Exception, match="'weight'"):
            dcp.save(value, storage_writer=BcpWriter(path), use_collectives=False)
        dist.barrier()  # the other rank waits in it
    else:
        dcp.save(state(2), storage_writer=BcpWriter(path), use_collectives=False)
    assert_loads(BcpReader(path), 1 if rank == 1 else 2)


def test_each_rank_has_its_part(tmp_path: Path) -> None:
    run_ranks(3, save_and_load, str(tmp_path / "ckpt"))


@pytest.mark.parametrize("stock", [False, True])
def test_a_rank_without_a_part(tmp_path: Path, stock: bool) -> None:
    run_ranks(3, part_of_another_rank, str(tmp_path / "ckpt"), stock)


def test_saves_at_once(tmp_path: Path) -> None:
    run_ranks(2, refused_while_another_saves, str(tmp_path / "ckpt"))


def test_failure_of_one_rank(tmp_path: Path) -> None:
    run_ranks(2, fails_on_one_rank, str(tmp_path / "ckpt"))


def test_one_process(tmp_path: Path) -> None:
    """Without a process group there is one rank, number 0."""
    value = {"a": torch.arange(5), "counter": Counter(3)}
    dcp.save(value, storage_writer=BcpWriter(tmp_path), use_collectives=False)
    got = {"a": torch.zeros(5, dtype=torch.int64), "counter": Counter(0)}
    dcp.load(got, storage_reader=BcpReader(tmp_path))
    assert torch.equal(got["a"], torch.arange(5))
    assert got["counter"].count == 3  # type: ignore[attr-defined]


def test_overwrite_false_keeps_the_parts(tmp_path: Path) -> None:
    """A save with collectives would remove the parts, and they are a checkpoint."""
    for writer in (BcpWriter, dcp.FileSystemWriter):
        path = tmp_path / writer.__name__
        dcp.save({"a": torch.arange(5)}, storage_writer=writer(path), use_collectives=False)  # type: ignore[operator]
        before = names(str(path))
        with pytest.raises(CheckpointException) as caught:
            dcp.save({"a": torch.zeros(5)}, storage_writer=BcpWriter(path, overwrite=False))
        ((error, _),) = caught.value.failures.values()
        assert type(error) is CheckpointExistsError
        assert "__0.metadata" in str(error)
        assert names(str(path)) == before


def test_metadata_that_cannot_be_used_do_not_lead_to_an_older_part(tmp_path: Path) -> None:
    """DCP would continue with `__0.metadata`, which holds other values."""
    dcp.save({"a": torch.arange(5)}, storage_writer=dcp.FileSystemWriter(tmp_path), use_collectives=False)
    mark = (tmp_path / "__0.metadata").read_bytes()
    (tmp_path / ".metadata").write_bytes(mark[: len(mark) // 2])
    got = {"a": torch.zeros(5, dtype=torch.int64)}
    with pytest.raises(CheckpointException) as caught:
        dcp.load(got, storage_reader=BcpReader(tmp_path))
    ((error, _),) = caught.value.failures.values()
    assert type(error) is CorruptCheckpointError
    assert torch.equal(got["a"], torch.zeros(5, dtype=torch.int64))


def load_some_of_each(path: str) -> None:
    """Loads while one rank sees the save with collectives, and the other still sees its own part."""

    class Late(BcpReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
            if dist.get_rank() == 1 and "rank" not in kwargs:
                self._error = CheckpointNotFoundError("not there yet")
                raise self._error
            return super().read_metadata(*args, **kwargs)

    found = failures(lambda: dcp.load({"a": torch.zeros(5)}, storage_reader=Late(path)))
    assert {type(error) for error in found.values()} == {CheckpointChangedError}


def test_ranks_read_one_save_or_each_its_own(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(5)}, storage_writer=BcpWriter(tmp_path), use_collectives=False)
    part = (tmp_path / "__0.metadata").read_bytes()
    dcp.save({"a": torch.ones(5)}, storage_writer=BcpWriter(tmp_path))
    (tmp_path / "__1.metadata").write_bytes(part)
    run_ranks(2, load_some_of_each, str(tmp_path))
