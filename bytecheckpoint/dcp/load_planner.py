# SPDX-License-Identifier: Apache-2.0
"""The load planner."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan

from bytecheckpoint import _C
from bytecheckpoint.dcp import _compat
from bytecheckpoint.dcp._plan_items import PlanItems
from bytecheckpoint.dcp.metadata import checkpoint_of

__all__ = ["BcpLoadPlanner", "as_plain"]


class BcpLoadPlanner(DefaultLoadPlanner):
    """Plans a load in C++: names, shapes and dtypes of all keys are compared before a byte is read.

    Collective: used by ``dcp.load`` alone. Works with any ``StorageReader``; with ``BcpReader`` no Python runs per
    tensor, unless a subclass overrides a hook that DCP calls per tensor. Subclasses may use and override whatever those
    of ``DefaultLoadPlanner`` may: ``state_dict``, ``mappings``, ``original_state_dict`` and ``metadata`` are the truth.

    Args:
        flatten_state_dict: Handle nested dicts and lists.
        flatten_sharded_tensors: Handle ShardedTensors within ShardedTensors, of FSDP over tensor parallelism.
        allow_partial_load: Leave out keys that the checkpoint does not have, instead of raising.

    During a load, on all ranks and inside DCP's ``CheckpointException``: ``KeyMismatchError`` (all keys that are
    missing and all that nobody asks for), ``ShapeMismatchError`` (all tensors of another shape), ``InvalidPlanError``.
    """

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        allow_partial_load: bool = False,
    ) -> None:
        super().__init__(flatten_state_dict, flatten_sharded_tensors, allow_partial_load)
        self._items: PlanItems[Any] | None = None

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Flattens the state dict. Tensors on the meta device are replaced by empty ones on the default device."""
        if not self.flatten_state_dict:
            super().set_up_planner(state_dict, metadata, is_coordinator)
            return
        flat, mappings = _C.flatten_state_dict(state_dict)
        has_sharded_tensor, has_meta_tensor = _C.peculiarities(flat)
        if has_meta_tensor:
            _make_meta_tensors(state_dict, flat, mappings)
        if has_sharded_tensor and self.flatten_sharded_tensors:
            super().set_up_planner(state_dict, metadata, is_coordinator)
            return
        self.original_state_dict = state_dict
        self.state_dict, self.mappings = flat, mappings
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """What this rank wants, found in the checkpoint."""
        if self.metadata is None:
            raise AssertionError("set_up_planner was given no metadata")
        checkpoint = checkpoint_of(self.metadata)
        if self.flatten_state_dict and not checkpoint.has_all(self.state_dict):
            self._use_names_of_2_3(checkpoint)
        plan = _C.ReadPlan.of_state(checkpoint, self.state_dict, _compat.chunks_of, self.allow_partial_load)
        self._items = PlanItems(plan)
        if _is_ours(self, "create_global_plan"):
            self._items.may_stay = True
        return LoadPlan(self._items)  # type: ignore[arg-type]  # a sequence is what DCP needs

    def put_object(self, fqn: str, value: Any) -> None:
        """Puts an object that was loaded where the state dict has it."""
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[fqn], value)
        else:
            self.state_dict[fqn] = value

    def _use_names_of_2_3(self, checkpoint: _C.Checkpoint) -> None:
        """DCP flattened lists in another way until 2.3; if those names are in the checkpoint, it is so old."""
        flat, mappings = _compat.flatten_as_2_3(self.original_state_dict)
        if any(fqn not in self.state_dict and checkpoint.has(fqn) for fqn in flat):
            self.state_dict, self.mappings = flat, mappings


# As defined here and in DCP: what differs from these, in a class or an instance, is somebody's own.
_HOOKS = {name: getattr(BcpLoadPlanner, name) for name in dir(BcpLoadPlanner) if not name.startswith("__")}
_PER_ITEM = ("resolve_tensor", "commit_tensor", "lookup_tensor", "transform_tensor", "load_bytes")


def _is_ours(planner: BcpLoadPlanner, name: str) -> bool:
    return getattr(getattr(planner, name), "__func__", None) is _HOOKS[name]


def as_plain(planner: object) -> BcpLoadPlanner | None:
    """``planner``, if nobody would miss the calls per item: all of them are as defined here and in DCP."""
    if isinstance(planner, BcpLoadPlanner) and all(_is_ours(planner, name) for name in _PER_ITEM):
        return planner
    return None


def _make_meta_tensors(state_dict: dict[str, Any], flat: dict[str, Any], mappings: dict[str, Any]) -> None:
    meta = {
        fqn: value for fqn, value in flat.items() if isinstance(value, torch.Tensor) and value.device.type == "meta"
    }
    _compat.init_meta_tensors(meta)
    for fqn, value in meta.items():
        flat[fqn] = value
        set_element(state_dict, mappings[fqn], value)
