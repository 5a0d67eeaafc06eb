# SPDX-License-Identifier: Apache-2.0
"""DCP as it is in a process without a writer or reader of ours, which make its check of top-level values quick."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

_NAMES: tuple[tuple[Any, str], ...] = (
    (state_dict_saver, "_stateful_to_state_dict"),
    (state_dict_loader, "Stateful"),
)
_THEIRS = [(module, name, getattr(module, name)) for module, name in _NAMES]
assert all(value.__module__.startswith("torch.") for *_, value in _THEIRS), "one of our classes was made before"


@contextmanager
def stock_dcp() -> Iterator[None]:
    """For the ``with`` block, which is a call of a contender that is not ours."""
    with ExitStack() as stack:
        for module, name, theirs in _THEIRS:
            stack.enter_context(patch.object(module, name, theirs))
        yield
