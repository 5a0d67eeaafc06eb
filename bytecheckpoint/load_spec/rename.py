# SPDX-License-Identifier: Apache-2.0
"""New names of keys: the rules of a ``LoadSpec``, and how they are undone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bytecheckpoint.errors import ConfigError
from bytecheckpoint.load_spec.patterns import check_use, compiled, has_wildcards, renamed, template_names
from bytecheckpoint.load_spec.transform import Tensors, Transform

__all__ = ["Rename"]


@dataclass(frozen=True)
class Rename(Transform):
    """Gives new names between two transforms: ``Rename({"model": "net", "h.{i}.attn": "layers.{i}.attn"})``.

    ``LoadSpec.rename`` has the same rules, and comes after all transforms. Objects get new names, too. A rule that
    matches no key is an error.

    Args:
        rules: Patterns with what is put in their place. The first pattern that matches a key counts.
    """

    rules: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.rules, Mapping):
            raise ConfigError(f"rename={self.rules!r}: must be a dict of patterns and new names")
        for pattern, to in self.rules.items():
            if not isinstance(pattern, str) or not isinstance(to, str):
                raise ConfigError(f"rename={{{pattern!r}: {to!r}}}: a pattern and a new name must be strings")
            compiled(pattern)

    def apply(self, tensors: Tensors) -> None:
        """See ``Transform``."""
        tensors.rename(self.new_names(tensors.names()))

    def new_names(self, names: Sequence[str]) -> dict[str, str]:
        """Returns the new name of each name.

        Raises:
            ConfigError: A rule matches none of them, or gives no name.
        """
        check_use("rename", self.rules, names)
        new: dict[str, str] = {}
        for name in names:
            made = (renamed(pattern, to, name) for pattern, to in self.rules.items())
            new[name] = next((one for one in made if one is not None), name)
            if not new[name]:
                raise ConfigError(f"LoadSpec(rename=...): the new name of '{name}' is empty")
        return new

    def inverted(self) -> Rename:
        """Returns the rules for the way back. Where two of them match a name, the one that says more goes first.

        Raises:
            ConfigError: The name before is not known: a rule is a regular expression or has wildcards, says less than
                its pattern, or gives a name that another rule gives, too.
        """
        rules: dict[str, str] = {}
        for pattern, to in self.rules.items():
            rule = f"LoadSpec(rename={{{pattern!r}: {to!r}}})"
            if has_wildcards(pattern):
                raise ConfigError(f"{rule}: only rules without wildcards can be inverted")
            if has_wildcards(to):
                raise ConfigError(f"{rule}: it cannot be inverted: {to!r} would be a pattern with wildcards")
            lost = [name for name in template_names(pattern) if name not in template_names(to)]
            if lost:
                raise ConfigError(f"{rule}: it cannot be inverted: {to!r} does not say what {{{lost[0]}}} was")
            if to in rules:
                raise ConfigError(f"{rule}: it cannot be inverted: '{rules[to]}' gets the same name")
            rules[to] = pattern
        return Rename(dict(sorted(rules.items(), key=lambda rule: _says(rule[0]), reverse=True)))


def _says(pattern: str) -> tuple[int, int]:
    """How much a pattern says of a name: its number of parts, and of those how many are no placeholders."""
    parts = pattern.split(".") if pattern else []
    return len(parts), sum(not template_names(part) for part in parts)
