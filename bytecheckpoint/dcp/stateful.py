# SPDX-License-Identifier: Apache-2.0
"""Quick checks which entries of a state dict are ``Stateful``, for our entry points and for DCP.

DCP checks every key of the top-level dict against a runtime protocol, in a logged function that it makes for that key.
This takes some 30 microseconds a key; planning a tensor takes one. Tensors and builtin values need no such check. The
answers are the same for every value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from bytecheckpoint.probes.of_torch import QUICK_CHECKS
from bytecheckpoint.probes.probe import holds
from bytecheckpoint.runtime.fork_locks import ForkSafeLock

__all__ = ["QuickStateful", "quick_copy", "speed_up_dcp"]

_lock = ForkSafeLock()
# Exactly these types: a subclass may be Stateful. A tensor may have attributes that make it so.
_STATELESS = frozenset((type(None), bool, int, float, str, bytes, dict, list, tuple))
_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter, DTensor))


def _is_stateless(value: object) -> bool:
    """Whether the type tells that ``value`` is not ``Stateful``. If not, it may be or not."""
    of = type(value)
    return of in _STATELESS or (of in _TENSORS and not hasattr(value, "load_state_dict"))


class _Quick(type):
    def __instancecheck__(cls, value: object) -> bool:
        return not _is_stateless(value) and isinstance(value, Stateful)


class QuickStateful(metaclass=_Quick):
    """Takes the place of DCP's ``Stateful`` where DCP only checks whether a value is one."""


def quick_copy(theirs: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a quick version of DCP's function that copies a state dict with each Stateful replaced by its state.

    Args:
        theirs: DCP's function. It still gets every value whose type does not tell, one at a time.
    """

    def copy(state_dict: Any) -> Any:
        return {key: value if _is_stateless(value) else theirs({key: value})[key] for key, value in state_dict.items()}

    return copy


def speed_up_dcp() -> None:
    """Makes DCP ask about values whose type does not tell, and about no others. It stays for the life of the process.

    Called by the constructors of our writer and reader. It does nothing while ``register`` does the same, nor if DCP of
    this torch is built otherwise.
    """
    from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

    saver: Any = state_dict_saver
    loader: Any = state_dict_loader
    if getattr(loader, "Stateful", None) is QuickStateful or not holds(QUICK_CHECKS):
        return
    with _lock:
        if loader.Stateful is not QuickStateful:
            saver._stateful_to_state_dict = quick_copy(saver._stateful_to_state_dict)
            loader.Stateful = QuickStateful
