# SPDX-License-Identifier: Apache-2.0
"""Draws a state, and a ``LoadSpec`` for it, with what plain torch makes of the whole state in the same steps."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bytecheckpoint import LoadSpec
from bytecheckpoint.transforms import (
    Concat,
    Dequantize,
    DequantizeMXFP4,
    Permute,
    Rename,
    Reshape,
    Slice,
    Split,
    Stack,
    Transform,
    Transpose,
    Unstack,
)

__all__ = ["Drawing", "draw_spec"]

_PLAIN = (torch.float32, torch.bfloat16, torch.float64, torch.int16, torch.complex64)
_CASTS = {torch.float32: torch.bfloat16, torch.bfloat16: torch.float32, torch.float64: torch.float32}
_FP4 = (0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)


@dataclass(frozen=True)
class Drawing:
    """What was drawn.

    Attributes:
        stored: The whole tensors to save.
        spec: How they are loaded.
        wanted: The whole tensors that this must give.
        kinds: The kinds of transforms.
    """

    stored: Mapping[str, torch.Tensor]
    spec: LoadSpec
    wanted: Mapping[str, torch.Tensor]
    kinds: Sequence[str]


class _Drawer:
    def __init__(self, draw: random.Random, is_invertible: bool) -> None:
        self.draw = draw
        self.is_invertible = is_invertible
        self.stored: dict[str, torch.Tensor] = {}
        self.now: dict[str, torch.Tensor] = {}
        self.transforms: list[Transform] = []
        self._generator = torch.Generator().manual_seed(draw.getrandbits(32))

    def shape(self, least: int = 1, most: int = 3) -> list[int]:
        return [self.draw.randint(1, 9) for _ in range(self.draw.randint(least, most))]

    def add(self, name: str, value: torch.Tensor) -> torch.Tensor:
        self.stored[name] = self.now[name] = value
        return value

    def plain(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        count = torch.Size(shape).numel()
        return self.add(name, torch.randperm(count, generator=self._generator).reshape(shape).to(dtype))

    def codes(self, low: int, high: int, shape: Sequence[int]) -> torch.Tensor:
        return torch.randint(low, high, [*shape], dtype=torch.uint8, generator=self._generator)

    def take(self, *names: str) -> list[torch.Tensor]:
        return [self.now.pop(name) for name in names]

    def stack(self, key: str) -> list[str]:
        shape, dtype, count = self.shape(0), self.draw.choice(_PLAIN), self.draw.randint(1, 4)
        names = [f"{key}.{i}.w" for i in range(count)]
        for name in self.draw.sample(names, count):
            self.plain(name, shape, dtype)
        dim = self.draw.randint(-len(shape) - 1, len(shape))
        self.transforms.append(Stack(f"{key}.{{i}}.w", f"{key}.all", dim))
        self.now[f"{key}.all"] = torch.stack(self.take(*names), dim)
        return [f"{key}.all"]

    def unstack(self, key: str) -> list[str]:
        shape = self.shape()
        whole = self.plain(key, shape, self.draw.choice(_PLAIN))
        dim = self.draw.randint(-len(shape), len(shape) - 1)
        self.transforms.append(Unstack(key, f"{key}.{{i}}", dim))
        self.take(key)
        parts = {f"{key}.{i}": part for i, part in enumerate(whole.unbind(dim))}
        self.now |= parts
        return [*parts]

    def concat(self, key: str) -> list[str]:
        """Draws q, k and v, of other sizes, that are joined."""
        shape, dtype = self.shape(), self.draw.choice(_PLAIN)
        dim = self.draw.randrange(len(shape))
        names = [f"{key}.{part}" for part in "qkv"[: self.draw.randint(1, 3)]]
        sizes = []
        for name in names:
            shape[dim] = self.draw.randint(1, 9)
            sizes.append(shape[dim])
            self.plain(name, shape, dtype)
        self.transforms.append(Concat(names, f"{key}.qkv", dim, sizes if self.is_invertible else None))
        self.now[f"{key}.qkv"] = torch.cat(self.take(*names), dim)
        return [f"{key}.qkv"]

    def split(self, key: str) -> list[str]:
        shape = self.shape()
        dim, names = self.draw.randrange(len(shape)), [f"{key}.{part}" for part in "qkv"]
        sizes = [self.draw.randint(0, 6) for _ in names]
        if is_even := self.draw.random() < 0.3:
            sizes = [sizes[0]] * 3
        shape[dim] = sum(sizes)
        whole = self.plain(key, shape, self.draw.choice(_PLAIN))
        self.transforms.append(Split(key, names, None if is_even else sizes, dim))
        self.take(key)
        self.now |= dict(zip(names, whole.split(sizes, dim), strict=True))
        return names

    def one(self, key: str) -> list[str]:
        self.plain(key, self.shape(0, 4), self.draw.choice(_PLAIN))
        return [key]

    def dequantize(self, key: str) -> list[str]:
        """Draws codes with one scale for all, for each row, or for each block, of which the last may be cut."""
        shape = [self.draw.randint(1, 12) for _ in range(self.draw.randint(2, 3))]
        codes = self.add(f"{key}.w", self.codes(0, 0x7F, shape).view(torch.float8_e4m3fn))
        how, block = self.draw.choice(["one", "rows", "blocks"]), [1] * (len(shape) - 2)
        block += [self.draw.randint(1, 6), self.draw.randint(1, 6)] if how == "blocks" else [1, shape[-1]]
        counts = [-(-size // one) for size, one in zip(shape, block, strict=True)]
        if how == "one":
            block, counts = shape, [1] * len(shape)
        scales = torch.rand(counts, generator=self._generator) + 0.5
        self.add(
            f"{key}.s", scales if how == "blocks" else scales.flatten() if how == "one" else scales[..., 0].clone()
        )
        dtype = self.draw.choice([torch.bfloat16, torch.float16, torch.float32])
        two = block[-2:] if how == "blocks" else None
        self.transforms.append(Dequantize(f"{key}.w", f"{key}.s", block=two, dtype=str(dtype).removeprefix("torch.")))
        for dim, size in enumerate(block):
            scales = scales.repeat_interleave(size, dim)
        self.take(f"{key}.w", f"{key}.s")
        self.now[f"{key}.w"] = (codes.float() * scales[tuple(map(slice, shape))]).to(dtype)
        return [f"{key}.w"]

    def mxfp4(self, key: str) -> list[str]:
        *outer, size = [*self.shape(2), self.draw.choice([1, 2, 16])]
        blocks = self.add(f"{key}_blocks", self.codes(0, 256, [*outer, size]))
        exponents = self.add(f"{key}_scales", self.codes(110, 140, outer))
        is_transposed = self.draw.random() < 0.5
        self.transforms.append(DequantizeMXFP4(f"{key}_blocks", f"{key}_scales", key, transpose=is_transposed))
        values = torch.stack([torch.tensor(_FP4)[(blocks & 15).long()], torch.tensor(_FP4)[(blocks >> 4).long()]], -1)
        scaled = values.flatten(-2) * (exponents.float() - 127).exp2()[..., None]
        made = scaled.to(torch.bfloat16).flatten(-2)
        self.take(f"{key}_blocks", f"{key}_scales")
        self.now[key] = made.transpose(-1, -2) if is_transposed and made.dim() > 1 else made
        return [key]

    def rename(self, name: str) -> None:
        self.transforms.append(Rename({name: f"renamed.{name}"}))
        (self.now[f"renamed.{name}"],) = self.take(name)

    def change(self, name: str) -> None:
        """Draws a transform of one tensor."""
        value, draw = self.now[name], self.draw
        kinds = ["transpose", "permute"] + ["slice"] * (not self.is_invertible)
        if not name.startswith("mxfp4"):  # pairs of codes cannot be cut apart, which any reshape may do
            kinds.append("reshape")
        kind = draw.choice(kinds)
        dims = range(value.dim())
        if kind == "transpose" and dims:
            a, b = draw.choice(dims) - len(dims), draw.choice(dims)
            self.transforms.append(Transpose(name, dim0=a, dim1=b))
            self.now[name] = value.transpose(a, b)
        elif kind == "permute" and dims:
            order = draw.sample(dims, len(dims))
            self.transforms.append(Permute(name, dims=order))
            self.now[name] = value.permute(order)
        elif kind == "slice" and dims:
            dim = draw.choice(dims)
            begin = draw.randint(0, value.shape[dim])
            end = draw.randint(min(begin + draw.choice([0, 1, 1, 1]), value.shape[dim]), value.shape[dim])
            self.transforms.append(Slice(name, dim=dim, begin=begin, end=end))
            self.now[name] = value.narrow(dim, begin, end - begin)
        elif kind == "reshape" and value.numel():
            shape, left = [], value.numel()
            while left > 1 and len(shape) < 3:
                shape.append(draw.choice([d for d in range(1, left + 1) if left % d == 0]))
                left //= shape[-1]
            shape.append(left)
            before = [*value.shape] if self.is_invertible else None
            self.transforms.append(Reshape(name, shape=[*shape[:-1], -1], source_shape=before))
            self.now[name] = value.reshape(shape)


def draw_spec(draw: random.Random, *, is_invertible: bool = False) -> Drawing:
    """Draws each kind of transform, in any order, others of what they make, and then renames and casts.

    Args:
        draw: Two calls with equal ones return the same.
        is_invertible: Whether to draw only what can be inverted, and no casts.
    """
    drawer = _Drawer(draw, is_invertible)
    kinds: list[Callable[[str], list[str]]] = [
        drawer.stack,
        drawer.unstack,
        drawer.concat,
        drawer.split,
        drawer.one,
        *([] if is_invertible else [drawer.dequantize, drawer.mxfp4]),
    ]
    for number, kind in enumerate(draw.sample(kinds, len(kinds))):
        for name in kind(f"{kind.__name__}{number}"):
            for _ in range(draw.randint(0, 2)):
                drawer.change(name)
            if draw.random() < 0.2:
                drawer.rename(name)
    wanted = {f"net.{name}": value.contiguous() for name, value in drawer.now.items()}
    casts: dict[str, Any] = {
        name: _CASTS[value.dtype]
        for name, value in wanted.items()
        if value.dtype in _CASTS and draw.random() < 0.3 and not is_invertible
    }
    spec = LoadSpec(rename={"": "net"}, transforms=drawer.transforms)
    if casts:
        spec = dataclasses.replace(
            spec, cast={name: str(dtype).removeprefix("torch.") for name, dtype in casts.items()}
        )
    wanted = {name: value.to(casts.get(name, value.dtype)) for name, value in wanted.items()}
    return Drawing(drawer.stored, spec, wanted, [type(each).__name__ for each in drawer.transforms])
