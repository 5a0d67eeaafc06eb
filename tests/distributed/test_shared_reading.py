# SPDX-License-Identifier: Apache-2.0
"""Ranks that want the same bytes read each of them once, and send them to one another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from bytecheckpoint import BcpLoadPlanner, BcpReader, BcpWriter, Config
from bytecheckpoint.report import LoadReport
from distributed.ranks import run_ranks
from distributed.states import check

MIB = 1 << 20
COOPERATIVE = Config(shared_reading="cooperative")


def values(name: int, shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(name)
    return torch.randint(-(1 << 30), 1 << 30, shape, generator=generator, dtype=torch.int32)


SHAPES = [(1024, 1024), (333, 4097), (7,), (2048, 1500), (1,), (600, 600)]


def replicated(*, filled: bool) -> dict[str, Any]:
    """As of DDP, 24 MiB."""
    return {f"t{i}": values(i, s) if filled else torch.zeros(s, dtype=torch.int32) for i, s in enumerate(SHAPES)}


def hybrid(*, filled: bool) -> dict[str, Any]:
    """As of HSDP 2x2: two replicas of two shards."""
    mesh = init_device_mesh("cpu", (2, 2))
    full = replicated(filled=filled)
    return {k: distribute_tensor(v, mesh, [Replicate(), Shard(0)], src_data_rank=None) for k, v in full.items()}


def load(path: str, got: dict[str, Any], config: Config = COOPERATIVE, **how: Any) -> LoadReport:
    reader = BcpReader(path, config=config)
    dcp.load(got, storage_reader=reader, **how)
    assert reader.last_report is not None
    return reader.last_report


def load_and_check(path: str, make: Any, planner: Any, config: Config = COOPERATIVE) -> LoadReport:
    got = make(filled=False)
    report = load(path, got, config, planner=planner and planner())
    check(got, make(filled=True))
    return report


def size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir())


def assert_shared(reports: list[LoadReport], path: Path) -> None:
    assert {report.reading for report in reports} == {"cooperative"}
    assert sum(report.bytes_read for report in reports) <= 1.05 * size_of(path)
    mean = sum(report.bytes_read for report in reports) / len(reports)
    assert max(report.bytes_read for report in reports) <= 1.2 * mean
    # What was not read was received.
    assert all(report.bytes_read + report.bytes_received >= report.bytes_wanted for report in reports)


@pytest.mark.parametrize("planner", [None, DefaultLoadPlanner, BcpLoadPlanner])
@pytest.mark.parametrize(
    "config", [COOPERATIVE, Config(shared_reading="cooperative", ring_bytes=16 * MIB, io_threads=1)]
)
def test_replicas_are_read_once(tmp_path: Path, planner: Any, config: Config) -> None:
    dcp.save(replicated(filled=True), storage_writer=BcpWriter(tmp_path))
    assert_shared(run_ranks(4, load_and_check, str(tmp_path), replicated, planner, config), tmp_path)


def save_and_load_hybrid(path: str, planner: Any) -> LoadReport:
    dcp.save(hybrid(filled=True), storage_writer=BcpWriter(path))
    return load_and_check(path, hybrid, planner)


@pytest.mark.parametrize("planner", [None, BcpLoadPlanner])
def test_shards_with_replicas_are_read_once(tmp_path: Path, planner: Any) -> None:
    assert_shared(run_ranks(4, save_and_load_hybrid, str(tmp_path), planner), tmp_path)
