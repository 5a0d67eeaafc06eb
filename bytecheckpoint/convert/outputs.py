# SPDX-License-Identifier: Apache-2.0
"""What of a checkpoint is converted, and into which dtypes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from bytecheckpoint.errors import ConfigError
from bytecheckpoint.listing import listed
from bytecheckpoint.load_spec.patterns import matches
from bytecheckpoint.native import _core
from bytecheckpoint.near_names import did_you_mean

__all__ = ["OutputTensor", "Outputs", "outputs_of"]

# Only these are converted by `dtype`: 8-bit floats have scales that belong to them.
_FLOATS = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class OutputTensor:
    """A tensor as it is written.

    Attributes:
        name: Its name.
        dtype: Its dtype in the target, as torch names it.
        shape: Its shape.
        num_bytes: Bytes of its elements.
        itemsize: Bytes of one element.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    itemsize: int


@dataclass(frozen=True)
class Outputs:
    """All of a checkpoint that is converted.

    Attributes:
        tensors: Its tensors of plain elements.
        objects: Names of its objects, with the bytes of each.
        opaque: Names of tensors that only ``torch.load`` can read, with the bytes and the dtype of each.
        num_cast: Number of tensors whose dtype is changed.
        num_values_cast: Number of their elements.
    """

    tensors: tuple[OutputTensor, ...]
    objects: dict[str, int]
    opaque: dict[str, tuple[int, str]]
    num_cast: int
    num_values_cast: int

    @property
    def num_items(self) -> int:
        """Number of tensors of all kinds."""
        return len(self.tensors) + len(self.opaque)

    @property
    def num_bytes(self) -> int:
        """Bytes of all of them."""
        opaque = sum(num_bytes for num_bytes, _ in self.opaque.values())
        return sum(each.num_bytes for each in self.tensors) + sum(self.objects.values()) + opaque

    @property
    def opaque_text(self) -> str:
        """The opaque tensors and their dtypes, for messages."""
        return listed([f"'{name}' is {dtype}" for name, (_, dtype) in self.opaque.items()])


def outputs_of(checkpoint: _core.Checkpoint, dtype: str | None, casts: Mapping[str, object] | None = None) -> Outputs:
    """Returns what is converted.

    Args:
        checkpoint: All of it is converted.
        dtype: Dtype to which floating-point tensors are cast; None casts nothing.
        casts: Other dtypes for the keys that match a pattern. The first pattern that matches a key counts.

    Raises:
        ConfigError: A dtype is none to which tensors are cast, a pattern matches no tensor that can be cast, or the
            checkpoint is empty.
    """
    wanted = {pattern: _checked(name) for pattern, name in (casts or {}).items()}
    if dtype is not None:
        dtype = _checked(dtype)
    unused = {*wanted}
    tensors: list[OutputTensor] = []
    objects: dict[str, int] = {}
    opaque: dict[str, tuple[int, str]] = {}
    cast: list[OutputTensor] = []
    for name, stored, shape, itemsize, num_bytes, *_ in checkpoint.contents():
        if stored is None:
            objects[name] = num_bytes
        elif not itemsize:
            opaque[name] = num_bytes, stored
        else:
            pattern = next((each for each in wanted if matches(each, name)), None) if stored in _FLOATS else None
            unused.discard(pattern or "")
            to = (dtype if pattern is None else wanted[pattern]) if stored in _FLOATS else None
            itemsize = itemsize if to is None else _FLOATS[to]
            tensors.append(OutputTensor(name, to or stored, tuple(shape), math.prod(shape) * itemsize, itemsize))
            cast += [tensors[-1]] if to not in (None, stored) else []
    if not tensors and not objects and not opaque:
        raise ConfigError("there is nothing to convert")
    if unused:
        raise ConfigError(
            f"LoadSpec(cast=...): {listed([*map(repr, sorted(unused))])}: no tensor of 16 to 64-bit floats has a name "
            "like it, or an earlier pattern takes them all"
        )
    return Outputs(tuple(tensors), objects, opaque, len(cast), sum(math.prod(each.shape) for each in cast))


def _checked(dtype: object) -> str:
    name = str(dtype).removeprefix("torch.")
    if name not in _FLOATS:
        raise ConfigError(f"dtype {name!r}: must be one of {', '.join(_FLOATS)}{did_you_mean(name, _FLOATS)}")
    return name
