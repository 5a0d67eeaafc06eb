# SPDX-License-Identifier: Apache-2.0
"""Tests that objects with tensors beside values of standard types load without opting in, as torch.load makes them."""

from __future__ import annotations

import collections
import datetime
import io
import types
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlanner

from bytecheckpoint import BcpLoadPlanner, BcpReader, BcpWriter
from bytecheckpoint._core import is_standard, load_standard
from bytecheckpoint.errors import CorruptCheckpointError

PROTOCOLS = (2, 3, 4, 5)


def saved(value: Any, protocol: int = 2) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_protocol=protocol)
    return buffer.getvalue()


def zipped(entries: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return out.getvalue()


def with_pickle(archive: bytes, old: bytes, new: bytes) -> bytes:
    """Returns the archive with other bytes in its pickle, and the CRC of these bytes."""
    with zipfile.ZipFile(io.BytesIO(archive)) as source:
        entries = {name: source.read(name) for name in source.namelist()}
    (name,) = (name for name in entries if name.endswith("data.pkl"))
    assert entries[name].count(old) == 1
    return zipped({**entries, name: entries[name].replace(old, new)})


class Tagged(torch.Tensor):
    pass


def tensors_beside_standard_types() -> dict[str, Any]:
    base = torch.arange(6.0)
    return {
        "losses": collections.deque([torch.ones(2), base[1:3], base.view(2, 3).T], maxlen=5),
        "space": types.SimpleNamespace(
            parameter=torch.nn.Parameter(torch.ones(1), requires_grad=False),
            gradient=torch.ones(2, requires_grad=True),
            when=datetime.datetime(2024, 2, 29),
        ),
        "tensors": (torch.zeros(0, 3), torch.tensor(1 + 2j), torch.ones(2, dtype=torch.bfloat16), {1}),
        "newer": [torch.ones(3, dtype=torch.uint16), torch.ones(2).to(torch.float8_e4m3fn), frozenset()],
    }


def assert_are_equal_tensors(got: Any, wanted: Any) -> None:
    assert type(got) is type(wanted)
    if isinstance(wanted, torch.Tensor):
        assert (got.dtype, got.shape, got.stride()) == (wanted.dtype, wanted.shape, wanted.stride())
        assert (got.requires_grad, got.device) == (wanted.requires_grad, wanted.device)
        assert got.detach().flatten().tolist() == wanted.detach().flatten().tolist()
    elif isinstance(wanted, dict):
        assert got.keys() == wanted.keys()
        for key, value in wanted.items():
            assert_are_equal_tensors(got[key], value)
    elif isinstance(wanted, types.SimpleNamespace):
        assert_are_equal_tensors(vars(got), vars(wanted))
    elif isinstance(wanted, list | tuple | collections.deque):
        for one, other in zip(got, wanted, strict=True):
            assert_are_equal_tensors(one, other)
    else:
        assert got == wanted


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_tensors_beside_standard_types(protocol: int) -> None:
    value = tensors_beside_standard_types()
    archive = saved(value, protocol)
    assert is_standard(archive)
    (back,) = load_standard(archive) or (None,)
    assert_are_equal_tensors(back, value)
    assert back["losses"].maxlen == 5
    _, first, second = back["losses"]
    first.fill_(9.0)
    assert second[1, 0] == 9.0  # as with torch.load, views of one storage share it
    back["losses"][0].resize_(100)  # it has memory of its own


@pytest.mark.parametrize("planner", [DefaultLoadPlanner, BcpLoadPlanner])
@pytest.mark.parametrize("writer", [dcp.FileSystemWriter, BcpWriter])
def test_tensors_beside_standard_types_through_dcp(tmp_path: Path, writer: Any, planner: type[LoadPlanner]) -> None:
    value = tensors_beside_standard_types()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "bytecheckpoint")
        dcp.save(value, storage_writer=writer(tmp_path))
    got: dict[str, Any] = {"losses": None, "space": None}
    dcp.load(got, storage_reader=BcpReader(tmp_path), planner=planner())
    assert_are_equal_tensors(got, {key: value[key] for key in got})


@pytest.mark.parametrize(
    "value",
    [torch.ones(2).as_subclass(Tagged), torch.ones(2).to_sparse(), torch.tensor([1j]).conj()],
    ids=["subclass", "sparse", "conjugate"],
)
def test_other_tensors_beside_standard_types_stay_refused(value: Any) -> None:
    archive = saved([{1}, value])
    assert not is_standard(archive)
    assert load_standard(archive) is None


def test_tensors_and_builtin_values_alone_are_left_to_torch() -> None:
    assert load_standard(saved([torch.ones(2), 1, "a"])) is None


def test_damage_of_a_tensor_beside_standard_types_is_found() -> None:
    archive = bytearray(saved([{1}, torch.arange(64, dtype=torch.uint8)]))
    archive[archive.index(bytes(range(64))) + 7] ^= 1
    with pytest.raises(CorruptCheckpointError, match="CRC"):
        load_standard(archive)


def test_a_tensor_that_reaches_out_of_its_storage_is_refused() -> None:
    archive = saved([{1}, torch.arange(8, dtype=torch.uint8)[2:]])
    with pytest.raises(CorruptCheckpointError, match="outside its storage"):
        load_standard(with_pickle(archive, b"K\x06\x85", b"K\x07\x85"))


def test_a_device_that_is_not_there_is_named() -> None:
    archive = saved([{1}, torch.arange(2)])
    with pytest.raises(RuntimeError, match="gpu"):
        load_standard(with_pickle(archive, b"X\x03\0\0\0cpu", b"X\x03\0\0\0gpu"))
