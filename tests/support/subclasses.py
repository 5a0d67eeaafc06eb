# SPDX-License-Identifier: Apache-2.0
"""Tensor subclasses that describe themselves by ``__tensor_flatten__``, as quantized tensors of torchao do."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import return_and_correct_aliasing

__all__ = ["Int8Rows", "MaybeScaled", "Mode", "PerTensor", "Tiling", "TwoLevels"]

_aten: Any = torch.ops.aten


class Mode(enum.Enum):
    SYMMETRIC = 1
    AFFINE = 2


@dataclass(frozen=True)
class Tiling:
    rows: int = 1
    mode: Mode = Mode.SYMMETRIC


class _Wrapper(torch.Tensor):
    """A subclass with tensors in attributes, whose operations are those of the tensors in them."""

    names: tuple[str, ...] = ()
    shape_of = "qdata"  # the part of which the shape is that of the tensor

    @staticmethod
    def __new__(cls, *parts: torch.Tensor, tiling: Any = Tiling(), dtype: torch.dtype = torch.float32) -> Any:
        like = parts[cls.names.index(cls.shape_of)]
        make: Any = torch.Tensor._make_wrapper_subclass
        return make(cls, like.shape, dtype=dtype, device=like.device)

    def __init__(self, *parts: torch.Tensor, tiling: Any = Tiling(), dtype: torch.dtype = torch.float32) -> None:
        for name, part in zip(self.names, parts, strict=True):
            setattr(self, name, part)
        self.tiling = tiling

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        return [*self.names], {"tiling": self.tiling, "dtype": self.dtype, "shape": self.shape, "device": self.device}

    @classmethod
    def __tensor_unflatten__(cls, parts: Any, context: Any, outer_size: Any, outer_stride: Any) -> Any:
        return cls(*(parts[name] for name in cls.names), tiling=context["tiling"], dtype=context["dtype"])

    def parts(self) -> list[torch.Tensor]:
        return [getattr(self, name) for name in self.names]

    def of(self, parts: Any) -> Any:
        return type(self)(*parts, tiling=self.tiling, dtype=self.dtype)

    def with_dim(self, function: Any, args: Any, dim: int) -> list[Any]:
        """Calls an operation along a dim on all parts that have this dim, and passes the others on."""
        return [function(part, *args) if self.has_dim(name, dim) else part for name, part in self.named_parts()]

    def named_parts(self) -> Any:
        return zip(self.names, self.parts(), strict=True)

    def has_dim(self, name: str, dim: int) -> bool:
        return name == self.shape_of

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        value = args[0]
        if func in (_aten.detach.default, _aten.clone.default, _aten.alias.default):
            return return_and_correct_aliasing(func, args, kwargs, value.of([func(part) for part in value.parts()]))
        if func is _aten._to_copy.default:
            kept = {key: each for key, each in kwargs.items() if key != "dtype"}
            return value.of([func(part, **kept) for part in value.parts()])
        if func in (_aten.slice.Tensor, _aten.narrow.default):
            dim = args[1] if len(args) > 1 else 0
            return return_and_correct_aliasing(func, args, kwargs, value.of(value.with_dim(func, args[1:], dim)))
        if func is _aten.split.Tensor:
            size, dim = args[1], args[2] if len(args) > 2 else kwargs.get("dim", 0)
            begins = range(0, value.shape[dim], size)
            return [value.narrow(dim, at, min(size, value.shape[dim] - at)) for at in begins]
        if func is _aten.is_pinned.default:
            return False
        if func is _aten.copy_.default:
            for part, other in zip(value.parts(), args[1].parts(), strict=True):
                part.copy_(other)
            return value
        if func in (_aten.view.default, _aten.as_strided.default):
            seen = [func(part, *args[1:]) if name == value.shape_of else part for name, part in value.named_parts()]
            return return_and_correct_aliasing(func, args, kwargs, value.of(seen))
        if func is _aten.new_zeros.default:
            zeros = []
            for name, part in value.named_parts():
                has_dims = [value.has_dim(name, dim) for dim in range(part.ndim)]
                zeros.append(part.new_zeros([args[1][d] if has else part.shape[d] for d, has in enumerate(has_dims)]))
            return value.of(zeros)
        raise NotImplementedError(f"{cls.__name__}: {func}")


class Int8Rows(_Wrapper):
    """A matrix of int8 with a scale for each row, and a table that does not depend on the shape."""

    names = ("qdata", "scale", "table")

    def has_dim(self, name: str, dim: int) -> bool:
        return name == "qdata" or (name == "scale" and dim == 0)

    @classmethod
    def make(cls, rows: int, columns: int, seed: int, **options: Any) -> Int8Rows:
        generator = torch.Generator().manual_seed(seed)
        qdata = torch.randint(-128, 128, (rows, columns), generator=generator, dtype=torch.int8)
        table = torch.linspace(-1, 1, 64)
        return cls(qdata, torch.rand(rows, 1, generator=generator), table, **options)


class PerTensor(_Wrapper):
    """A tensor of float8 with one scale."""

    names = ("qdata", "scale")

    @classmethod
    def make(cls, rows: int, columns: int, scale: float, **options: Any) -> PerTensor:
        qdata = torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns).to(torch.float8_e4m3fn)
        return cls(qdata, torch.tensor(scale), **options)


class MaybeScaled(_Wrapper):
    """A tensor of int8 that has a factor or has none, as torchao's NVFP4Tensor has a scale for the whole tensor."""

    names = ("qdata", "factor")

    def __init__(self, *parts: torch.Tensor, **options: Any) -> None:
        self.names = self.names[: len(parts)]
        super().__init__(*parts, **options)

    @classmethod
    def make(cls, rows: int, columns: int, value: int, factor: float | None = None, **options: Any) -> MaybeScaled:
        factors = [] if factor is None else [torch.tensor(factor)]
        return cls(torch.full((rows, columns), value, dtype=torch.int8), *factors, **options)


class TwoLevels(_Wrapper):
    """A tensor of a subclass within a subclass."""

    names = ("inner",)
    shape_of = "inner"
