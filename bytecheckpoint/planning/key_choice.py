# SPDX-License-Identifier: Apache-2.0
"""``KeyChoice``: which keys of a state dict a save stores, and in which dtypes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from bytecheckpoint.errors import ConfigError
from bytecheckpoint.listing import listed
from bytecheckpoint.load_spec.patterns import compiled
from bytecheckpoint.native import _C

__all__ = ["KeyChoice", "refuse_unmatched"]

# Floats of 8 bits have scales that belong to them.
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class KeyChoice:
    """Patterns of the keys that a save stores, of those that it leaves out, and dtypes in which it stores tensors.

    Args:
        include: Patterns of the keys to save; none: all keys.
        exclude: Patterns of keys that are left out, also if ``include`` matches them.
        cast: Dtypes of floating-point tensors, by pattern; the first that matches a key counts.

    Raises:
        ConfigError: A pattern or a dtype is none.
    """

    def __init__(
        self,
        include: str | Sequence[str] = (),
        exclude: str | Sequence[str] = (),
        cast: Mapping[str, str | torch.dtype] | None = None,
    ) -> None:
        self.include = (include,) if isinstance(include, str) else tuple(include)
        self.exclude = (exclude,) if isinstance(exclude, str) else tuple(exclude)
        for pattern in (*self.include, *self.exclude):
            if not isinstance(pattern, str):
                raise ConfigError(f"include, exclude: {pattern!r} is no pattern: it must be a str")
            compiled(pattern)
        if cast is not None and not isinstance(cast, Mapping):
            raise ConfigError(f"cast={cast!r}: must be a dict of patterns and dtypes, such as {{'*': 'bfloat16'}}")
        self.cast = {pattern: _dtype_of(pattern, dtype) for pattern, dtype in (cast or {}).items()}

    def __bool__(self) -> bool:
        """Whether any pattern is given."""
        return bool(self.include or self.exclude or self.cast)

    def chosen(
        self, flat: Mapping[str, Any], mappings: dict[str, Any] | None
    ) -> tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]:
        """Chooses values of a flat state, and casts tensors. What is cast is new memory, beside the tensor's.

        Args:
            flat: Values by key.
            mappings: Paths by key; None if the state is not nested.

        Returns:
            The chosen values, their paths, and the patterns that match no key, or no tensor that can be cast.

        Raises:
            ConfigError: A tensor that is to be cast is neither a plain one nor a DTensor.
        """
        kept, paths, is_used = _C.choose_keys(dict(flat), mappings, _matchers(self.include), _matchers(self.exclude))
        patterns = zip((*self.include, *self.exclude), is_used, strict=True)
        unmatched = [pattern for pattern, used in patterns if not used]
        return kept, paths, (*unmatched, *self._cast(kept))

    def _cast(self, kept: dict[str, Any]) -> list[str]:
        """Casts values of a flat state, in place. Returns the patterns that match no tensor of 16 to 64-bit floats."""
        matchers = [(compiled(pattern).fullmatch, pattern, dtype) for pattern, dtype in self.cast.items()]
        unused = {*self.cast}
        for key, value in kept.items() if matchers else ():
            found = next(((pattern, dtype) for fits, pattern, dtype in matchers if fits(key)), None)
            if found is None or getattr(value, "dtype", None) not in _FLOATS:
                continue
            if type(value) not in (torch.Tensor, torch.nn.Parameter) and not isinstance(value, DTensor):
                raise ConfigError(
                    f"save(cast=...): '{key}' is a {type(value).__name__}: only plain tensors and DTensors are cast"
                )
            kept[key] = value.detach().to(found[1])
            unused.discard(found[0])
        return [pattern for pattern in self.cast if pattern in unused]

    def applied(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a nested state as it is saved: cast, with an empty tensor for each value that is not chosen.

        It is for staging: the memory of what is left out is not copied. The planner leaves the empty tensors out. The
        state keeps its form, so that all keys keep their names.
        """
        flat, _ = _C.flatten_state_dict(state_dict)
        kept, _, _ = self.chosen(flat, None)
        blanked: dict[str, Any] = _C.with_kept(dict(state_dict), flat, kept, torch.empty(0))
        return blanked


def refuse_unmatched(of_ranks: Sequence[Sequence[str]]) -> None:
    """Refuses patterns that match no key of any rank: they are typos more often than not.

    Args:
        of_ranks: For each rank the patterns that match no key of it.

    Raises:
        ConfigError: A pattern is among those of every rank.
    """
    first, *others = map(list, of_ranks)
    nobodys = [pattern for pattern in first if all(pattern in unmatched for unmatched in others)]
    if nobodys:
        raise ConfigError(
            f"save: these patterns of include and exclude match no key of the state, or those of cast no tensor of "
            f"floats, on any rank: {listed([*map(repr, nobodys)])}"
        )


def _dtype_of(pattern: object, dtype: object) -> torch.dtype:
    if not isinstance(pattern, str):
        raise ConfigError(f"cast: {pattern!r} is no pattern: it must be a str")
    compiled(pattern)
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if found not in _FLOATS:
        raise ConfigError(f"cast={{{pattern!r}: {dtype!r}}}: must be one of {', '.join(map(str, _FLOATS))}")
    return found


def _matchers(patterns: Sequence[str]) -> list[Callable[[str], object]]:
    return [compiled(pattern).fullmatch for pattern in patterns]
