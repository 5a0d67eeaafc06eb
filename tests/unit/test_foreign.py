# SPDX-License-Identifier: Apache-2.0
"""Tests that C++ reads what torch wrote as torch does: archives of one tensor, and metadata of DCP."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from support.dtypes import NAMES
from support.equality import assert_equal, without_strides
from torch.distributed.checkpoint.metadata import Metadata

from bytecheckpoint import BcpReader, _testing
from bytecheckpoint.errors import CorruptCheckpointError

shapes = st.lists(st.integers(0, 5), max_size=4)


def saved(value: Any, **options: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream, **options)
    return stream.getvalue()


def rebuilt(archive: bytes) -> torch.Tensor:
    """Returns the tensor, rebuilt from the place in the archive that C++ finds."""
    found = _testing.tensor_archive(archive)
    assert found is not None
    dtype_name, sizes, strides, data_offset, storage_offset, storage_bytes, crc, is_conj, is_neg = found
    storage = archive[storage_offset : storage_offset + storage_bytes]
    assert crc is None or crc == _testing.crc32(storage)
    dtype = getattr(torch, dtype_name)
    if 0 in sizes:
        return torch.empty(sizes, dtype=dtype)
    elements = torch.frombuffer(bytearray(storage), dtype=torch.uint8).view(dtype)
    tensor = elements.as_strided(sizes, strides, (data_offset - storage_offset) // dtype.itemsize)
    tensor = tensor.conj() if is_conj else tensor
    return tensor._neg_view() if is_neg else tensor


def random_tensor(dtype: torch.dtype, shape: list[int], seed: int) -> torch.Tensor:
    count = torch.Size(shape).numel() * dtype.itemsize
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype == torch.bool else 256
    return torch.randint(0, high, (count,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


@pytest.mark.parametrize("name", NAMES)
@given(shape=shapes, seed=st.integers(0, 2**32))
@settings(max_examples=10, deadline=None)
def test_archives_of_every_dtype(name: str, shape: list[int], seed: int) -> None:
    tensor = random_tensor(getattr(torch, name), shape, seed)
    assert_equal(rebuilt(saved(tensor)), tensor)


@given(
    dtype=st.sampled_from([torch.float32, torch.int8, torch.complex64, torch.float8_e5m2]),
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    seed=st.integers(0, 2**32),
    steps=st.lists(st.sampled_from(["transpose", "slice", "step", "select", "expand", "unsqueeze"]), max_size=4),
    wrap=st.sampled_from(["", "conj", "neg", "parameter"]),
)
@settings(max_examples=200, deadline=None)
def test_archives_of_views(dtype: torch.dtype, shape: list[int], seed: int, steps: list[str], wrap: str) -> None:
    tensor = random_tensor(dtype, shape, seed)
    for step in steps:
        if step == "unsqueeze" or tensor.dim() == 0:
            tensor = tensor.unsqueeze(0)
        elif step == "transpose":
            tensor = tensor.transpose(0, -1)
        elif step == "slice":
            tensor = tensor[1:]
        elif step == "step":
            tensor = tensor[..., ::2]
        elif step == "select" and tensor.shape[0] > 0:
            tensor = tensor[-1]
        elif step == "expand":
            tensor = tensor.unsqueeze(0).expand(3, *tensor.shape)
    if dtype.is_complex and wrap:
        tensor = tensor.conj()
        tensor = tensor.imag if wrap == "neg" else tensor
    to_save = torch.nn.Parameter(tensor, requires_grad=False) if wrap == "parameter" else tensor
    again = rebuilt(saved(to_save))
    if tensor.numel() > 0:
        assert (again.is_conj(), again.is_neg()) == (tensor.is_conj(), tensor.is_neg())
    assert_equal(again, tensor)


def test_an_archive_of_other_things_is_left_to_torch() -> None:
    assert _testing.tensor_archive(saved({"a": torch.ones(2)})) is None
    assert _testing.tensor_archive(saved(torch.eye(2).to_sparse())) is None


def test_damage_is_an_error() -> None:
    with pytest.raises(CorruptCheckpointError, match="archive"):
        _testing.tensor_archive(saved(torch.ones(2))[:-1])


def assert_metadata_is_read(directory: Path, wanted: Metadata) -> None:
    read = BcpReader(directory).read_metadata()
    assert read.storage_meta is not None
    read.storage_meta.load_id = None  # only this reader has it
    assert list(read.state_dict_metadata) == list(wanted.state_dict_metadata), "order of the keys"
    assert read == without_strides(wanted)


def test_metadata_of_a_stock_checkpoint(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "steps": [1, (2.5, "three")],
        "\u00e9": None,
    }
    dcp.save(state, checkpoint_id=tmp_path)
    content = (tmp_path / ".metadata").read_bytes()
    assert_metadata_is_read(tmp_path, pickle.loads(content))
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        (tmp_path / ".metadata").write_bytes(pickle.dumps(pickle.loads(content), protocol))
        assert_metadata_is_read(tmp_path, pickle.loads(content))


def test_each_record_of_a_stock_checkpoint(tmp_path: Path) -> None:
    state = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(5, dtype=torch.bfloat16), "c": torch.tensor(3)}
    dcp.save(state, checkpoint_id=tmp_path)
    for index, place in BcpReader(tmp_path).read_metadata().storage_data.items():
        record = (tmp_path / place.relative_path).read_bytes()[place.offset : place.offset + place.length]
        assert_equal(rebuilt(record), state[index.fqn])
