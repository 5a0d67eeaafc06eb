# SPDX-License-Identifier: Apache-2.0
"""A load reads only the blocks that hold wanted bytes, each once."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from bytecheckpoint import BcpReader, BcpWriter
from bytecheckpoint.report import LoadReport

BLOCK = 256 << 10
ROWS, COLUMNS = 1024, 4096  # 16 KiB a row, 16 MiB in all


def big() -> torch.Tensor:
    return torch.arange(ROWS * COLUMNS, dtype=torch.int32).reshape(ROWS, COLUMNS)


def load(path: str, dim: int) -> LoadReport:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    target = distribute_tensor(torch.zeros(ROWS, COLUMNS, dtype=torch.int32), mesh, [Shard(dim)], src_data_rank=None)
    reader = BcpReader(path)
    dcp.load({"big": target}, storage_reader=reader)
    assert torch.equal(target.to_local(), big().chunk(dist.get_world_size(), dim)[dist.get_rank()])
    report = reader.last_report
    assert report is not None
    return report


def load_one_column(path: str) -> LoadReport:
    """Loads a few columns on each rank. A row of the tensor has two blocks, and one of them is wanted."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shape = (6, 2 * BLOCK)
    target = distribute_tensor(torch.zeros(shape, dtype=torch.uint8), mesh, [Shard(1)], src_data_rank=None)
    narrow = target.to_local()[:, 1000:1100]
    reader = BcpReader(path)
    dcp.load({"wide": target}, storage_reader=reader)
    assert torch.equal(narrow, wide()[:, dist.get_rank() * shape[1] // dist.get_world_size() :][:, 1000:1100])
    assert reader.last_report is not None
    return reader.last_report


def wide() -> torch.Tensor:
    return (torch.arange(6 * 2 * BLOCK) % 251).to(torch.uint8).reshape(6, 2 * BLOCK)


def test_a_quarter_of_the_rows_costs_a_quarter(tmp_path: Path) -> None:
    dcp.save({"big": big()}, storage_writer=BcpWriter(tmp_path))
    total = big().nbytes
    for report in run_ranks(4, load, str(tmp_path), 0):
        assert report.bytes_wanted == total // 4
        assert report.num_files == report.num_boxes == 1
        # It reads whole blocks, and the record begins in the middle of one.
        assert total // 4 <= report.bytes_read <= total // 4 + 2 * BLOCK


def test_columns_share_blocks_and_each_is_read_once(tmp_path: Path) -> None:
    dcp.save({"big": big()}, storage_writer=BcpWriter(tmp_path))
    total = big().nbytes
    for report in run_ranks(4, load, str(tmp_path), 1):
        assert report.bytes_wanted == total // 4
        assert report.bytes_read <= total + 2 * BLOCK  # every block holds wanted bytes of every rank


def test_narrow_columns_of_long_rows_cost_a_block_a_row(tmp_path: Path) -> None:
    dcp.save({"wide": wide()}, storage_writer=BcpWriter(tmp_path))
    for report in run_ranks(8, load_one_column, str(tmp_path)):
        assert report.bytes_wanted == wide().nbytes // 8
        # 64 KiB of each row of 512 KiB: in one block, or across the border of two.
        assert report.bytes_read <= 6 * 2 * BLOCK


def test_one_small_tensor_costs_one_block_or_two(tmp_path: Path) -> None:
    state = {"big": big(), "small": torch.arange(10)}
    dcp.save(state, storage_writer=BcpWriter(tmp_path))
    got = {"small": torch.zeros(10, dtype=torch.int64)}
    reader = BcpReader(tmp_path)
    dcp.load(got, storage_reader=reader)
    assert torch.equal(got["small"], state["small"])
    assert reader.last_report is not None
    assert reader.last_report.bytes_wanted == 80
    assert reader.last_report.bytes_read <= 2 * BLOCK
