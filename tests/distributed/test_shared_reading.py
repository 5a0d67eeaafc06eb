# SPDX-License-Identifier: Apache-2.0
"""If ranks want the same bytes, only one rank reads each byte, and sends it to the others."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.equality import assert_equal
from support.ranks import run_ranks
from support.sharded_states import state
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from bytecheckpoint import BcpLoadPlanner, BcpReader, BcpWriter, Config
from bytecheckpoint.dcp import _reader_base as reader_module
from bytecheckpoint.dcp import rank_load
from bytecheckpoint.distributed import channel as _peers
from bytecheckpoint.native import _C
from bytecheckpoint.report import LoadReport
from bytecheckpoint.sharing import choice as _intent
from distributed.shared_loads import COOPERATIVE, OwnFinish, Wrapper, replicated

MIB = 1 << 20


def hybrid(*, filled: bool) -> dict[str, Any]:
    """Returns two replicas of two shards on a 2 x 2 mesh, as with HSDP."""
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
    assert_equal(got, make(filled=True))
    return report


def size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir() if file.is_file())


def assert_shared(reports: list[LoadReport], path: Path) -> None:
    assert {report.reading for report in reports} == {"cooperative"}
    assert sum(report.bytes_read for report in reports) <= 1.05 * size_of(path)
    mean = sum(report.bytes_read for report in reports) / len(reports)
    assert max(report.bytes_read for report in reports) <= 1.2 * mean
    # A rank received what it did not read.
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


def load_in_layouts(path: str, planner: Any) -> list[LoadReport]:
    reports = []
    for layout in ("saved", "moved", "plain"):
        got = state(layout, filled=False)
        reports.append(load(path, got, planner=planner and planner()))
        assert_equal(got, state(layout, filled=True))
    return reports


def save_states(path: str) -> None:
    dcp.save(state("saved", filled=True), storage_writer=BcpWriter(path))


@pytest.mark.parametrize("planner", [None, BcpLoadPlanner])
@pytest.mark.parametrize("num_ranks", [4, 3])
def test_any_layout_with_objects_on_any_number_of_ranks(tmp_path: Path, planner: Any, num_ranks: int) -> None:
    run_ranks(4, save_states, str(tmp_path))
    for reports in run_ranks(num_ranks, load_in_layouts, str(tmp_path), planner):
        assert {report.reading for report in reports} == {"cooperative"}


def odd(number: float) -> dict[str, Any]:
    """Returns tensors that go through host copies, because the stored dtype differs; an opaque one; and objects."""
    half = torch.quantize_per_tensor(torch.full((50, 7), number), 0.5, 3, torch.qint8)
    out: dict[str, Any] = {f"converted{i}": torch.full((200, 1000), number + i, dtype=torch.float64) for i in range(5)}
    return out | {"quantized": half, "objects": {"epoch": int(number), "names": ["a"] * 3}}


def load_odd(path: str, planner: Any) -> LoadReport:
    rank_load._COPY_BYTES = MIB  # so small that it takes several turns
    got = odd(0.0)
    if dist.get_rank() == 2:
        del got["converted3"], got["quantized"]
    report = load(path, got, planner=planner and planner())
    wanted = odd(4.0)
    for key, value in got.items():
        if key == "objects":
            assert value == wanted[key]
        elif key != "quantized":
            assert torch.equal(value, wanted[key])
        else:
            assert torch.equal(value.int_repr(), wanted[key].int_repr())
    return report


@pytest.mark.parametrize("planner", [None, BcpLoadPlanner])
def test_tensors_that_go_through_host_copies_are_shared_too(tmp_path: Path, planner: Any) -> None:
    saved = {k: v.to(torch.float32) if k.startswith("converted") else v for k, v in odd(4.0).items()}
    dcp.save(saved, storage_writer=BcpWriter(tmp_path))
    reports = run_ranks(4, load_odd, str(tmp_path), planner)
    # Turns read the blocks at their borders again. A rank whose turns differ has its own border blocks.
    assert sum(report.bytes_read for report in reports) <= 2.5 * size_of(tmp_path)
    assert {report.reading for report in reports} == {"cooperative"}


def load_subsets(path: str) -> LoadReport:
    wanted = replicated(filled=True)
    keys = [["t0", "t1"], ["t1", "t2", "t3"], ["t3"], []][dist.get_rank()]
    got = {key: torch.zeros_like(wanted[key]) for key in keys}
    report = load(path, got, planner=BcpLoadPlanner())
    assert_equal(got, {key: wanted[key] for key in keys})
    return report


def test_ranks_want_different_things_and_one_nothing(tmp_path: Path) -> None:
    dcp.save(replicated(filled=True), storage_writer=BcpWriter(tmp_path))
    reports = run_ranks(4, load_subsets, str(tmp_path))
    assert reports[3].bytes_read == reports[3].bytes_received == 0
    assert sum(report.bytes_read for report in reports) <= 1.05 * size_of(tmp_path)
    assert reports[0].bytes_received + reports[1].bytes_received > 0


def load_on_a_group(path: str, own_carrier: bool) -> LoadReport | None:
    if own_carrier:
        _peers._compat.is_gloo_on_host = lambda group: False  # as for NCCL
    group = dist.new_group([1, 3], backend="gloo")
    if dist.get_rank() not in (1, 3):
        return None
    got = replicated(filled=False)
    report = load(path, got, process_group=group)
    assert_equal(got, replicated(filled=True))
    return report


@pytest.mark.parametrize("own_carrier", [False, True])
def test_a_group_shares_among_itself(tmp_path: Path, own_carrier: bool) -> None:
    dcp.save(replicated(filled=True), storage_writer=BcpWriter(tmp_path))
    reports = run_ranks(4, load_on_a_group, str(tmp_path), own_carrier)
    assert_shared([report for report in reports if report is not None], tmp_path)


def load_stock(path: str) -> LoadReport:
    got = replicated(filled=False) | {"object": None}
    report = load(path, got)
    assert_equal(got, replicated(filled=True) | {"object": [1, "two"]})
    return report


def test_stock_checkpoints_are_shared(tmp_path: Path) -> None:
    dcp.save(replicated(filled=True) | {"object": [1, "two"]}, storage_writer=dcp.FileSystemWriter(tmp_path))
    assert_shared(run_ranks(4, load_stock, str(tmp_path)), tmp_path)


def in_modes(path: str, modes: list[str]) -> str:
    got = replicated(filled=False)
    report = load(path, got, Config(shared_reading=modes[dist.get_rank()]))
    assert_equal(got, replicated(filled=True))
    return report.reading


@pytest.mark.parametrize(
    ("modes", "reading"),
    [
        (["auto", "auto", "auto"], "independent"),  # too small
        (["auto", "cooperative", "auto"], "cooperative"),
        (["cooperative", "cooperative", "independent"], "independent"),
    ],
)
def test_ranks_with_different_settings_agree(tmp_path: Path, modes: list[str], reading: str) -> None:
    dcp.save(replicated(filled=True), storage_writer=BcpWriter(tmp_path))
    assert run_ranks(3, in_modes, str(tmp_path), modes) == [reading] * 3


def in_rings(path: str) -> str:
    rank = dist.get_rank()
    config = Config(
        shared_reading="cooperative",
        ring_bytes=(16, 256, 24)[rank] * MIB,
        io_threads=1 + rank,
        verify=rank != 0,
        direct_io=rank != 1,
    )
    return load_and_check(path, replicated, None, config).reading


def test_ranks_need_not_have_equal_memory(tmp_path: Path) -> None:
    dcp.save(replicated(filled=True), storage_writer=BcpWriter(tmp_path))
    assert run_ranks(3, in_rings, str(tmp_path)) == ["cooperative"] * 3


def load_at_random(path: str, num_loads: int) -> None:
    """Loads random keys on each rank, some of them into another dtype."""
    rank_load._COPY_BYTES = 2 * MIB
    full = replicated(filled=True)
    for number in range(num_loads):
        random = Random(100 * number + dist.get_rank())
        keys = random.sample(list(full), random.randrange(len(full) + 1))
        dtypes = {key: random.choice([torch.int32, torch.int32, torch.float64]) for key in keys}
        got = {key: torch.zeros(full[key].shape, dtype=dtypes[key]) for key in keys}
        ring_bytes = random.choice([16, 64]) * MIB
        config = Config(shared_reading="cooperative", ring_bytes=ring_bytes, io_threads=random.choice([1, 3]))
        assert load(path, got, config, planner=BcpLoadPlanner()).reading == "cooperative"
        for key in keys:
            assert torch.equal(got[key], full[key].to(dtypes[key])), (number, key)


@pytest.mark.parametrize("num_ranks", [2, 5])
def test_whatever_ranks_want_they_get_it(tmp_path: Path, num_ranks: int) -> None:
    dcp.save(replicated(filled=True), storage_writer=BcpWriter(tmp_path))
    run_ranks(num_ranks, load_at_random, str(tmp_path), 12)


class _Where:
    """Stands for the extension module, and says whether the checkpoint is in memory."""

    def __init__(self, is_in_memory: bool) -> None:
        self._is_in_memory = is_in_memory

    def __getattr__(self, name: str) -> Any:
        return (lambda path, io_timeout_s: self._is_in_memory) if name == "is_in_memory" else getattr(_C, name)


def auto(path: str, is_in_memory: bool) -> list[str]:
    """Loads with ``auto``, as if the checkpoint were larger."""
    _intent._C = _Where(is_in_memory)  # type: ignore[assignment]
    _intent._LEAST_SAVED_BYTES = MIB
    mesh = init_device_mesh("cpu", (2,))
    full = replicated(filled=True)
    replicas = in_modes(path, ["auto", "auto"])
    shards = {k: distribute_tensor(v, mesh, [Shard(0)], src_data_rank=None) for k, v in full.items()}
    return [replicas, load(path, shards, Config()).reading]


def test_auto_shares_where_that_saves_much_reading_of_a_disk(tmp_path: Path) -> None:
    dcp.save(replicated(filled=True), storage_writer=BcpWriter(tmp_path))
    assert run_ranks(2, auto, str(tmp_path), False) == [["cooperative", "independent"]] * 2
    assert run_ranks(2, auto, str(tmp_path), True) == [["independent", "independent"]] * 2


def not_sure_that_all_come(path: str) -> None:
    assert load(path, replicated(filled=False), planner=OwnFinish()).reading == "independent"
    reader = Wrapper(path, config=COOPERATIVE)
    dcp.load(replicated(filled=False), storage_reader=reader)
    assert reader.last_report is not None
    assert reader.last_report.reading == "independent"
    assert load(path, replicated(filled=False), no_dist=True).reading == "independent"
    assert load(path, replicated(filled=False)).reading == "cooperative"


def test_nobody_waits_for_ranks_that_may_not_come(tmp_path: Path) -> None:
    dcp.save(replicated(filled=True), storage_writer=BcpWriter(tmp_path))
    run_ranks(2, not_sure_that_all_come, str(tmp_path))
    reader = BcpReader(tmp_path, config=COOPERATIVE)
    dcp.load(replicated(filled=False), storage_reader=reader)
    assert reader.last_report is not None
    assert reader.last_report.reading == "independent"


def parts_of_their_own(path: str) -> str:
    """Saves without collectives, and loads. DCP plans such a load with collectives, and reads without."""
    wanted = {"rank": torch.full((MIB,), dist.get_rank())}
    dcp.save(wanted, storage_writer=BcpWriter(path), use_collectives=False)
    got = {"rank": torch.zeros(MIB, dtype=torch.int64)}
    report = load(path, got)
    assert_equal(got, wanted)
    return report.reading


def test_parts_that_were_saved_without_collectives_are_not_shared(tmp_path: Path) -> None:
    assert run_ranks(2, parts_of_their_own, str(tmp_path)) == ["independent"] * 2


def load_metadata_in_parts(path: str) -> LoadReport:
    """Each rank reads only the metadata of the items that it asks for. Files have the same numbers on all ranks."""
    reader_module._MAX_WHOLE_METADATA_BYTES = 0
    return load_subsets(path)


def test_ranks_that_read_parts_of_the_metadata_share(tmp_path: Path) -> None:
    dcp.save(replicated(filled=True), storage_writer=BcpWriter(tmp_path, single_file_per_rank=False))
    reports = run_ranks(4, load_metadata_in_parts, str(tmp_path))
    assert {report.reading for report in reports} == {"cooperative"}
    assert sum(report.bytes_read for report in reports) <= 1.05 * size_of(tmp_path)
