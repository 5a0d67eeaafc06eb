# SPDX-License-Identifier: Apache-2.0
"""Patterns for names of keys, and rules that make new names of them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

from bytecheckpoint.errors import ConfigError
from bytecheckpoint.near_names import did_you_mean

__all__ = [
    "REGEX",
    "check_use",
    "compiled",
    "filled",
    "has_wildcards",
    "matches",
    "renamed",
    "template_names",
    "whole_name",
]

# A pattern that begins so is a regular expression, which must match a whole name.
REGEX = "re:"

_PLACEHOLDER = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")
_TOKEN = re.compile(r"\{[^{}]*\}|\*|\?|\[[^\]]*\]|.", re.DOTALL)


@lru_cache(maxsize=1024)
def compiled(pattern: str) -> re.Pattern[str]:
    """Returns the regular expression of a pattern; match it with ``fullmatch``.

    ``*`` stands for any text, ``?`` for one character, ``[ab]`` for one of these, and ``{name}`` for one part of a
    name, without a dot. A pattern also matches all that is below the names it describes: ``model.layers`` matches
    ``model.layers.0.weight``. The group ``below`` has what follows, with its dot.

    Raises:
        ConfigError: It is no pattern.
    """
    if pattern.startswith(REGEX):
        try:
            return re.compile(pattern[len(REGEX) :], re.DOTALL)
        except re.error as error:
            raise ConfigError(f"pattern {pattern!r}: {error}") from None
    if pattern == "":
        return re.compile(r"(?P<below>.*)", re.DOTALL)
    return re.compile(_regex_of(pattern) + r"(?P<below>(?:\..*)?)", re.DOTALL)


@lru_cache(maxsize=1024)
def whole_name(template: str) -> re.Pattern[str]:
    """Returns the regular expression of whole names, such as those that a transform takes.

    What ``*`` stands for is its group ``any``, if there is one ``*``.
    """
    if template.startswith(REGEX):
        return compiled(template)
    return re.compile(_regex_of(template, "(?P<any>.*)" if template.count("*") == 1 else ".*"), re.DOTALL)


def _regex_of(pattern: str, star: str = ".*") -> str:
    seen: set[str] = set()
    out = ""
    for token in _TOKEN.findall(pattern):
        name = _PLACEHOLDER.fullmatch(token)
        if name is not None and name[1] in seen:
            out += f"(?P={name[1]})"
        elif name is not None:
            seen.add(name[1])
            out += f"(?P<{name[1]}>[^.]+)"
        elif token == "*":
            out += star
        elif token == "?":
            out += "."
        elif token.startswith("[") and len(token) > 2:
            out += "[" + token[1:-1].replace("\\", "\\\\").replace("!", "^", 1 if token[1] == "!" else 0) + "]"
        elif token.startswith("{"):
            raise ConfigError(f"pattern {pattern!r}: {token} must be a name, such as {{layer}}")
        else:
            out += re.escape(token)
    return out


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern matches a name."""
    return compiled(pattern).fullmatch(name) is not None


def has_wildcards(pattern: str) -> bool:
    """Whether a name that a pattern matches says more than its placeholders and what is below."""
    return pattern.startswith(REGEX) or any(wildcard in pattern for wildcard in "*?[")


def check_use(field: str, patterns: Iterable[str], names: Sequence[str]) -> None:
    """Refuses patterns that match nothing: they are typos more often than not.

    Args:
        field: What has the patterns, for messages.
        patterns: The patterns.
        names: The names that there are.

    Raises:
        ConfigError: A pattern matches none of them.
    """
    for pattern in patterns:
        regex = compiled(pattern)
        if not any(regex.fullmatch(each) for each in names):
            some = ", ".join(map(repr, names[:5])) + (", ..." if len(names) > 5 else "")
            near = did_you_mean(pattern.removesuffix(".*"), _and_above(names))
            raise ConfigError(f"LoadSpec({field}=...): '{pattern}' matches no key; there are {some or 'none'}{near}")


def _and_above(names: Sequence[str]) -> Iterator[str]:
    """Yields names, and the parts of them with which a pattern may end, such as ``model.layers``."""
    for name in names:
        yield name
        yield from itertools.accumulate(name.split(".")[:-1], "{}.{}".format)


def template_names(template: str) -> list[str]:
    """Returns the names of the placeholders in a template, each once, in their order."""
    return [*dict.fromkeys(_PLACEHOLDER.findall(template))]


def filled(template: str, values: Mapping[str, str | None]) -> str:
    """Replaces the placeholders in a template.

    Raises:
        ConfigError: There is no value for one of them.
    """

    def value_of(match: re.Match[str]) -> str:
        value = values.get(match[1])
        if value is None:
            raise ConfigError(f"'{template}': nothing says what {match[0]} is; known: {sorted(values)}")
        return value

    return _PLACEHOLDER.sub(value_of, template)


def renamed(pattern: str, to: str, name: str) -> str | None:
    """Returns the new name that a rule gives to ``name``; None if its pattern does not match.

    What is below a name keeps its place below the new one. An empty pattern puts ``to`` before every name; an empty
    ``to`` takes away the part that the pattern describes.

    Raises:
        ConfigError: The replacement needs what the pattern does not have.
    """
    found = compiled(pattern).fullmatch(name)
    if found is None:
        return None
    if pattern.startswith(REGEX):
        try:
            return found.expand(to)
        except (re.error, IndexError) as error:
            raise ConfigError(f"rename {pattern!r} to {to!r}: {error}") from None
    groups = found.groupdict()
    below = groups.pop("below")
    if pattern == "":
        return f"{to}.{name}" if to else name
    new = filled(to, groups)
    return new + below if new else below[1:]
