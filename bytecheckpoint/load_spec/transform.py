# SPDX-License-Identifier: Apache-2.0
"""What all transforms of a ``LoadSpec`` have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from bytecheckpoint.errors import CheckpointError, ConfigError, KeyMismatchError
from bytecheckpoint.load_spec.patterns import has_wildcards, template_names, whole_name

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

    def rename(self, names: Mapping[str, str]) -> None:
        """Gives new names to tensors and objects, all at once."""

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

    def check_way_back(self, names: Sequence[str], before: Sequence[str], number: str | None = None) -> None:
        """Refuses to undo a transform whose new names do not say what the names before were.

        Args:
            names: Names that it gives.
            before: Names of what it takes.
            number: A placeholder that the way back counts, so that the new names need not have it.

        Raises:
            ConfigError: There are wildcards, or a placeholder that the new names lack.
        """
        for each in (*names, *before):
            if has_wildcards(each):
                raise ConfigError(f"{self}: it cannot be inverted: '{each}' has wildcards")
        for name in names:
            for lost in {each for source in before for each in template_names(source)} - {
                *template_names(name),
                number,
            }:
                raise ConfigError(f"{self}: it cannot be inverted: '{name}' does not say what {{{lost}}} was")


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
