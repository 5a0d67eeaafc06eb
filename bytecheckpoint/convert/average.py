# SPDX-License-Identifier: Apache-2.0
"""The average of several checkpoints, computed while it is written."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bytecheckpoint.config import Config
from bytecheckpoint.convert.change import FLOATS, shapes_of
from bytecheckpoint.convert.source import Source, identity_of
from bytecheckpoint.errors import ConfigError, KeyMismatchError, ShapeMismatchError
from bytecheckpoint.listing import listed
from bytecheckpoint.load_spec.spec import LoadSpec
from bytecheckpoint.native import _core

if TYPE_CHECKING:
    import torch

__all__ = ["Average"]


class Average:
    """Adds up tensors of several checkpoints, each with its weight, in float32; those of float64 in float64.

    All have the same names and shapes. Tensors of integers must be equal; objects are those of the first checkpoint.

    Args:
        places: The other checkpoints.
        weights: One for each checkpoint, that of the source first.
    """

    def __init__(self, places: Sequence[str], weights: Sequence[float] | None) -> None:
        num = 1 + len(places)
        if weights is not None and (len(weights) != num or not all(map(math.isfinite, weights))):
            raise ConfigError(f"weights={[*weights]}: must be {num} finite numbers, that of the source first")
        self._places = tuple(places)
        self._weights = tuple(weights) if weights is not None else (1 / num,) * num
        self._saves: tuple[str, ...] = ()  # identities; none before the first `prepare`
        self._dtypes: dict[str, str] = {}
        self._numbers: dict[str, int] = {}
        self._others: list[Any] = []

    @property
    def names(self) -> Collection[str]:
        """See ``Change``."""
        return self._dtypes.keys()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_others": []}  # each process opens them for itself

    def prepare(self, wanted: _core.Checkpoint, place: str, spec: LoadSpec | None, config: Config) -> None:
        """See ``Change``."""
        shapes = shapes_of(wanted)
        saves = []
        self._others = []
        for other in self._places:
            source = Source(other, spec, config)
            opened = source.open()
            saves.append(identity_of(opened))
            _compare(other, shapes, shapes_of(opened.wanted))
            self._others.append(source.reader(opened, [*shapes]))
        if self._saves and self._saves != (*saves,):
            raise ConfigError(f"convert: another save has replaced one of {[*self._places]} meanwhile; begin anew")
        self._saves = (*saves,)
        self._dtypes = {name: dtype for name, (dtype, _) in shapes.items()}
        self._numbers = {name: number for number, name in enumerate(shapes)}

    def identity(self) -> bytes:
        """See ``Change``."""
        return repr((self._places, self._weights, self._saves)).encode()

    def compute(self, name: str, first: int, elements: torch.Tensor) -> torch.Tensor:
        """See ``Change``."""
        import torch

        dtype = self._dtypes[name]
        within = getattr(torch, FLOATS[dtype]) if dtype in FLOATS else None
        total = elements if within is None else elements.to(within) * self._weights[0]
        for place, other, weight in zip(self._places, self._others, self._weights[1:], strict=True):
            read = self._read(other, name, first, elements.numel())
            if within is not None:
                total.add_(read.to(within), alpha=weight)
            elif not torch.equal(read, elements):
                raise ConfigError(
                    f"convert: '{name}' is {dtype}, which has no average, and differs in {place}: leave it out "
                    "(exclude)"
                )
        return total

    def _read(self, reader: Any, name: str, first: int, count: int) -> torch.Tensor:
        import torch

        number = self._numbers[name]
        dtype, itemsize = reader.dtypes[number]
        memory = torch.empty(count * itemsize, dtype=torch.uint8, device="cpu")
        reader.read([(number, first, first + count, 0)], memory.numpy().data)
        return memory.view(getattr(torch, dtype))


def _compare(place: str, wanted: Mapping[str, Any], there: Mapping[str, Any]) -> None:
    """Refuses a checkpoint of other tensors.

    Raises:
        KeyMismatchError: It has others.
        ShapeMismatchError: One has another shape, or one of both is of integers.
    """
    missing, more = [name for name in wanted if name not in there], [name for name in there if name not in wanted]
    if missing or more:
        lacks = [f"it lacks {listed(missing, 5)}"] if missing else []
        has = [f"it has {listed(more, 5)}, which the source lacks"] if more else []
        raise KeyMismatchError(f"convert: no average with {place}: {'; '.join(lacks + has)}", place)
    wrong = [
        f"'{name}' is {dtype} {[*shape]}, but there {there[name][0]} {[*there[name][1]]}"
        for name, (dtype, shape) in wanted.items()
        if there[name][1] != shape or (there[name][0] != dtype and not {dtype, there[name][0]} <= {*FLOATS})
    ]
    if wrong:
        raise ShapeMismatchError(f"convert: no average with {place}: {listed(wrong, 5)}", place)
