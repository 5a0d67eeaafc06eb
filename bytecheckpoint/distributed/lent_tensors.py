# SPDX-License-Identifier: Apache-2.0
"""Tensors that threads of gloo may still hold. The end of the process waits for them.

A thread of gloo wakes up those that wait for a collective, and only then lets go of its tensors. For that it needs the
GIL, and a process whose interpreter is ending aborts when C++ code asks for it: a job would have ended well, and be
started again.
"""

from __future__ import annotations

import atexit
import time
import weakref

import torch

from bytecheckpoint.runtime.per_process import PerProcess

__all__ = ["lend"]

_LET_GO_WITHIN_S = 1.0  # a thread may never come back from a collective that lost a rank
_LOOK_S = 0.001


def lend(tensor: torch.Tensor) -> torch.Tensor:
    """Returns another tensor with the memory of ``tensor``, to be given to a collective and kept by nobody else."""
    lent = tensor.detach()
    held = _held.get()
    held.add(weakref.ref(lent, held.discard))
    return lent


def _lent_by_process() -> set[weakref.ref[torch.Tensor]]:
    global _waits_at_exit
    if not _waits_at_exit:
        atexit.register(_at_exit)
        _waits_at_exit = True
    return set()


_waits_at_exit = False  # forked children inherit it, as they do what was registered
_held = PerProcess(_lent_by_process)  # a forked child has none: the threads of its parent do not exist there


def _at_exit() -> None:
    end = time.monotonic() + _LET_GO_WITHIN_S
    while _held.get() and time.monotonic() < end:
        time.sleep(_LOOK_S)
