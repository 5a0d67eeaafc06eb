# SPDX-License-Identifier: Apache-2.0
"""DCP's own flow of hooks, run over a process group object without torch's registry of groups."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata

from bytecheckpoint.compat.private_names import is_fake
from bytecheckpoint.dcp.safe_exchange import SafeWrapper
from bytecheckpoint.distributed import collectives
from bytecheckpoint.probes.of_torch import ENTRY_POINTS
from bytecheckpoint.probes.probe import find, holds, require

__all__ = ["load_state", "save_state"]

_DCP = "torch.distributed.checkpoint"


class _GroupWrapper(SafeWrapper):
    """DCP's exchanges over a gloo group object. They work even if the process has destroyed its groups meanwhile."""

    def __init__(self, group: dist.ProcessGroup | None, use_dist: bool, coordinator_rank: int) -> None:
        self._own = group if use_dist and group is not None and not is_fake(group) else None
        if self._own is None:
            super().__init__(group, use_dist, coordinator_rank)
            return
        self.group, self.use_dist = self._own, True
        self.coordinator_rank = self.global_coordinator_rank = coordinator_rank
        self.rank = self._own.rank()
        self.is_coordinator = self.rank == coordinator_rank

    def get_world_size(self) -> int:
        return super().get_world_size() if self._own is None else self._own.size()

    def _gather(self, sent: Any) -> Any:
        if self._own is None:
            return super()._gather(sent)
        return collectives.gather(self._own, sent, self.coordinator_rank)

    def all_gather_object(self, object: Any) -> Any:
        if self._own is None:
            return super().all_gather_object(object)
        return collectives.all_gather(self._own, self._sent(object))

    def _scatter(self, sent: Any) -> Any:
        if self._own is None:
            return super()._scatter(sent)
        return collectives.scatter(self._own, sent, self.coordinator_rank)

    def broadcast_object(self, object: Any) -> Any:
        if self._own is None:
            return super().broadcast_object(object)
        return collectives.broadcast(self._own, self._sent(object), self.coordinator_rank)

    def barrier(self) -> None:
        if self._own is None:
            super().barrier()
        else:
            collectives.barrier(self._own)


def _unlogged(**_: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Replaces DCP's decorator that logs its steps: it asks the registry of groups, and fails if the group is gone."""
    return lambda step: step


def _over_group(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a copy of a function of DCP that uses ``_GroupWrapper`` and no log. DCP itself is not changed."""
    function = inspect.unwrap(function)
    own = {"_DistWrapper": _GroupWrapper, "_dcp_method_logger": _unlogged}
    names = {**function.__globals__, **own}
    copied = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


# Copied at import, so that the names in the copies are those of DCP without `register()`.
if holds(ENTRY_POINTS):
    _save_flow = _over_group(find(f"{_DCP}.state_dict_saver:_save_state_dict"))
    _load_flow = _over_group(find(f"{_DCP}.state_dict_loader:_load_state_dict"))


def save_state(**arguments: Any) -> Metadata:
    """Runs DCP's own flow of hooks for a save. With a gloo group it needs no registry of groups.

    Args:
        arguments: Arguments of DCP's ``_save_state_dict``.

    Raises:
        UnsupportedError: This version of torch lacks what the flow relies on.
    """
    require(ENTRY_POINTS)
    metadata: Metadata = _save_flow(**arguments)
    return metadata


def load_state(**arguments: Any) -> None:
    """Runs DCP's own flow of hooks for a load, as ``save_state`` does for a save."""
    require(ENTRY_POINTS)
    _load_flow(**arguments)
