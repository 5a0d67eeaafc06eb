# SPDX-License-Identifier: Apache-2.0
"""Tests that golden checkpoints of each version stay readable, and that we still write the same bytes."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.equality import assert_equal, raw
from support.goldens import GOLDEN as GOLDENS
from support.ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from bytecheckpoint import BcpLoadPlanner, BcpReader, verify
from bytecheckpoint.native import _core
from interop.make_golden import DTYPES, SHARDED_SHAPES, USER_METADATA, golden_state, partial_state, pattern

GOLDEN = GOLDENS / "v1"
PARTIAL = GOLDEN.with_name("v2")
# We wrote each under the version of torch that it is named after.
OF_TORCH = sorted(GOLDEN.with_name("torch").iterdir())


@pytest.mark.parametrize("reader", [BcpReader, dcp.FileSystemReader])
def test_it_loads(reader: Any) -> None:
    got = golden_state(filled=False)
    dcp.load(got, storage_reader=reader(GOLDEN))
    assert_equal(got, golden_state(filled=True))


@pytest.mark.parametrize("reader", [BcpReader, dcp.FileSystemReader])
@pytest.mark.parametrize("golden", OF_TORCH, ids=lambda golden: golden.name)
def test_what_we_write_under_any_version_of_torch_loads_under_this_one(golden: Path, reader: Any) -> None:
    got = golden_state(filled=False)
    dcp.load(got, storage_reader=reader(golden))
    assert_equal(got, golden_state(filled=True))
    assert verify(golden).is_whole


def test_each_version_of_torch_that_make_compat_tries_wrote_all() -> None:
    """Each version wrote our checkpoint and stock's; docs/compatibility.md has a row for each in its table of pairs."""
    (found,) = re.findall(r"^VERSIONS := (.*)$", (Path(__file__).parents[1] / "compat.mk").read_text(), re.MULTILINE)
    versions = {version.partition("-")[0] for version in found.split()}
    assert {golden.name for golden in OF_TORCH} == versions
    stock = {folder.name for folder in GOLDEN.with_name("stock").iterdir()}
    assert {f"{version}-{kind}" for version in versions for kind in ("plain", "sharded")} <= stock


def test_it_has_every_dtype() -> None:
    assert set(DTYPES) == set(_core.dtype_names()) - {"bcomplex32"}  # younger than these files
    entries = BcpReader(GOLDEN).read_metadata().state_dict_metadata
    for name in DTYPES:
        assert entries[f"tensors.{name}"].properties.dtype == getattr(torch, name)  # type: ignore[union-attr]


def load_columns() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    got = {
        name: distribute_tensor(torch.zeros(shape), mesh, [Shard(1)], src_data_rank=None)
        for name, shape in SHARDED_SHAPES.items()
    }
    dcp.load({"sharded": got}, storage_reader=BcpReader(GOLDEN))
    for name, shape in SHARDED_SHAPES.items():
        whole = pattern(name, torch.float32, shape)
        wanted = distribute_tensor(whole, mesh, [Shard(1)], src_data_rank=None)
        assert torch.equal(raw(got[name].to_local().contiguous()), raw(wanted.to_local().contiguous()))


def test_it_loads_on_three_ranks() -> None:
    run_ranks(3, load_columns)


def test_its_two_parts_agree() -> None:
    with (GOLDEN / ".metadata").open("rb") as file:
        theirs = pickle.load(file)
    ours = BcpReader(GOLDEN).read_metadata()
    assert ours.storage_meta is not None
    theirs.storage_meta.load_id = ours.storage_meta.load_id
    assert ours == theirs
    assert BcpReader(GOLDEN).user_metadata == USER_METADATA


@pytest.mark.parametrize("golden", [GOLDEN, PARTIAL])
def test_the_encoder_writes_the_same_bytes(golden: Path) -> None:
    """Decodes the metadata and encodes them again. A difference is a new version of the format, or a mistake."""
    assert _core.Checkpoint.open(str(golden), check_pickle=True).metadata_file() == (golden / ".metadata").read_bytes()


@pytest.mark.parametrize("reader", [BcpReader, dcp.FileSystemReader])
@pytest.mark.parametrize("planner", [BcpLoadPlanner, dcp.DefaultLoadPlanner])
def test_partial_tensors_of_version_2_load(reader: Any, planner: Any) -> None:
    got, wanted = partial_state(filled=False), partial_state(filled=True)
    dcp.load(got, storage_reader=reader(PARTIAL), planner=planner(), no_dist=True)
    for name in ("rows", "box"):
        assert torch.equal(raw(got[name].tensors[0]), raw(wanted[name].tensors[0]))
    assert torch.equal(got["whole"], wanted["whole"])
    assert got["step"] == wanted["step"]


def test_partial_tensors_of_version_2_are_complete_and_marked() -> None:
    assert _core.inspect_folder(str(PARTIAL))["state"] == "complete"
    assert verify(PARTIAL).is_whole
    partial = {item[0]: item[-1] for item in _core.Checkpoint.open(str(PARTIAL)).contents()}
    assert partial == {"rows": True, "box": True, "whole": False, "step": False}


def test_its_files() -> None:
    names = {entry.name for entry in GOLDEN.iterdir()}
    named = {name for name, _, _, _ in _core.Checkpoint.open(str(GOLDEN), check_pickle=True).files()}
    assert names == named | {".metadata"}
    assert {name.split("_")[2] for name in named} == {"0", "1"}
    assert sum((GOLDEN / name).stat().st_size for name in names) < 150_000
