# SPDX-License-Identifier: Apache-2.0
"""Quick checks which entries of a state dict are ``Stateful``.

DCP checks every key of the top-level dict against a runtime protocol, in a logged function that it makes for that key.
This takes some 30 microseconds a key; planning a tensor takes one. Tensors and builtin values need no such check.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

__all__ = ["QuickStateful", "quick_copy"]

# Exactly these types: a subclass may be Stateful.
_STATELESS = frozenset(
    (torch.Tensor, torch.nn.Parameter, DTensor, type(None), bool, int, float, str, bytes, dict, list, tuple)
)


class _Quick(type):
    def __instancecheck__(cls, value: object) -> bool:
        return type(value) not in _STATELESS and isinstance(value, Stateful)


class QuickStateful(metaclass=_Quick):
    """Takes the place of DCP's ``Stateful`` where DCP only checks whether a value is one."""


def quick_copy(theirs: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a quick version of DCP's function that copies a state dict with each Stateful replaced by its state.

    Args:
        theirs: DCP's function. It still gets every value whose type does not tell, one at a time.
    """

    def copy(state_dict: Any) -> Any:
        return {
            key: value if type(value) in _STATELESS else theirs({key: value})[key] for key, value in state_dict.items()
        }

    return copy
