# SPDX-License-Identifier: Apache-2.0
"""``KeyChoice``: which keys of a state dict a save stores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from bytecheckpoint.errors import ConfigError
from bytecheckpoint.listing import listed
from bytecheckpoint.load_spec.patterns import compiled
from bytecheckpoint.native import _C

__all__ = ["KeyChoice", "refuse_unmatched"]


class KeyChoice:
    """Patterns of the keys that a save stores, and of those that it leaves out.

    Args:
        include: Patterns of the keys to save; none: all keys.
        exclude: Patterns of keys that are left out, also if ``include`` matches them.

    Raises:
        ConfigError: A pattern is none.
    """

    def __init__(self, include: str | Sequence[str] = (), exclude: str | Sequence[str] = ()) -> None:
        self.include = (include,) if isinstance(include, str) else tuple(include)
        self.exclude = (exclude,) if isinstance(exclude, str) else tuple(exclude)
        for pattern in (*self.include, *self.exclude):
            if not isinstance(pattern, str):
                raise ConfigError(f"include, exclude: {pattern!r} is no pattern: it must be a str")
            compiled(pattern)

    def __bool__(self) -> bool:
        """Whether any pattern is given."""
        return bool(self.include or self.exclude)

    def chosen(
        self, flat: Mapping[str, Any], mappings: dict[str, Any] | None
    ) -> tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]:
        """Chooses values of a flat state.

        Args:
            flat: Values by key.
            mappings: Paths by key; None if the state is not nested.

        Returns:
            The chosen values, their paths, and the patterns that match no key.
        """
        kept, paths, is_used = _C.choose_keys(dict(flat), mappings, _matchers(self.include), _matchers(self.exclude))
        patterns = zip((*self.include, *self.exclude), is_used, strict=True)
        return kept, paths, tuple(pattern for pattern, used in patterns if not used)

    def without_others(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a nested state in which an empty tensor stands for each value that is not chosen.

        It is for staging: the memory of what is left out is not copied. The planner leaves the empty tensors out. The
        state keeps its form, so that all keys keep their names.
        """
        flat, _ = _C.flatten_state_dict(state_dict)
        kept, _, _ = self.chosen(flat, None)
        blanked: dict[str, Any] = _C.without_others(dict(state_dict), flat, kept, torch.empty(0))
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
            f"save: these patterns of include and exclude match no key of the state, on any rank: "
            f"{listed([*map(repr, nobodys)])}"
        )


def _matchers(patterns: Sequence[str]) -> list[Callable[[str], object]]:
    return [compiled(pattern).fullmatch for pattern in patterns]
