# SPDX-License-Identifier: Apache-2.0
"""Reads files of ranks whose DTensors torch has cut in other ways than those of verl: see test_rank_files.py."""

from __future__ import annotations

import multiprocessing
import shutil
import warnings
from pathlib import Path

import pytest
import torch

import bytecheckpoint
from bytecheckpoint.convert import convert
from bytecheckpoint.errors import CorruptCheckpointError, UnsupportedError

WORLD = 4


def _values(rank: int) -> dict[str, dict[str, torch.Tensor]]:
    """Returns by the name of a folder what a rank saves there. Parts are cut by hand: there is nobody to talk to."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ranks = init_device_mesh("cpu", (WORLD,))
    permuted, transposed = DeviceMesh("cpu", [2, 0, 3, 1]), DeviceMesh("cpu", [[0, 2], [1, 3]])
    dp, tp = divmod(rank, 2)
    rows = torch.arange(21.0).reshape(7, 3)
    meta = TensorMeta(rows.shape, rows.stride(), rows.dtype)
    spec = DTensorSpec(mesh, (Shard(0), Shard(0)), meta, shard_order=(ShardOrderEntry(0, (1, 0)),))

    def part(local: torch.Tensor, of: torch.Tensor, *placements: object, on: object = ranks) -> torch.Tensor:
        return DTensor.from_local(local, on, placements, run_check=False, shape=of.shape, stride=of.stride())

    wide = torch.arange(36.0).reshape(4, 9)
    local = wide[:, 3 * rank : 3 * rank + 3].contiguous() if rank < 3 else torch.empty(0, 0)
    plain = {"same": rows}
    return {
        "order": {"w": DTensor(rows.chunk(2)[tp].chunk(2)[dp].clone(), spec, requires_grad=False)},
        "empty": {"w": part(local, wide, Shard(1))},
        "rows": {"w": part(rows[2 * rank : 2 * rank + 2].clone(), rows, Shard(0))},
        "halves": {"w": part(rows.chunk(2)[tp].clone(), rows, Shard(0), on=mesh["tp"])},
        "uneven": plain | {"w": part(rows[:rank], rows[:6], Shard(0))},
        "permuted": plain | {"w": part(rows[:1], rows[:4], Shard(0), on=permuted)},
        "transposed": {"w": part(wide[[dp + 2 * tp]], wide, Shard(0), Shard(0), on=transposed)},
        "partial": plain | {"w": rows if rank == 1 else part(rows, rows, Partial())},
        # The experts of two ranks have the same names as those of two others.
        "experts": plain | {"w": part(rows[:4].chunk(2)[tp] + dp, rows[:4], Shard(0), on=mesh["tp"])},
        "statistics": plain | {"w": rows + rank, "whole": part(rows, rows, Replicate()), "count": rank, "other": 5},
    }


def _write(folder: Path) -> None:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    for rank in range(WORLD):
        dist.init_process_group("fake", rank=rank, world_size=WORLD, store=FakeStore())
        for name, state in _values(rank).items():
            (folder / name).mkdir(exist_ok=True)
            torch.save(state, folder / name / f"model_world_size_{WORLD}_rank_{rank}.pt")
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("meshes")
    process = multiprocessing.get_context("spawn").Process(target=_write, args=(folder,))
    process.start()
    process.join(120)
    assert process.exitcode == 0
    return folder


def test_dims_of_the_mesh_that_cut_in_another_order(written: Path) -> None:
    assert torch.equal(bytecheckpoint.read(written / "order")["w"], torch.arange(21.0).reshape(7, 3))


def test_ranks_of_a_mesh_that_is_transposed(written: Path) -> None:
    assert torch.equal(bytecheckpoint.read(written / "transposed")["w"], torch.arange(36.0).reshape(4, 9))


def test_an_empty_part_may_have_another_shape(written: Path) -> None:
    """FSDP keeps that of a weight whose columns tensor parallelism has used up as one of shape [0, 0]."""
    assert torch.equal(bytecheckpoint.read(written / "empty")["w"], torch.arange(36.0).reshape(4, 9))


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("uneven", r"its local part has the shape \[0, 3\], and by its placements \[2, 3\]"),
        ("permuted", "the ranks along a dim of its mesh do not ascend"),
        ("partial", "its placement Partial cannot be read"),
        ("experts", r"model_world_size_4_rank_0\.pt and model_world_size_4_rank_2\.pt have different elements"),
    ],
)
def test_a_tensor_that_cannot_be_joined_does_not_keep_others_from_being_read(
    written: Path, kind: str, why: str
) -> None:
    stored = bytecheckpoint.read(written / kind)
    assert torch.equal(stored["same"], torch.arange(21.0).reshape(7, 3))
    with pytest.raises(UnsupportedError, match=f"'w' cannot be read.*{why}"):
        stored["w"]


def test_values_that_differ_between_ranks_are_said(written: Path) -> None:
    with pytest.warns(RuntimeWarning, match=r"the ranks have different values of 'count' and of 1 more; those of the "):
        stored = bytecheckpoint.read(written / "statistics")
    assert torch.equal(stored["w"], torch.arange(21.0).reshape(7, 3))
    assert stored["count"] == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bytecheckpoint.read(written / "order")


def test_files_that_an_earlier_save_of_more_ranks_left(written: Path, tmp_path: Path) -> None:
    """Names as those of torch_checkpointing do not say how many ranks there were."""
    for rank in range(WORLD):
        shutil.copy(written / "rows" / f"model_world_size_{WORLD}_rank_{rank}.pt", tmp_path / f"model_{rank}.pt")
    assert torch.equal(bytecheckpoint.read(tmp_path / "model_*.pt")["w"], torch.arange(21.0).reshape(7, 3))
    for rank in range(2):
        shutil.copy(written / "halves" / f"model_world_size_{WORLD}_rank_{rank}.pt", tmp_path / f"model_{rank}.pt")
    with pytest.raises(CorruptCheckpointError, match=r"'w': model_\d\.pt has the part at .* they are of two saves"):
        bytecheckpoint.read(tmp_path / "model_*.pt")
    for rank in (2, 3):
        (tmp_path / f"model_{rank}.pt").unlink()
    assert torch.equal(bytecheckpoint.read(tmp_path / "model_*.pt")["w"], torch.arange(21.0).reshape(7, 3))


def test_values_that_only_some_ranks_have_keep_their_places(tmp_path: Path) -> None:
    states = [{"a": {"x": torch.ones(2)}, "n": 1}, {"a": {"y": torch.zeros(3)}, "b": [torch.ones(1), {"k": 2}], "n": 1}]
    for rank, state in enumerate(states):
        torch.save(state, tmp_path / f"model_world_size_2_rank_{rank}.pt")
    convert(tmp_path, tmp_path / "whole.pt", to="torch")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert {*whole} == {"a", "b", "n"}
    assert {*whole["a"]} == {"x", "y"}
    assert whole["b"][1] == {"k": 2}
