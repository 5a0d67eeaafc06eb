# SPDX-License-Identifier: Apache-2.0
"""What all transforms of a ``LoadSpec`` have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from bytecheckpoint.errors import CheckpointError, ConfigError, KeyMismatchError
from bytecheckpoint.load_spec.patterns import whole_name

if TYPE_CHECKING:
    from bytecheckpoint.native import _core

__all__ = ["Naming", "Tensors", "Transform", "matching"]


class Tensors(Protocol):
    """The tensors of a checkpoint, by name, as far as transforms have changed them."""

    def names(self) -> Sequence[str]:
        """Returns all names, of objects, too."""

    def take(self, name: str) -> _core.ViewTensor:
        """Returns a tensor, which has this name no more."""

    def look(self, name: str) -> _core.ViewTensor:
        """Returns a tensor, which keeps its name."""

    def give(self, name: str, tensor: _core.ViewTensor) -> None:
        """Gives a name to a tensor."""

    def cat(self, parts: Sequence[_core.ViewTensor], dim: int) -> _core.ViewTensor:
        """Joins tensors along a dim."""

    def stack(self, parts: Sequence[_core.ViewTensor], dim: int) -> _core.ViewTensor:
        """Joins tensors along a new dim."""

    def dequantize(
        self, codes: _core.ViewTensor, scales: _core.ViewTensor, block: Sequence[int], dtype: str, is_packed: bool
    ) -> _core.ViewTensor:
        """Makes the tensor of the values of a quantized one."""


class Transform:
    """What all transforms have in common. Names in a transform are whole names of the checkpoint, before any rename.

    ``{name}`` in them stands for one part of a name, as ``{layer}`` in ``layers.{layer}.q.weight``. The transform is
    carried out for each value that it has.
    """

    def apply(self, tensors: Tensors) -> None:
        """Carries out the transform.

        Raises:
            KeyMismatchError: No name fits, or some of the names that belong together are missing.
            ConfigError: The tensors are not such as the transform needs; the message names them.
        """
        raise NotImplementedError

    def inverted(self) -> Transform:
        """Returns the transform that undoes this one.

        Raises:
            ConfigError: It cannot be undone, or not without knowing the shapes.
        """
        raise ConfigError(f"{self}: it cannot be inverted")


def matching(transform: Transform, tensors: Tensors, template: str) -> dict[str, dict[str, str]]:
    """Returns the names that fit a template, with the values of its placeholders."""
    pattern = whole_name(template)
    found = {name: match.groupdict() for name in tensors.names() if (match := pattern.fullmatch(name))}
    if not found:
        raise KeyMismatchError(f"{transform}: no key of the checkpoint fits '{template}'")
    return found


class Naming:
    """Adds to errors which transform failed, and for which key."""

    def __init__(self, transform: Transform, name: str) -> None:
        self._where = f"{transform}: '{name}'"

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, CheckpointError) and self._where not in str(error):
            kind = KeyMismatchError if isinstance(error, KeyMismatchError) else ConfigError
            raise kind(f"{self._where}: {error}") from error
