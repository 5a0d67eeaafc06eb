# SPDX-License-Identifier: Apache-2.0
"""What of a checkpoint is converted, and into which dtypes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bytecheckpoint.errors import ConfigError
from bytecheckpoint.listing import listed
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
    """

    tensors: tuple[OutputTensor, ...]
    objects: dict[str, int]
    opaque: dict[str, tuple[int, str]]
    num_cast: int

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


def outputs_of(checkpoint: _core.Checkpoint, dtype: str | None) -> Outputs:
    """Returns what is converted.

    Args:
        checkpoint: All of it is converted.
        dtype: Dtype to which floating-point tensors are cast; None casts nothing.

    Raises:
        ConfigError: ``dtype`` is none to which tensors are cast, or the checkpoint is empty.
    """
    if dtype is not None and dtype not in _FLOATS:
        raise ConfigError(f"dtype {dtype!r}: must be one of {', '.join(_FLOATS)}{did_you_mean(dtype, _FLOATS)}")
    tensors: list[OutputTensor] = []
    objects: dict[str, int] = {}
    opaque: dict[str, tuple[int, str]] = {}
    casts = 0
    for name, stored, shape, itemsize, num_bytes, *_ in checkpoint.contents():
        if stored is None:
            objects[name] = num_bytes
        elif not itemsize:
            opaque[name] = num_bytes, stored
        else:
            if dtype is not None and stored in _FLOATS and stored != dtype:
                stored, itemsize, casts = dtype, _FLOATS[dtype], casts + 1
            tensors.append(OutputTensor(name, stored, tuple(shape), math.prod(shape) * itemsize, itemsize))
    if not tensors and not objects and not opaque:
        raise ConfigError("there is nothing to convert")
    return Outputs(tuple(tensors), objects, opaque, casts)
