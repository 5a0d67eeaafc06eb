# SPDX-License-Identifier: Apache-2.0
"""Tensors whose memory was freed, is too short or cannot be written to: every way to save or load them names them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.subclasses import PerTensor
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

import bytecheckpoint
from bytecheckpoint import BcpLoadPlanner, BcpReader, BcpSavePlanner, BcpWriter, LoadSpec
from bytecheckpoint.compat import private_names as compat
from bytecheckpoint.errors import CheckpointError, InvalidPlanError
from bytecheckpoint.native import _C
from bytecheckpoint.tensors.chunks import LocalChunks

_NUM = 1024
_BYTES = 4 * _NUM


def short(num_bytes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns a tensor whose storage has only ``num_bytes`` bytes."""
    tensor = torch.zeros(_NUM, dtype=dtype)
    tensor.untyped_storage().resize_(num_bytes)
    return tensor


def view(num_bytes: int) -> torch.Tensor:
    """Returns a view that begins within a storage of only ``num_bytes`` bytes."""
    tensor = torch.zeros(2 * _NUM)[_NUM:]
    tensor.untyped_storage().resize_(num_bytes)
    return tensor


def column(num_bytes: int) -> torch.Tensor:
    tensor = torch.zeros(_NUM, 3)[:, 1]
    tensor.untyped_storage().resize_(num_bytes)
    return tensor


def repeated() -> torch.Tensor:
    tensor = torch.zeros(1).expand(_NUM)
    tensor.untyped_storage().resize_(0)
    return tensor


# What is wrong, the bytes that the tensor needs, and those that it has.
BROKEN: dict[str, tuple[Callable[[], torch.Tensor], int, int]] = {
    "freed": (lambda: short(0), _BYTES, 0),
    "64 bytes too short": (lambda: short(_BYTES - 64), _BYTES, _BYTES - 64),
    "parameter": (lambda: nn.Parameter(short(0)), _BYTES, 0),
    "view of freed memory": (lambda: view(0), 2 * _BYTES, 0),
    "view that begins behind it": (lambda: view(_BYTES), 2 * _BYTES, _BYTES),
    "column": (lambda: column(12 * _NUM - 8), 12 * _NUM - 4, 12 * _NUM - 8),
    "repeated": (repeated, 4, 0),
}
SAVES: dict[str, Callable[[str, dict[str, Any]], Any]] = {
    "save_state_dict": bytecheckpoint.save_state_dict,
    "async_save_state_dict": lambda path, state: bytecheckpoint.async_save_state_dict(path, state).committed.result(),
    "classes": lambda path, state: dcp.save(state, storage_writer=BcpWriter(path), planner=BcpSavePlanner()),
    "our planner": lambda path, state: dcp.save(state, checkpoint_id=path, planner=BcpSavePlanner()),
    "our writer": lambda path, state: dcp.save(state, storage_writer=BcpWriter(path), planner=dcp.DefaultSavePlanner()),
}
LOADS: dict[str, Callable[[str, dict[str, Any]], Any]] = {
    "load_state_dict": bytecheckpoint.load_state_dict,
    "renamed": lambda path, state: bytecheckpoint.load_state_dict(
        path,
        {f"to.{key}": value for key, value in state.items()},
        spec=LoadSpec(rename={"good": "to.good", "bad": "to.bad"}),
    ),
    "classes": lambda path, state: dcp.load(state, storage_reader=BcpReader(path), planner=BcpLoadPlanner()),
    "our planner": lambda path, state: dcp.load(state, checkpoint_id=path, planner=BcpLoadPlanner()),
    "our reader": lambda path, state: dcp.load(state, storage_reader=BcpReader(path), planner=dcp.DefaultLoadPlanner()),
}


def refused(call: Callable[[str, dict[str, Any]], Any], path: str, state: dict[str, Any], pattern: str) -> None:
    """Checks that ``call`` raises an InvalidPlanError that names the tensor, and changes no other tensor."""
    good = state["good"].clone()
    with pytest.raises((CheckpointError, CheckpointException), match=pattern) as caught:
        call(path, state)
    assert isinstance(caught.value, InvalidPlanError) or "InvalidPlanError: '" in str(caught.value)
    assert torch.equal(state["good"], good)


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("what", BROKEN)
def test_a_save_names_the_tensor_and_its_bytes(tmp_path: Path, what: str, save: str) -> None:
    make, wanted, got = BROKEN[what]
    pattern = rf"'bad': the tensor .*: it needs {wanted} bytes of its storage, which has {got};"
    refused(SAVES[save], str(tmp_path / "step"), {"good": torch.ones(4), "bad": make()}, pattern)
    assert not (tmp_path / "step" / ".metadata").exists()


@pytest.fixture
def path(tmp_path: Path) -> str:
    bytecheckpoint.save_state_dict(tmp_path / "step", {"good": torch.ones(4), "bad": torch.ones(_NUM)})
    return str(tmp_path / "step")


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("what", BROKEN)
def test_a_load_names_the_tensor_and_its_bytes_and_fills_nothing(path: str, what: str, load: str) -> None:
    make, wanted, got = BROKEN[what]
    pattern = rf"'(to\.)?bad': the tensor .*: it needs {wanted} bytes of its storage, which has {got};"
    refused(LOADS[load], path, {"good": torch.zeros(4), "bad": make()}, pattern)


@pytest.mark.parametrize("load", ["load_state_dict", "classes", "our reader"])
def test_a_load_that_converts_names_it_too(path: str, load: str) -> None:
    state = {"good": torch.zeros(4), "bad": short(0, torch.float64)}
    refused(LOADS[load], path, state, f"'bad': the tensor has no memory: it needs {2 * _BYTES} bytes")


def test_boxes_and_parts_of_subclasses(tmp_path: Path) -> None:
    whole = PerTensor(torch.ones(_NUM), torch.ones(1))
    bytecheckpoint.save_state_dict(tmp_path / "step", {"good": torch.ones(4), "box": torch.ones(_NUM), "sub": whole})
    box = LocalChunks((_NUM,), [(0,)], [short(0)], torch.float32)
    path = str(tmp_path / "step")
    for key, bad in (("box", box), ("sub", PerTensor(short(0), torch.ones(1)))):
        for load in ("load_state_dict", "classes"):
            refused(LOADS[load], path, {"good": torch.zeros(4), key: bad}, rf"'{key}[.\w]*': the tensor has no memory")


READ_ONLY: dict[str, Callable[[Path], torch.Tensor]] = {
    "array mapped for reading": lambda path: torch.from_numpy(np.load(path, mmap_mode="r")),
    "row of it": lambda path: torch.from_numpy(np.load(path, mmap_mode="r").reshape(1, _NUM))[0],
}
WRITABLE: dict[str, Callable[[Path], torch.Tensor]] = {
    "copy on write": lambda path: torch.from_numpy(np.load(path, mmap_mode="c")),
    "private file": lambda path: torch.from_file(str(path), size=_NUM, shared=False),
    "shared file": lambda path: torch.from_file(str(path), size=_NUM, shared=True),
    "shared memory": lambda path: torch.zeros(_NUM).share_memory_(),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("what", READ_ONLY)
def test_memory_that_can_only_be_read_is_refused(tmp_path: Path, path: str, what: str, load: str, dtype: Any) -> None:
    np.save(tmp_path / "array.npy", np.zeros(_NUM, dtype))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the array is not writable
        bad = READ_ONLY[what](tmp_path / "array.npy")
    pattern = r"'(to\.)?bad': the tensor is in memory that can only be read"
    refused(LOADS[load], path, {"good": torch.zeros(4), "bad": bad}, pattern)


@pytest.mark.parametrize("what", WRITABLE)
def test_other_mapped_memory_is_filled(tmp_path: Path, path: str, what: str) -> None:
    np.save(tmp_path / "array.npy", np.zeros(_NUM, np.float32))
    state = {"good": torch.zeros(4), "bad": WRITABLE[what](tmp_path / "array.npy")}
    bytecheckpoint.load_state_dict(path, state)
    assert torch.equal(state["bad"], torch.ones(_NUM))


def test_a_file_that_torch_maps_is_filled(tmp_path: Path, path: str) -> None:
    torch.save({"bad": torch.zeros(_NUM)}, tmp_path / "file.pt")
    state = {**torch.load(tmp_path / "file.pt", mmap=True), "good": torch.zeros(4)}
    bytecheckpoint.load_state_dict(path, state)
    assert torch.equal(state["bad"], torch.ones(_NUM))
    assert torch.equal(torch.load(tmp_path / "file.pt")["bad"], torch.zeros(_NUM))


class Shrinking(BcpLoadPlanner):
    """Frees memory between the plan and the first read."""

    def finish_plan(self, new_plan: Any) -> Any:
        self.state_dict["bad"].untyped_storage().resize_(0)
        return super().finish_plan(new_plan)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_memory_freed_between_plan_and_read(path: str, dtype: torch.dtype) -> None:
    state = {"good": torch.zeros(4), "bad": torch.zeros(_NUM, dtype=dtype)}
    load = lambda path, state: dcp.load(state, storage_reader=BcpReader(path), planner=Shrinking())  # noqa: E731
    refused(load, path, state, "'bad': the tensor has no memory")


class ShrinkingSave(BcpSavePlanner):
    def finish_plan(self, new_plan: Any) -> Any:
        self.state_dict["bad"].untyped_storage().resize_(0)
        return super().finish_plan(new_plan)


def test_memory_freed_between_plan_and_write(tmp_path: Path) -> None:
    state = {"good": torch.zeros(4), "bad": torch.zeros(_NUM)}
    save = lambda path, state: dcp.save(state, storage_writer=BcpWriter(path), planner=ShrinkingSave())  # noqa: E731
    refused(save, str(tmp_path / "step"), state, "'bad': the tensor has no memory")


@pytest.mark.parametrize("bytes_left", [0, _BYTES - 64])
def test_memory_freed_while_a_save_waits_for_staging_memory(bytes_left: int) -> None:
    state = {"model": {"good": torch.ones(4), "bad": torch.ones(_NUM)}}
    staged = _C.StagedTree(state, lambda value, key: value, compat.like_dtensor)
    lease = _C.try_lease(
        num_bytes=staged.num_bytes, limit_bytes=1 << 20, is_shareable=False, num_states=1, what="a test"
    )
    assert lease is not None
    state["model"]["bad"].untyped_storage().resize_(bytes_left)
    with pytest.raises(InvalidPlanError, match=r"staging 'model\.bad': the memory of the tensor"):
        staged.fill(lease, 1, {})
    lease.release()


def test_a_save_goes_on_if_memory_is_freed_once_it_is_staged(tmp_path: Path) -> None:
    state = {"bad": torch.ones(_NUM)}
    handle = bytecheckpoint.async_save_state_dict(tmp_path / "step", state)
    state["bad"].untyped_storage().resize_(0)
    handle.committed.result()
    back = {"bad": torch.zeros(_NUM)}
    bytecheckpoint.load_state_dict(tmp_path / "step", back)
    assert torch.equal(back["bad"], torch.ones(_NUM))
