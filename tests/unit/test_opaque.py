# SPDX-License-Identifier: Apache-2.0
"""Tests tensors that are not plain memory of a plain dtype: stored as torch.save does it, read under weights_only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from bytecheckpoint import BcpReader, BcpWriter, Config, verify
from bytecheckpoint.errors import InvalidPlanError, SaveFailedError, UnsafeObjectError


class Tagged(torch.Tensor):
    """A subclass with elements of its own; torch.save keeps its class."""


def per_tensor() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.arange(24.0).reshape(4, 6), 0.5, 3, torch.quint8)


def per_channel() -> torch.Tensor:
    scales, zeros = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0, 1, 2])
    return torch.quantize_per_channel(torch.arange(12.0).reshape(3, 4), scales, zeros, 0, torch.qint8)


MAKE: dict[str, Callable[[], torch.Tensor]] = {
    "per tensor": per_tensor,
    "per channel": per_channel,
    "qint32": lambda: torch.quantize_per_tensor(torch.arange(5.0), 0.01, 0, torch.qint32),
    "a view": lambda: per_tensor()[1:3],
}


def raw(tensor: torch.Tensor) -> Any:
    return tensor.qscheme(), tensor.dequantize().tolist(), tensor.int_repr().tolist()


def empty_like(tensor: torch.Tensor) -> torch.Tensor:
    zeros = torch.zeros(tensor.shape)
    if tensor.qscheme() == torch.per_tensor_affine:
        return torch.quantize_per_tensor(zeros, tensor.q_scale(), tensor.q_zero_point(), tensor.dtype)
    scales, points = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
    return torch.quantize_per_channel(zeros, scales, points, tensor.q_per_channel_axis(), tensor.dtype)


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("writer", [BcpWriter, dcp.FileSystemWriter])
@pytest.mark.parametrize("reader", [BcpReader, dcp.FileSystemReader])
def test_round_trip(name: str, writer: Any, reader: Any, tmp_path: Path) -> None:
    """All four pairs of our and stock DCP's writer and reader work. A plain tensor beside it stays a plain record."""
    tensor = MAKE[name]()
    state = {"odd": tensor, "plain": torch.arange(10.0), "step": 3}
    dcp.save(state, storage_writer=writer(tmp_path))
    got: dict[str, Any] = {"odd": empty_like(tensor), "plain": torch.zeros(10), "step": 0}
    dcp.load(got, storage_reader=reader(tmp_path))
    assert got["odd"].dtype == tensor.dtype
    assert raw(got["odd"]) == raw(tensor)
    assert torch.equal(got["plain"], state["plain"])  # type: ignore[arg-type]
    assert got["step"] == 3
    assert reader(tmp_path).read_metadata().state_dict_metadata["odd"].properties.dtype == tensor.dtype
    if writer is BcpWriter:
        assert verify(tmp_path).is_whole


@pytest.mark.parametrize("writer", [BcpWriter, dcp.FileSystemWriter])
def test_other_quantization_is_refused(writer: Any, tmp_path: Path) -> None:
    """A planner hands out views. A load can set the scale of a view, but not that of the tensor behind it."""
    dcp.save({"odd": per_tensor(), "channels": per_channel()}, storage_writer=writer(tmp_path))
    other = torch.quantize_per_channel(torch.zeros(3, 4), torch.ones(3), torch.tensor([0, 1, 2]), 0, torch.qint8)
    for key, value in (
        ("odd", torch.quantize_per_tensor(torch.zeros(4, 6), 0.25, 3, torch.quint8)),
        ("odd", torch.quantize_per_tensor(torch.zeros(4, 6), 0.5, 4, torch.quint8)),
        ("odd", torch.quantize_per_channel(torch.zeros(4, 6), torch.ones(4), torch.zeros(4), 0, torch.quint8)),
        ("channels", other),
        ("odd", torch.zeros(4, 6)),
    ):
        with pytest.raises(CheckpointException) as caught:
            dcp.load({key: value}, storage_reader=BcpReader(tmp_path))
        (error,) = (wrapped[0] for wrapped in caught.value.failures.values())
        assert type(error) is InvalidPlanError
        assert f"'{key}'" in str(error)
        assert "quantiz" in str(error)


def test_a_view_is_stored_alone(tmp_path: Path) -> None:
    large = torch.quantize_per_tensor(torch.zeros(1_000_000), 0.5, 0, torch.qint8)
    dcp.save({"row": large[:10]}, storage_writer=BcpWriter(tmp_path))
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 50_000


@pytest.mark.parametrize("writer", [BcpWriter, dcp.FileSystemWriter])
def test_subclass(tmp_path: Path, writer: Any) -> None:
    """A subclass is saved as stock DCP saves it, and read only if the caller allows its class."""
    tensor = torch.arange(6.0).as_subclass(Tagged)
    dcp.save({"tagged": tensor, "plain": torch.ones(2)}, storage_writer=writer(tmp_path))

    def load(**arguments: Any) -> torch.Tensor:
        got = {"tagged": torch.zeros(6).as_subclass(Tagged)}
        dcp.load(got, storage_reader=BcpReader(tmp_path, **arguments))
        return got["tagged"]

    with pytest.raises(CheckpointException) as caught:
        load()
    (error,) = (wrapped[0] for wrapped in caught.value.failures.values())
    assert type(error) is UnsafeObjectError
    assert "'tagged'" in str(error)
    assert "Tagged" in str(error)
    got = {"plain": torch.zeros(2)}
    dcp.load(got, storage_reader=BcpReader(tmp_path))  # the rest loads
    assert torch.equal(got["plain"], torch.ones(2))
    assert torch.equal(load(config=Config(allow_pickle=True)), tensor)
    with torch.serialization.safe_globals([Tagged]):
        loaded = load()
    assert type(loaded) is Tagged
    assert torch.equal(loaded, tensor)


def test_damage_is_seen(tmp_path: Path) -> None:
    dcp.save({"odd": per_tensor()}, storage_writer=BcpWriter(tmp_path))
    (file,) = tmp_path.glob("*.distcp")
    content = bytearray(file.read_bytes())
    content[4500] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointException, match="block has CRC"):
        dcp.load({"odd": empty_like(per_tensor())}, storage_reader=BcpReader(tmp_path))
    (problem,) = verify(tmp_path).problems
    assert (problem.file, problem.section, problem.offset, problem.fqns) == (file.name, "records", 0, ["odd"])


def test_what_cannot_be_stored(tmp_path: Path) -> None:
    class Unpicklable(torch.Tensor):
        def __reduce_ex__(self, protocol: Any) -> Any:
            raise TypeError("not for disk")

    dcp.save({"a": torch.ones(1)}, storage_writer=BcpWriter(tmp_path))
    before = sorted(tmp_path.iterdir())
    for value in (torch.arange(3.0).as_subclass(Unpicklable), torch.empty(4, device="meta")):
        with pytest.raises(CheckpointException) as caught:
            dcp.save({"fine": torch.ones(3), "odd": value}, storage_writer=BcpWriter(tmp_path))
        (error,) = (wrapped[0] for wrapped in caught.value.failures.values())
        assert type(error) is SaveFailedError
        reason = error.reasons[0]
        assert type(reason) is InvalidPlanError
        assert "'odd'" in str(reason)
        assert sorted(tmp_path.iterdir()) == before
