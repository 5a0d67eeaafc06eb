# SPDX-License-Identifier: Apache-2.0
"""Draws nested states as training jobs have them: tensors of every kind of memory, and objects between them."""

from __future__ import annotations

import datetime
import random
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["draw_state"]

_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
)
_NAMES = ("weight", "bias", "exp_avg", "step", "0", "a.b", "layers", "\u00e4", "with space", "__subclass", "m/n")
_OBJECTS: tuple[Callable[[random.Random], Any], ...] = (
    lambda draw: draw.randint(-(2**70), 2**70),
    lambda draw: draw.choice([0.0, -0.0, 1e300, float("inf"), draw.random()]),
    lambda draw: draw.choice([None, True, False]),
    lambda draw: "text \u20ac" * draw.randint(0, 3),
    lambda draw: draw.randbytes(draw.randint(0, 40)),
    lambda draw: (1, (2.5, "x"), draw.randint(0, 9)),
    lambda draw: deque([draw.randint(0, 9)], maxlen=3),
    lambda draw: {draw.randint(0, 9)},
    lambda draw: torch.Size([draw.randint(0, 5), 2]),
    lambda draw: draw.choice(_DTYPES),
    lambda draw: datetime.datetime(2026, 1, draw.randint(1, 28)),
    lambda draw: [draw.randint(0, 9), "plain", None],
    lambda draw: [],
    lambda draw: {},
)


def _draw_values(draw: random.Random, shape: tuple[int, ...]) -> torch.Tensor:
    dtype = draw.choice(_DTYPES)
    generator = torch.Generator().manual_seed(draw.getrandbits(32))
    elements = torch.Size(shape).numel()
    most = 2 if dtype is torch.bool else 256
    values = torch.randint(0, most, (elements * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return values.view(dtype).reshape(shape)


def _draw_shape(draw: random.Random) -> tuple[int, ...]:
    if draw.random() < 0.05:
        return (draw.randint(300_000, 700_000),)  # more than one block of checksums
    return tuple(draw.choice([0, 1, 2, 3, 7, 64]) for _ in range(draw.randint(0, 4)))


def _draw_tensor(draw: random.Random) -> torch.Tensor:
    tensor = _draw_values(draw, _draw_shape(draw))
    kind = draw.randrange(7)
    if kind == 0 and tensor.dim() > 1:
        tensor = tensor.transpose(0, -1)
    elif kind == 1 and tensor.dim() and tensor.shape[0] > 2:
        tensor = tensor[1:-1]
    elif kind == 2 and tensor.dim() and tensor.shape[-1] > 1:
        tensor = tensor[..., ::2]
    elif kind == 3 and tensor.is_complex():
        tensor = tensor.conj()
    elif kind == 4 and tensor.dim() and tensor.shape[0] > 1:
        tensor = tensor[:1].expand(tensor.shape)
    elif kind == 5 and tensor.is_floating_point():
        tensor = torch.nn.Parameter(tensor)
    elif kind == 6 and tensor.dim() == 4:
        tensor = tensor.contiguous(memory_format=torch.channels_last)
    return tensor


def _draw_value(draw: random.Random, depth: int) -> Any:
    kind = draw.random()
    if depth and kind < 0.3:
        return _draw_dict(draw, depth - 1)
    if depth and kind < 0.4:
        values = [_draw_value(draw, depth - 1) for _ in range(draw.randint(1, 3))]
        return tuple(values) if draw.random() < 0.2 else values
    return _draw_tensor(draw) if kind < 0.75 else draw.choice(_OBJECTS)(draw)


def _draw_dict(draw: random.Random, depth: int) -> dict[str, Any]:
    names = draw.sample(_NAMES, draw.randint(1, 5))
    items = [(name, _draw_value(draw, depth)) for name in names]
    return OrderedDict(items) if draw.random() < 0.2 else dict(items)


def draw_state(draw: random.Random) -> dict[str, Any]:
    """Returns a state of up to four levels whose keys do not meet when they are flattened."""
    return {f"part{number}": _draw_value(draw, 3) for number in range(draw.randint(1, 6))}
