# SPDX-License-Identifier: Apache-2.0
"""Transforms: tensors that are put together from stored ones. Nothing is read or gathered for them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bytecheckpoint.errors import ConfigError, KeyMismatchError
from bytecheckpoint.load_spec.dequantize import Dequantize, DequantizeMXFP4
from bytecheckpoint.load_spec.patterns import filled, template_names
from bytecheckpoint.load_spec.rename import Rename
from bytecheckpoint.load_spec.transform import Naming, Tensors, Transform, matching

if TYPE_CHECKING:
    from bytecheckpoint.native import _core

__all__ = [
    "KINDS",
    "Concat",
    "Pad",
    "Permute",
    "Reshape",
    "Slice",
    "Split",
    "Stack",
    "Transpose",
    "Unstack",
]


def _number_placeholder(transform: Transform, numbered: str, plain: str) -> str:
    """Returns the placeholder that ``numbered`` has and ``plain`` lacks."""
    others = [name for name in template_names(numbered) if name not in template_names(plain)]
    if len(others) != 1:
        raise ConfigError(f"{transform}: '{numbered}' must have one placeholder that '{plain}' lacks: the number")
    return others[0]


def _as_dim(dim: int, num_dims: int) -> int:
    """Returns a dim that may be counted from the end."""
    if not -num_dims <= dim < num_dims:
        raise ConfigError(f"dim {dim} of {num_dims} dims")
    return dim % num_dims


@dataclass(frozen=True)
class Stack(Transform):
    """Stacks numbered tensors: ``Stack("experts.{i}.w", "experts.w")`` makes one of ``experts.0.w``, ``experts.1.w``...

    Args:
        source: Names of the tensors. The placeholder that ``to`` lacks is their number; numbers count from 0 on,
            without a gap.
        to: Name of the new tensor.
        dim: Where the new dim is.
    """

    source: str
    to: str
    dim: int = 0

    def apply(self, tensors: Tensors) -> None:
        """See ``Transform``."""
        number_of = _number_placeholder(self, self.source, self.to)
        stacks: dict[str, dict[int, str]] = {}
        for name, values in matching(self, tensors, self.source).items():
            if not re.fullmatch(r"0|[1-9][0-9]*", values[number_of]):
                raise KeyMismatchError(f"{self}: '{name}': '{values[number_of]}' is not a number")
            stacks.setdefault(filled(self.to, values), {})[int(values[number_of])] = name
        for to, by_number in stacks.items():
            missing = [str(number) for number in range(max(by_number) + 1) if number not in by_number]
            if missing:
                raise KeyMismatchError(
                    f"{self}: '{to}': the checkpoint has numbers up to {max(by_number)}, but lacks "
                    f"{', '.join(missing[:20])}"
                )
            with Naming(self, to):
                parts = [tensors.take(by_number[number]) for number in range(len(by_number))]
                tensors.give(to, tensors.stack(parts, _as_dim(self.dim, len(parts[0].shape) + 1)))

    def inverted(self) -> Unstack:
        """See ``Transform``."""
        self.check_way_back([self.to], [self.source], _number_placeholder(self, self.source, self.to))
        return Unstack(self.to, self.source, self.dim)


@dataclass(frozen=True)
class Unstack(Transform):
    """Undoes ``Stack``: ``Unstack("experts.w", "experts.{i}.w")``.

    Args:
        source: Name of the tensor.
        to: Names of the new tensors. The placeholder that ``source`` lacks is their number.
        dim: The dim that goes.
    """

    source: str
    to: str
    dim: int = 0

    def apply(self, tensors: Tensors) -> None:
        """See ``Transform``."""
        number_of = _number_placeholder(self, self.to, self.source)
        for name, values in matching(self, tensors, self.source).items():
            with Naming(self, name):
                whole = tensors.take(name)
                dim = _as_dim(self.dim, len(whole.shape))
                shape = [size for d, size in enumerate(whole.shape) if d != dim]
                for number in range(whole.shape[dim]):
                    one = whole.narrow(dim, number, 1).reshape(shape)
                    tensors.give(filled(self.to, {**values, number_of: str(number)}), one)

    def inverted(self) -> Stack:
        """See ``Transform``."""
        self.check_way_back([self.to], [self.source])
        return Stack(self.to, self.source, self.dim)


# Sizes of parts that are equal, whatever they are.
_ALIKE = "alike"


@dataclass(frozen=True)
class Concat(Transform):
    """Joins tensors: ``Concat(["layers.{l}.q", "layers.{l}.k", "layers.{l}.v"], "layers.{l}.qkv")``.

    Args:
        sources: Names of the tensors, in their order; all have the same placeholders.
        to: Name of the new tensor.
        dim: The dim along which they are joined.
        sizes: Size of each along ``dim``, or ``alike`` if all are equal: ``inverted`` needs them. Tensors of other
            sizes are then refused. None: any.
    """

    sources: Sequence[str]
    to: str
    dim: int = 0
    sizes: Sequence[int] | str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.sizes, str) and self.sizes != _ALIKE:
            raise ConfigError(f"{self}: sizes must be '{_ALIKE}', or a size for each tensor")
        if self.sizes is not None and self.sizes != _ALIKE and len(self.sizes) != len(self.sources):
            raise ConfigError(f"{self}: {len(self.sizes)} sizes for {len(self.sources)} tensors")

    def apply(self, tensors: Tensors) -> None:
        """See ``Transform``."""
        first, *_ = self.sources
        there = set(tensors.names())
        for name, values in matching(self, tensors, first).items():
            names = [name, *(filled(source, values) for source in self.sources[1:])]
            missing = [each for each in names if each not in there]
            if missing:
                raise KeyMismatchError(f"{self}: '{name}' is in the checkpoint, but not {missing}")
            with Naming(self, name):
                taken = {each: tensors.take(each) for each in dict.fromkeys(names)}  # one may be there twice
                parts = [taken[each] for each in names]
                dim = _as_dim(self.dim, len(parts[0].shape))
                joined = tensors.cat(parts, dim)
                self._check_sizes([each.shape[dim] for each in parts])
                tensors.give(filled(self.to, values), joined)

    def _check_sizes(self, sizes: Sequence[int]) -> None:
        if self.sizes is None:
            return
        wanted = [sizes[0]] * len(sizes) if self.sizes == _ALIKE else [*self.sizes]
        if [*sizes] != wanted:
            raise ConfigError(f"sizes {[*sizes]} along dim {self.dim}, but sizes={self.sizes!r}")

    def inverted(self) -> Split:
        """See ``Transform``."""
        if self.sizes is None:
            raise ConfigError(
                f"{self}: it cannot be inverted: nothing says how large each part of '{self.to}' is; pass "
                "sizes=[...], or sizes='alike'"
            )
        if len({*self.sources}) != len(self.sources):
            raise ConfigError(f"{self}: it cannot be inverted: one name stands twice in {[*self.sources]}")
        self.check_way_back([self.to], self.sources)
        sizes = None if isinstance(self.sizes, str) else self.sizes
        return Split(self.to, self.sources, sizes, self.dim)


@dataclass(frozen=True)
class Split(Transform):
    """Cuts a tensor: ``Split("layers.{l}.qkv", ["layers.{l}.q", "layers.{l}.k", "layers.{l}.v"], sizes=[64, 16, 16])``.

    Args:
        source: Name of the tensor.
        to: Names of the new tensors, in their order.
        sizes: Size of each along ``dim``; None: all alike.
        dim: The dim that is cut.
    """

    source: str
    to: Sequence[str]
    sizes: Sequence[int] | None = None
    dim: int = 0

    def apply(self, tensors: Tensors) -> None:
        """See ``Transform``."""
        for name, values in matching(self, tensors, self.source).items():
            with Naming(self, name):
                whole = tensors.take(name)
                dim = _as_dim(self.dim, len(whole.shape))
                size = whole.shape[dim]
                sizes = [size // len(self.to)] * len(self.to) if self.sizes is None else [*self.sizes]
                if sum(sizes) != size or len(sizes) != len(self.to):
                    raise ConfigError(f"{len(self.to)} parts of sizes {sizes} do not make {size}, dim {dim} of it")
                begin = 0
                for to, length in zip(self.to, sizes, strict=True):
                    tensors.give(filled(to, values), whole.narrow(dim, begin, length))
                    begin += length

    def inverted(self) -> Concat:
        """See ``Transform``."""
        self.check_way_back(self.to, [self.source])
        return Concat(self.to, self.source, self.dim, _ALIKE if self.sizes is None else self.sizes)


@dataclass(frozen=True)
class _OfOne(Transform):
    """A transform of one tensor.

    Args:
        source: Name of the tensor; may also have ``*``.
        to: Name of the new tensor; None keeps the name.
    """

    source: str
    to: str | None = None

    def apply(self, tensors: Tensors) -> None:
        """See ``Transform``."""
        for name, values in matching(self, tensors, self.source).items():
            with Naming(self, name):
                to = name if self.to is None else filled(self.to, values)
                tensors.give(to, self._changed(tensors.take(name)))

    def _changed(self, tensor: _core.ViewTensor) -> _core.ViewTensor:
        raise NotImplementedError

    def _way_back(self) -> tuple[str, str | None]:
        """Returns ``source`` and ``to`` of the transform that undoes this one."""
        if self.to is None:
            return self.source, None
        self.check_way_back([self.to], [self.source])
        return self.to, self.source


@dataclass(frozen=True)
class Slice(_OfOne):
    """Takes a part of a tensor: ``Slice("embed.weight", dim=0, begin=0, end=32000)``.

    Args:
        dim: The dim that is cut.
        begin: First element that stays.
        end: Behind the last element that stays; None: the end.
    """

    dim: int = 0
    begin: int = 0
    end: int | None = None

    def _changed(self, tensor: _core.ViewTensor) -> _core.ViewTensor:
        dim = _as_dim(self.dim, len(tensor.shape))
        end = tensor.shape[dim] if self.end is None else self.end
        return tensor.narrow(dim, self.begin, end - self.begin)

    def inverted(self) -> Transform:
        """See ``Transform``."""
        raise ConfigError(f"{self}: it cannot be inverted: what it leaves out of '{self.source}' is not known")


@dataclass(frozen=True)
class Pad(_OfOne):
    """Makes a dim of a tensor longer: ``Pad("embed.weight", size=32064)``, for a vocabulary with rows to spare.

    A load leaves the new elements as the state has them. ``read`` and conversions, which have no state, make them zero.

    Args:
        dim: The dim.
        size: Its new size.
        multiple: The new size is the next multiple of this number, in the place of ``size``.
    """

    dim: int = 0
    size: int | None = None
    multiple: int | None = None

    def __post_init__(self) -> None:
        given = [each for each in (self.size, self.multiple) if each is not None]
        if len(given) != 1 or isinstance(given[0], bool) or not isinstance(given[0], int) or not 0 < given[0] < 1 << 63:
            raise ConfigError(f"{self}: pass size or multiple, an int from 1 on")

    def _changed(self, tensor: _core.ViewTensor) -> _core.ViewTensor:
        dim = _as_dim(self.dim, len(tensor.shape))
        size = self.size or -(-tensor.shape[dim] // (self.multiple or 1)) * (self.multiple or 1)
        if size < tensor.shape[dim]:
            raise ConfigError(f"dim {dim} has {tensor.shape[dim]}, more than size={size}: Slice makes it shorter")
        return tensor.pad(dim, size)

    def inverted(self) -> Transform:
        """See ``Transform``."""
        raise ConfigError(f"{self}: it cannot be inverted: the size before is not known; use Slice")


@dataclass(frozen=True)
class Transpose(_OfOne):
    """Exchanges two dims of a tensor: ``Transpose("*.kernel")``.

    Args:
        dim0: One dim.
        dim1: The other one.
    """

    dim0: int = 0
    dim1: int = 1

    def _changed(self, tensor: _core.ViewTensor) -> _core.ViewTensor:
        num_dims = len(tensor.shape)
        dims = [*range(num_dims)]
        a, b = _as_dim(self.dim0, num_dims), _as_dim(self.dim1, num_dims)
        dims[a], dims[b] = dims[b], dims[a]
        return tensor.permute(dims)

    def inverted(self) -> Transpose:
        """See ``Transform``."""
        return Transpose(*self._way_back(), self.dim0, self.dim1)


@dataclass(frozen=True)
class Permute(_OfOne):
    """Puts the dims of a tensor in another order: ``Permute("conv.weight", dims=[2, 3, 1, 0])``.

    Args:
        dims: For each dim of the new tensor, that of the stored one.
    """

    dims: Sequence[int] = ()

    def _changed(self, tensor: _core.ViewTensor) -> _core.ViewTensor:
        return tensor.permute([_as_dim(dim, len(tensor.shape)) for dim in self.dims])

    def inverted(self) -> Permute:
        """See ``Transform``."""
        dims = [_as_dim(dim, len(self.dims)) for dim in self.dims]
        return Permute(*self._way_back(), [dims.index(dim) for dim in range(len(dims))])


@dataclass(frozen=True)
class Reshape(_OfOne):
    """Gives a tensor another shape: ``Reshape("layers.{l}.qkv", shape=[3, -1, 64])``.

    Args:
        shape: The new shape; one number may be -1.
        source_shape: The shape before, of which one number may be -1: ``inverted`` needs it. A tensor of another shape
            is then refused. None: any.
    """

    shape: Sequence[int] = ()
    source_shape: Sequence[int] | None = None

    def _changed(self, tensor: _core.ViewTensor) -> _core.ViewTensor:
        if self.source_shape is not None and [*tensor.shape] != _known_shape(self.source_shape, tensor.shape):
            raise ConfigError(f"it has shape {[*tensor.shape]}, but source_shape={[*self.source_shape]}")
        return tensor.reshape(_known_shape(self.shape, tensor.shape))

    def inverted(self) -> Reshape:
        """See ``Transform``."""
        if self.source_shape is None:
            raise ConfigError(
                f"{self}: it cannot be inverted: nothing says what shape '{self.source}' had; pass source_shape"
            )
        return Reshape(*self._way_back(), self.source_shape, self.shape)


def _known_shape(shape: Sequence[int], of: Sequence[int]) -> list[int]:
    """Returns a shape with as many elements as another one has, in the place of its -1."""
    known = math.prod(size for size in shape if size != -1)
    return [size if size != -1 else math.prod(of) // max(known, 1) for size in shape]


KINDS: Mapping[str, type[Transform]] = {
    "concat": Concat,
    "dequantize": Dequantize,
    "dequantize_mxfp4": DequantizeMXFP4,
    "pad": Pad,
    "permute": Permute,
    "rename": Rename,
    "reshape": Reshape,
    "slice": Slice,
    "split": Split,
    "stack": Stack,
    "transpose": Transpose,
    "unstack": Unstack,
}
