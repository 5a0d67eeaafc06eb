# SPDX-License-Identifier: Apache-2.0
"""Saves go to the right path and leave no old files: with a writer or path used again, and in groups of all kinds."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.equality import assert_equal, without_strides
from support.ranks import run_ranks
from support.sharded_states import state
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata

from bytecheckpoint import BcpReader, BcpWriter


def assert_is_read(returned: Metadata, path: str | Path) -> None:
    """Asserts that a save returned the metadata that are read, except for the id that each load has of its own."""
    read = BcpReader(path).read_metadata()
    assert returned.storage_meta is not None
    assert read.storage_meta is not None
    returned.storage_meta.load_id = read.storage_meta.load_id
    assert without_strides(returned) == read


def small(number: int) -> dict[str, Any]:
    return {"tensor": torch.full((100,), number), "number": number}


def load_small(path: str | None, number: int, **arguments: Any) -> None:
    got = small(0)
    dcp.load(got, storage_reader=BcpReader(path or "nowhere"), **arguments)
    assert_equal(got, small(number))


def names(path: str) -> set[str]:
    return {entry.name for entry in Path(path).iterdir() if entry.is_file()}


def save_again(root: str) -> None:
    one, other = f"{root}/one", f"{root}/other"
    writer = BcpWriter(one)
    seen: set[str] = set()
    for number in (1, 2, 3):
        metadata = dcp.save(small(number), storage_writer=writer)
        load_small(one, number)
        files = {info.relative_path for info in metadata.storage_data.values()}
        assert names(one) == files | {".metadata"}, "files of an earlier save were left"
        assert not files & seen, "a file name was used again"
        seen |= files
        dist.barrier()
    for number in (4, 5, 6, 7):
        path = one if number % 2 else other
        dcp.save(small(number), checkpoint_id=path, storage_writer=writer)
        assert writer.last_report is not None
        assert writer.last_report.path == path
        load_small(path, number)
        load_small(None, number, checkpoint_id=path)
    load_small(one, 7)
    load_small(other, 6)


def save_with_cached_plans(path: str) -> None:
    # With this setting ranks get their final plan from a cache of DCP, not from the coordinator.
    for number in (1, 2, 3):
        metadata = dcp.save(
            small(number), storage_writer=BcpWriter(path), planner=DefaultSavePlanner(enable_plan_caching=True)
        )
        assert_is_read(metadata, path)
        gc.collect()
        load_small(path, number)
        dist.barrier()


def save_report_with_cached_plans(path: str) -> None:
    for number in (1, 2):
        writer = BcpWriter(path)
        metadata = dcp.save(small(number), storage_writer=writer, planner=DefaultSavePlanner(enable_plan_caching=True))
        assert isinstance(metadata, Metadata)
        assert writer.last_report is not None
        assert metadata.storage_meta is not None
        # The other ranks learn the id when DCP broadcasts the metadata. By then their writers have done their part.
        told = metadata.storage_meta.save_id if dist.get_rank() == 0 else "bcp1-"
        assert told == f"bcp1-{writer.last_report.save_id}"


def save_alone(root: str) -> None:
    rank = dist.get_rank()
    path = f"{root}/{rank}"
    for number in (1, 2):
        dcp.save(small(number + rank), storage_writer=BcpWriter(path), no_dist=True)
        load_small(path, number + rank, no_dist=True)


def save_in_subgroups(root: str) -> None:
    rank = dist.get_rank()
    groups = [dist.new_group([0, 3]), dist.new_group([1, 2])]
    mine = groups[0 if rank in (0, 3) else 1]
    path = f"{root}/{'outer' if rank in (0, 3) else 'inner'}"
    number = 1 if rank in (0, 3) else 2
    for _ in range(2):
        dcp.save(small(number), storage_writer=BcpWriter(path), process_group=mine)
        load_small(path, number, process_group=mine)
    # A group of all four ranks in another order.
    turned = dist.new_group([3, 1, 0, 2])
    dcp.save(state("saved", filled=True), storage_writer=BcpWriter(f"{root}/all"), process_group=turned)
    got = state("moved", filled=False)
    dcp.load(got, storage_reader=BcpReader(f"{root}/all"), process_group=turned)
    assert_equal(got, state("moved", filled=True))


def test_one_writer_many_saves(tmp_path: Path) -> None:
    run_ranks(2, save_again, str(tmp_path))


def test_cached_plans(tmp_path: Path) -> None:
    run_ranks(2, save_with_cached_plans, str(tmp_path / "ckpt"))


def test_the_report_names_the_save_with_cached_plans(tmp_path: Path) -> None:
    run_ranks(2, save_report_with_cached_plans, str(tmp_path / "ckpt"))


def test_no_dist_while_a_group_exists(tmp_path: Path) -> None:
    run_ranks(2, save_alone, str(tmp_path))


def test_subgroups_at_once(tmp_path: Path) -> None:
    run_ranks(4, save_in_subgroups, str(tmp_path))


def test_no_group_at_all(tmp_path: Path) -> None:
    writer = BcpWriter(tmp_path / "unused")
    for number in (1, 2, 3):
        metadata = dcp.save(small(number), storage_writer=writer, checkpoint_id=tmp_path / "ckpt")
        assert_is_read(metadata, tmp_path / "ckpt")
        load_small(str(tmp_path / "ckpt"), number)
    assert not (tmp_path / "unused").exists()
