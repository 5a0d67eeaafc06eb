# SPDX-License-Identifier: Apache-2.0
"""Finds the rename with which a state finds its keys in a checkpoint, where a wrapper has changed their names."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

from bytecheckpoint.errors import ConfigError
from bytecheckpoint.load_spec.rename import Rename

__all__ = ["spec_that_loads"]

# Parts that wrappers put into names: torch.compile, DDP and DataParallel, activation checkpointing, FSDP1.
_WRAPPERS = ("_orig_mod", "module", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
# Names under which whole models are, beside these.
_OF_WHOLES = {*_WRAPPERS, "model", "net", "state_dict"}
# A rename has no more rules than this; so many are tried for one key.
_MOST_RULES = 8
# Stored names are compared with so many of the missing ones to find a rule; all of them check it.
_MOST_TRIED = 4


def spec_that_loads(missing: Sequence[str], stored: Sequence[str], asked: Collection[str] = ()) -> str:
    """Returns the clause of an error that names the spec with which all missing keys are found; "" if none is known.

    It knows a part of the name that stands before all keys on one side (``model.``, ``module.``), or another one there,
    and the parts that wrappers put into the middle of names (``layers.0._orig_mod.weight``).

    Args:
        missing: Keys that the state asks for and the checkpoint does not have.
        stored: All keys of the checkpoint.
        asked: All keys that the state asks for; those of ``missing``, if there are no others.
    """
    found = {names: rules for rules in _candidates(missing, stored) if (names := _names_of(rules, missing, stored))}
    if len(found) != 1:  # none; or a model and a copy of it, of which nobody knows which is meant
        return ""
    rules = next(iter(found.values()))
    others = {*Rename(rules).new_names(stored).values()} - {*missing, *asked}
    return f"LoadSpec(rename={rules!r}{', strict=' + repr('model') if others else ''}) loads them"


def _names_of(rules: dict[str, str], missing: Sequence[str], stored: Sequence[str]) -> tuple[str, ...]:
    """Returns the stored name of each missing key after a rename; nothing if one is missing, or two get one name."""
    try:
        new = Rename(rules).new_names(stored)
    except ConfigError:
        return ()
    name_of = {to: name for name, to in new.items()}
    if len(name_of) < len(new) or not name_of.keys() >= {*missing}:
        return ()
    return tuple(name_of[name] for name in missing)


def _candidates(missing: Sequence[str], stored: Sequence[str]) -> list[dict[str, str]]:
    there = set(stored)
    candidates: list[dict[str, str]] = []
    for name in missing[:_MOST_TRIED]:
        parts = name.split(".")
        for begin in range(len(parts)):  # the longest common end decides: what stands before it is the rule
            before, end = ".".join(parts[:begin]), ".".join(parts[begin:])
            rules = [{other[: -len(end) - 1]: before} for other in stored if other.endswith(f".{end}")]
            rules = [rule for rule in rules if all(map(_are_alike, *zip(*rule.items(), strict=True)))]
            rules += [{"": before}] if begin and end in there else []
            if rules:
                candidates += rules[:_MOST_RULES]
                break
    for wrapper in _WRAPPERS:
        wrapped, of_state = _wrapped(stored, wrapper), _wrapped(missing, wrapper)
        candidates.append({f"{name}.{wrapper}" if name else wrapper: name for name in wrapped})
        candidates.append({name: f"{name}.{wrapper}" if name else wrapper for name in of_state})
    return [dict(rules) for rules in {tuple(rules.items()): None for rules in candidates if rules}]


def _are_alike(before: str, to: str) -> bool:
    """Whether two prefixes may be of one module: ``vision`` and ``text`` are not, though their weights may fit."""
    names = ([part for part in prefix.split(".") if part and part not in _OF_WHOLES] for prefix in (before, to))
    of_before, of_to = names
    return of_before == of_to or not (of_before and of_to)


def _wrapped(names: Sequence[str], wrapper: str) -> list[str]:
    """Returns the names of the modules that are wrapped, with ``{i}`` for their numbers; few, or none."""
    found: dict[str, None] = {}
    for name in names:
        parts = name.split(".")
        if wrapper in parts:
            numbers = itertools.count()
            above = parts[: parts.index(wrapper)]
            found[".".join(f"{{i{next(numbers)}}}" if part.isdigit() else part for part in above)] = None
    return [*found] if len(found) <= _MOST_RULES else []
