# SPDX-License-Identifier: Apache-2.0
"""Quick checks which entries of a state dict are ``Stateful``, and ``speed_up_dcp()``, which gives them to DCP.

DCP checks every key of the top-level dict against a runtime protocol, in a logged function that it makes for that key.
This takes some 30 microseconds a key; planning a tensor takes one. Tensors and builtin values need no such check.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from bytecheckpoint.probes.of_torch import SPEED_UP
from bytecheckpoint.probes.probe import require
from bytecheckpoint.runtime.fork_locks import ForkSafeLock

__all__ = ["QuickStateful", "quick_copy", "speed_up_dcp", "speed_up_if_wanted"]

_lock = ForkSafeLock(threading.RLock)
_is_wanted = False
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


def speed_up_dcp() -> None:
    """Makes ``dcp.save``, ``dcp.async_save`` and ``dcp.load`` quick for state dicts with very many top-level keys.

    DCP asks of the value of each top-level key whether it is ``Stateful``, by a runtime protocol, and a save logs the
    question. This takes some 30 microseconds a key, and is most of the time of a save with our writer and planner. Call
    this once in each process, and DCP asks only about values that are neither tensors nor builtin values. Nothing else
    changes: which writer, reader and planner a call uses stays as it is. It stays for the life of the process.

    You need none of this after ``register``, which does the same, nor if the many keys are in a nested dict, such as
    ``{"model": model.state_dict()}``.

    Raises:
        UnsupportedError: DCP of this torch is not built as we need it. Nothing was changed.
    """
    global _is_wanted
    require(SPEED_UP)
    with _lock:
        _is_wanted = True
        speed_up_if_wanted()


def speed_up_if_wanted() -> None:
    """Replaces the two names of DCP if ``speed_up_dcp`` was called. ``register`` may have replaced them already."""
    from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

    saver: Any = state_dict_saver
    loader: Any = state_dict_loader
    with _lock:
        if not _is_wanted or loader.Stateful is QuickStateful:
            return
        saver._stateful_to_state_dict = quick_copy(saver._stateful_to_state_dict)
        loader.Stateful = QuickStateful
