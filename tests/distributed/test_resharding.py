# SPDX-License-Identifier: Apache-2.0
"""Our reader and the stock one load exactly what was saved, on other numbers of ranks and in other layouts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp
from support.equality import assert_equal
from support.ranks import run_ranks
from support.sharded_states import pointers, state

from bytecheckpoint import BcpReader, BcpWriter
from distributed.planners import OURS, STOCK, Planners


def save(path: str, planners: Planners) -> int:
    writer = BcpWriter(path)
    dcp.save(state("saved", filled=True), storage_writer=writer, planner=planners.save())
    report = writer.last_report
    assert report is not None
    assert report.path == path
    return report.bytes_written


def load_and_check(path: str, planners: Planners, layouts: list[str]) -> None:
    for layout in layouts:
        wanted = state(layout, filled=True)
        for reader in (BcpReader(path), dcp.FileSystemReader(path)):
            got = state(layout, filled=False)
            before = pointers(got)
            dcp.load(got, storage_reader=reader, planner=planners.load())
            assert_equal(got, wanted, layout)
            assert pointers(got) == before, "loaded elsewhere than in place"


@pytest.mark.parametrize("planners", [STOCK, OURS], ids=["stock", "ours"])
@pytest.mark.parametrize(("savers", "loaders"), [(4, 2), (2, 4), (1, 4), (4, 1), (8, 3)])
def test_other_world_sizes_and_layouts(tmp_path: Path, savers: int, loaders: int, planners: Planners) -> None:
    path = tmp_path / "ckpt"
    written = run_ranks(savers, save, str(path), planners)
    files = sorted(path.glob("*.distcp"))
    assert [sum(f.stat().st_size for f in files if f.name.startswith(f"__{r}_")) for r in range(savers)] == written
    assert sorted(p.name for p in path.iterdir() if p.is_file()) == sorted([".metadata", *(f.name for f in files)])
    run_ranks(loaders, load_and_check, str(path), planners, ["saved", "moved", "plain"])


def save_by_the_stock_writer(path: str) -> None:
    dcp.save(state("saved", filled=True), storage_writer=dcp.FileSystemWriter(path), planner=OURS.save())


def test_our_planner_plans_for_other_writers(tmp_path: Path) -> None:
    run_ranks(4, save_by_the_stock_writer, str(tmp_path))
    for planners in (STOCK, OURS):
        run_ranks(2, load_and_check, str(tmp_path), planners, ["saved", "moved", "plain"])
