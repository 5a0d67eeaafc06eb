# SPDX-License-Identifier: Apache-2.0
"""States that tests stage, functions that save them, and functions that compare and change states."""

from __future__ import annotations

import collections
import copy
import dataclasses
import io
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.named_values import numbers
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torch.distributed.tensor import DTensor
from torch.testing._internal.two_tensor import TwoTensor

from bytecheckpoint import BcpStager, BcpWriter, Config, registered
from bytecheckpoint.compat.private_names import PLAIN_DTYPES, quantization
from bytecheckpoint.staging import staged_state as _staged

# With this, a test that leaks memory fails, and does not wait.
RAISES = Config(on_staging_busy="raise")
LIMIT_S = 30.0
# Marks for tests that stage.
MARKS = [
    pytest.mark.timeout(60),
    pytest.mark.usefixtures("no_state_is_left"),
    pytest.mark.filterwarnings(
        "ignore:Sparse CSR",
        "ignore:ComplexHalf",
        "ignore:torch.quantize_per_tensor",
        "ignore:Detected an existing checkpoint",
    ),
]


@dataclasses.dataclass
class Schedule:
    """An object of a user, with a tensor in it."""

    warmup: list[int]
    rates: torch.Tensor


class Pair(NamedTuple):
    x: torch.Tensor
    y: int


def frozen(value: Any) -> Any:
    """Returns all that matters of a state, as plain values. A parameter counts as the tensor that it is staged as."""
    if isinstance(value, DTensor):
        about = value.placements, value.device_mesh.mesh.tolist(), value.shape, value.stride(), value.requires_grad
        return (DTensor, *about, frozen(value.to_local().detach()))
    if isinstance(value, TwoTensor):
        return TwoTensor, frozen(value.a), frozen(value.b)
    if isinstance(value, torch.Tensor):
        about = value.dtype, tuple(value.shape), value.layout, value.device.type, value.requires_grad
        return (*about, frozen_elements(value.detach()))
    if isinstance(value, dict):
        kind = dict if isinstance(value, _staged.StagedState) else type(value)
        return kind, [(key, frozen(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [frozen(item) for item in value]
    if isinstance(value, io.BytesIO):
        return value.getvalue(), value.tell()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Schedule):
        return Schedule, frozen(vars(value))
    return copy.copy(value)


def frozen_elements(tensor: torch.Tensor) -> Any:
    if tensor.device.type == "meta":
        return None
    if tensor.layout == torch.sparse_coo:
        return tensor.is_coalesced(), frozen(tensor._indices()), frozen(tensor._values())
    if tensor.layout == torch.sparse_csr:
        return frozen(tensor.crow_indices()), frozen(tensor.col_indices()), frozen(tensor.values())
    if tensor.is_quantized:
        return quantization(tensor), frozen(tensor.int_repr())
    # Even a contiguous tensor may have any strides along dims of size 1.
    row = tensor.resolve_conj().resolve_neg().contiguous().as_strided((tensor.numel(),), (1,))
    return row.view(torch.uint8).numpy().tobytes()


def spoil(value: Any) -> None:
    """Changes everything that can be changed in place."""
    if isinstance(value, torch.Tensor):
        for part in plain_parts(value):
            part.untyped_storage().copy_(flipped(part.untyped_storage()))
    elif isinstance(value, dict | collections.deque | list | set | bytearray):
        for item in list(value.values() if isinstance(value, dict) else value):
            spoil(item)
        value.clear()
    elif isinstance(value, tuple):
        for item in value:
            spoil(item)
    elif isinstance(value, io.BytesIO):
        value.write(b"spoilt")
    elif isinstance(value, np.ndarray):
        value.fill(0)
    elif isinstance(value, Schedule):
        spoil(vars(value))


def plain_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Returns the plain tensors that hold the memory of ``tensor``."""
    if isinstance(tensor, DTensor):
        return [tensor.to_local().detach()]
    if isinstance(tensor, TwoTensor):
        return [tensor.a, tensor.b]
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout == torch.sparse_csr:
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    return [] if tensor.device.type == "meta" else [tensor.detach()]


def flipped(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    return torch.empty(0, dtype=torch.uint8).set_(storage).bitwise_not().untyped_storage()


def broad() -> dict[str, Any]:
    whole = numbers("whole", (6, 8))
    tied = numbers("tied", (3, 5))
    shared = [1, [2]]
    return {
        "dtypes": {str(dtype): numbers(str(dtype), (2, 3), dtype) for dtype in sorted(PLAIN_DTYPES, key=str)},
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": [torch.empty(0, 4), torch.empty(3, 0, dtype=torch.int8), torch.empty(0)],
        "views": {
            "transposed": whole.t(),
            "strided": whole[1::2, ::3],
            "overlapping": (whole[:4], whole[2:], whole.as_strided((3, 3), (1, 1))),
            "expanded": numbers("expanded", (1, 3)).expand(4, 3),
            "permuted": numbers("images", (2, 3, 2, 2)).contiguous(memory_format=torch.channels_last),
            "conj": torch.complex(torch.arange(3.0), torch.ones(3)).conj(),
            "neg": torch._neg_view(torch.arange(3.0)),
        },
        "tied": {"in": tied, "out": tied, "turned": tied.t()},
        "parameter": torch.nn.Parameter(numbers("parameter", (4,))),
        "leaf": torch.ones(2, requires_grad=True),
        "result": torch.ones(2, requires_grad=True) * 3,
        "quantized": torch.quantize_per_tensor(torch.arange(6.0), 0.5, 3, torch.quint8),
        "sparse": torch.eye(3).to_sparse(),
        "csr": torch.eye(3).to_sparse_csr(),
        "meta": torch.ones(2, device="meta"),
        "wrapper": TwoTensor(numbers("a", (2,)), numbers("b", (2,))),
        "ordered": collections.OrderedDict(b=torch.ones(2), a=[(torch.zeros(1), {"deep": torch.arange(3)})]),
        "pair": Pair(torch.ones(2), 3),
        "default": collections.defaultdict(list, {"t": torch.ones(3), "l": [1]}),
        "objects": [1, 2.5, True, None, "text \u00e4", b"\0x", 1 << 80, 1j, torch.float16, torch.Size([2])],
        "containers": {"set": {1, 2}, "bytearray": bytearray(b"abc"), "shared": [shared, shared], "": [], 7: "seven"},
        "file": io.BytesIO(b"some bytes"),
        "array": np.arange(4),
        "schedule": Schedule([1, 2], torch.arange(3.0)),
    }


def save_async(
    how: str, state: dict[str, Any], path: Path, planner: Any = None, config: Config = RAISES
) -> Future[Any] | AsyncSaveResponse:
    arguments: dict[str, Any] = {"planner": planner, "no_dist": True}
    if how == "writer":
        return dcp.async_save(state, storage_writer=BcpWriter(path, config=config), **arguments)
    if how == "stager":
        stager = BcpStager(config=config)
        return dcp.async_save(state, storage_writer=dcp.FileSystemWriter(path), async_stager=stager, **arguments)
    with registered(config=config):
        return dcp.async_save(state, checkpoint_id=path, **arguments)


def start(how: str, state: dict[str, Any], path: Path, planner: Any = None, config: Config = RAISES) -> Future[Any]:
    future = save_async(how, state, path, planner, config)
    assert isinstance(future, Future)
    return future


HOWS = ("writer", "stager", "registered")


def one(number: int, count: int = 5000) -> dict[str, Any]:
    return {"w": torch.full((count,), float(number)), "step": number}
