# SPDX-License-Identifier: Apache-2.0
"""Values of a state dict that are in an attribute of it, where neither DCP nor we look."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from bytecheckpoint.listing import listed
from bytecheckpoint.runtime.per_process import PerProcess

__all__ = ["warn_of_side_values"]

_FACTS = (type(None), int, float, torch.Size, torch.device, torch.dtype)
_named: PerProcess[set[str]] = PerProcess(set)


def warn_of_side_values(state_dict: Mapping[str, Any]) -> None:
    """Warns of values beside the items of the state dicts in a state, once for each in a process.

    ``nn.Module.state_dict()`` has an attribute ``_metadata`` with the versions of modules. ``TensorDict.state_dict()``
    has its text and other values that are no tensors there, and no key for them. A checkpoint has the items alone.

    Args:
        state_dict: What is saved. It and the values right in it are looked at.
    """
    found = [*_names_beside(state_dict)]
    kinds = {*map(type, state_dict.values())}  # a flat state has very many values, and none of these
    if any(issubclass(kind, dict) and kind is not dict for kind in kinds):
        found += [f"{key}.{name}" for key, value in state_dict.items() for name in _names_beside(value)]
    fresh = [name for name in found if name not in _named.get()]
    if not fresh:
        return
    _named.get().update(fresh)
    warnings.warn(
        f"bytecheckpoint: these values are in the attribute _metadata of a state dict and not among its items, so the "
        f"checkpoint does not have them: {listed([*map(repr, fresh)])}. Give them keys of their own. This is said once",
        RuntimeWarning,
        stacklevel=2,
    )


def _names_beside(value: object) -> Iterator[str]:
    metadata = getattr(value, "_metadata", None) if isinstance(value, dict) else None
    for name, facts in metadata.items() if isinstance(metadata, dict) else ():
        # A module has its version alone.
        if isinstance(facts, dict) and len(facts) > 1 and not all(isinstance(fact, _FACTS) for fact in facts.values()):
            yield str(name)
