# SPDX-License-Identifier: Apache-2.0
"""The state dict of one optimizer, made of what was saved parameter by parameter."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from bytecheckpoint.tensors.equality import are_equal

__all__ = ["of_one_optimizer"]


def of_one_optimizer(flat: dict[str, Any], fqns: Collection[str]) -> dict[str, Any]:
    """Makes the state dict of one optimizer of ``state.{fqn}.{name}`` and ``param_groups.{fqn}.{option}``.

    Parameters are put into one group if their options are equal. If the checkpoint holds what torch's
    ``get_optimizer_state_dict`` returned unflattened, that has the right form already and is returned as it is.
    """
    if isinstance(flat.get("param_groups"), list):
        return flat
    state: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        kind, _, rest = key.partition(".")
        fqn, name = _split(rest, fqns)
        (state if kind == "state" else options).setdefault(fqn, {})[name] = value
    groups: dict[str, list[tuple[dict[str, Any], list[str]]]] = {}  # by the options as text, which is not exact
    for fqn, of_parameter in options.items():
        alike = groups.setdefault(repr(sorted(of_parameter.items())), [])
        members = next((members for of_group, members in alike if are_equal(of_group, of_parameter)), None)
        if members is None:
            alike.append((of_parameter, members := []))
        members.append(fqn)
    of_groups = [{**of_group, "params": members} for alike in groups.values() for of_group, members in alike]
    return {"state": state, "param_groups": of_groups}


def _split(text: str, fqns: Collection[str]) -> tuple[str, str]:
    """Splits ``text`` into the name of a parameter and what follows it; both may contain dots."""
    end = text.rfind(".")
    while end > 0 and text[:end] not in fqns:
        end = text.rfind(".", 0, end)
    fqn, _, name = text.rpartition(".") if end <= 0 else (text[:end], ".", text[end + 1 :])
    return fqn, name
