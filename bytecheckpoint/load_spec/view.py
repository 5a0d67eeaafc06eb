# SPDX-License-Identifier: Apache-2.0
"""A checkpoint as a ``LoadSpec`` describes it: under new names, with tensors put together from stored ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from bytecheckpoint.errors import ConfigError, InvalidPlanError, KeyMismatchError, UnsupportedError
from bytecheckpoint.listing import listed
from bytecheckpoint.load_spec.spec import LoadSpec

if TYPE_CHECKING:
    from bytecheckpoint.native import _core

__all__ = ["view_of"]


def view_of(checkpoint: Any, spec: LoadSpec, extension: Any) -> tuple[Any, dict[str, str]]:
    """Returns the checkpoint that ``spec`` describes, which is read like any other, and what it renames.

    Args:
        checkpoint: The stored one.
        spec: What to load of it.
        extension: The extension module of ``checkpoint``: ``_C`` or ``_core``.

    Returns:
        The view, or ``checkpoint`` itself if it is taken as it is; and the new name of each key that has one, also of
        those that went through a transform.

    Raises:
        ConfigError: A pattern matches nothing, or a transform does not fit its tensors.
        KeyMismatchError: Two keys would get one name, or keys that a transform needs are missing.
    """
    if spec.changes_nothing:
        return checkpoint, {}
    tensors = _Tensors(spec.chosen(checkpoint.names()), extension.ViewBuilder(checkpoint), extension)
    for transform in spec.transforms:
        transform.apply(tensors)
    tensors.rename(spec.renamed(tensors.names()))
    tensors.builder.keep([(name, made) for name, made in tensors.made.items() if isinstance(made, str)])
    for name, made in tensors.made.items():
        if not isinstance(made, str):
            try:
                tensors.builder.add(name, made)
            except UnsupportedError as error:
                raise ConfigError(str(error)) from None
    return tensors.builder.finish(), {old: new for new, old in tensors.first_names.items() if old != new}


class _Tensors:
    """See ``transforms.Tensors``.

    Attributes:
        made: Each name with its tensor; its name in the checkpoint for what is as it is stored.
        first_names: For each name that a rename gave the one that the tensor had before all renames.
    """

    def __init__(self, names: Sequence[str], builder: _core.ViewBuilder, extension: Any) -> None:
        self.made: dict[str, _core.ViewTensor | str] = {name: name for name in names}
        self.first_names: dict[str, str] = {}
        self.builder = builder
        self._extension = extension

    def names(self) -> list[str]:
        return [*self.made]

    def look(self, name: str) -> _core.ViewTensor:
        made = self.made[name]
        try:
            return self.builder.tensor(made) if isinstance(made, str) else made
        except InvalidPlanError as error:
            raise ConfigError(str(error)) from None

    def take(self, name: str) -> _core.ViewTensor:
        taken = self.look(name)
        del self.made[name]
        self.first_names.pop(name, None)
        return taken

    def give(self, name: str, tensor: _core.ViewTensor) -> None:
        if name in self.made:
            raise KeyMismatchError(f"'{name}': two sources for one key: it is in the checkpoint already")
        self.made[name] = tensor

    def rename(self, names: Mapping[str, str]) -> None:
        _refuse_collisions(names)
        self.first_names = {names[name]: self.first_names.get(name, name) for name in self.made}
        self.made = {names[name]: made for name, made in self.made.items()}

    def dequantize(
        self, codes: _core.ViewTensor, scales: _core.ViewTensor, block: Sequence[int], dtype: str, is_packed: bool
    ) -> _core.ViewTensor:
        try:
            return self.builder.dequantize(codes, scales, block, dtype, is_packed)
        except InvalidPlanError as error:
            raise ConfigError(str(error)) from None

    def cat(self, parts: Sequence[_core.ViewTensor], dim: int) -> _core.ViewTensor:
        return cast("_core.ViewTensor", self._extension.ViewBuilder.cat(parts, dim))

    def stack(self, parts: Sequence[_core.ViewTensor], dim: int) -> _core.ViewTensor:
        return cast("_core.ViewTensor", self._extension.ViewBuilder.stack(parts, dim))


def _refuse_collisions(names: Mapping[str, str]) -> None:
    """Refuses renames that give one name to two keys."""
    first: dict[str, str] = {}
    twice = []
    for old, new in names.items():
        if first.setdefault(new, old) != old:
            twice.append(f"'{new}' of '{first[new]}' and '{old}'")
    if twice:
        raise KeyMismatchError(f"LoadSpec(rename=...): two sources for one key: {listed(twice)}")
