# SPDX-License-Identifier: Apache-2.0
"""What computes the elements that a conversion writes from those of several checkpoints."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Protocol

from bytecheckpoint.config import Config
from bytecheckpoint.load_spec.spec import LoadSpec
from bytecheckpoint.native import _core

if TYPE_CHECKING:
    import torch

__all__ = ["FLOATS", "Change", "shapes_of"]

# In which elements of each dtype are computed: those of 64 bits as they are.
FLOATS = {"float16": "float32", "bfloat16": "float32", "float32": "float32", "float64": "float64"}


class Change(Protocol):
    """Computes elements. It travels to the processes that write files."""

    def prepare(self, wanted: _core.Checkpoint, place: str, spec: LoadSpec | None, config: Config) -> None:
        """Finds out which tensors it computes, and opens what it needs for that.

        Args:
            wanted: What is converted.
            place: Path or URL of the source.
            spec: How it was made of the source.
            config: Settings.

        Raises:
            CheckpointError: What it needs cannot be read.
            KeyMismatchError: It does not fit the names of ``wanted``.
            ShapeMismatchError: It does not fit their shapes.
        """

    @property
    def names(self) -> Collection[str]:
        """The tensors that it computes."""

    def compute(self, name: str, first: int, elements: torch.Tensor) -> torch.Tensor:
        """Returns the elements that take the place of others.

        Args:
            name: Name of the tensor.
            first: Number of the first element, in row-major order.
            elements: The elements of the source, with one dim, in their dtype.
        """

    def identity(self) -> bytes:
        """Returns what tells it from every other change: a conversion goes on only with the same one."""


def shapes_of(checkpoint: _core.Checkpoint) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Returns dtype and shape of all tensors of plain elements, by name."""
    return {
        name: (dtype, tuple(shape))
        for name, dtype, shape, itemsize, *_ in checkpoint.contents()
        if dtype is not None and itemsize
    }
