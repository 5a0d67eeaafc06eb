# SPDX-License-Identifier: Apache-2.0
"""The load planner."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

from bytecheckpoint import _C
from bytecheckpoint._described import described
from bytecheckpoint.dcp import _compat
from bytecheckpoint.dcp._hooks import Hooks
from bytecheckpoint.dcp._plan_items import Fills, PlanItems
from bytecheckpoint.dcp._sharded import flatten_sharded
from bytecheckpoint.dcp.metadata import checkpoint_of
from bytecheckpoint.probes.of_torch import SAVE_AND_LOAD
from bytecheckpoint.probes.probe import require

__all__ = ["BcpLoadPlanner", "as_plain", "fills_state"]


class BcpLoadPlanner(DefaultLoadPlanner):
    """Plans a load in C++: names, shapes and dtypes of all keys are compared before a byte is read.

    Collective: used by ``dcp.load`` alone. Works with any ``StorageReader``; with ``BcpReader`` no Python runs for a
    plain tensor in host memory, unless a subclass overrides a hook that DCP calls per tensor. Subclasses may use and
    override whatever those of ``DefaultLoadPlanner`` may: ``state_dict``, ``mappings``, ``original_state_dict`` and
    ``metadata`` are the truth.

    Args:
        flatten_state_dict: Handle nested dicts and lists.
        flatten_sharded_tensors: Handle ShardedTensors within ShardedTensors, of FSDP over tensor parallelism.
        allow_partial_load: Leave out keys that the checkpoint does not have, instead of raising; ``LoadReport`` names
            them.

    Attributes:
        warns: Whether the coordinator warns (RuntimeWarning) of a top-level part, such as ``optimizer``, of which the
            checkpoint has more keys than all ranks together ask for. ``LoadReport.unexpected_keys`` names them in any
            case. Parts that nobody asks for are none of them.

    During a load, on all ranks and inside DCP's ``CheckpointException``: ``KeyMismatchError`` (all keys that are
    missing and all that nobody asks for), ``ShapeMismatchError`` (all tensors of another shape), ``InvalidPlanError``.
    """

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        allow_partial_load: bool = False,
    ) -> None:
        require(SAVE_AND_LOAD)
        super().__init__(flatten_state_dict, flatten_sharded_tensors, allow_partial_load)
        self.warns = True
        self._items: PlanItems[Any] | None = None

    def __repr__(self) -> str:
        return described(
            self, flatten_state_dict=True, flatten_sharded_tensors=True, allow_partial_load=False, warns=True
        )

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
            _make_meta_tensors(state_dict)
            flat, mappings = _C.flatten_state_dict(state_dict)
        if has_sharded_tensor and self.flatten_sharded_tensors:
            flat = flatten_sharded(flat)
        self.original_state_dict = state_dict
        self.state_dict, self.mappings = flat, mappings
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """What this rank wants, found in the checkpoint."""
        if self.metadata is None:
            raise AssertionError("set_up_planner was given no metadata")
        checkpoint = checkpoint_of(self.metadata)
        if self.flatten_state_dict and checkpoint.has_others_than(self.state_dict):
            self._use_names_of_2_3(checkpoint)
        plan = _C.ReadPlan.of_state(checkpoint, dict(self.state_dict), _compat.chunks_of, self.allow_partial_load)
        self._items = PlanItems(plan)
        self._items.may_stay = _hooks.are_own(self, "create_global_plan")
        self._items.fills = Fills(self.state_dict, getattr(self, "original_state_dict", self.state_dict).keys())
        return LoadPlan(self._items)  # type: ignore[arg-type]  # a sequence is what DCP needs

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Puts an object where the caller's state dict has it. As of DCP's planner: what the pickle says is run."""
        self.put_object(read_item.dest_index.fqn, torch.load(value, weights_only=False))

    def put_object(self, fqn: str, value: Any) -> None:
        """Puts an object that was loaded where the state dict has it."""
        if self.flatten_state_dict:
            _compat.set_element(self.original_state_dict, self.mappings[fqn], value)
        else:
            self.state_dict[fqn] = self.original_state_dict[fqn] = value

    def _use_names_of_2_3(self, checkpoint: _C.Checkpoint) -> None:
        """DCP flattened lists in another way until 2.3; if those names are in the checkpoint, it is so old."""
        flat, mappings = _compat.flatten_as_2_3(self.original_state_dict)
        # Not those of the state as it is planned: a ShardedTensor of which this rank has no shard is left out of that.
        names, _ = _C.flatten_state_dict(self.original_state_dict)
        if any(fqn not in names and checkpoint.has(fqn) for fqn in flat):
            self.state_dict = flatten_sharded(flat) if self.flatten_sharded_tensors else flat
            self.mappings = mappings


_hooks = Hooks(BcpLoadPlanner)
_dcps_hooks = Hooks(DefaultLoadPlanner)
_PER_TENSOR = ("resolve_tensor", "commit_tensor", "lookup_tensor", "transform_tensor")
_PER_ITEM = (*_PER_TENSOR, "load_bytes")


def as_plain(planner: object) -> BcpLoadPlanner | None:
    """``planner``, if nobody would miss the calls per item: all of them are as defined here and in DCP."""
    if isinstance(planner, BcpLoadPlanner) and _hooks.are_own(planner, *_PER_ITEM) and type(planner.state_dict) is dict:
        return planner
    return None


def fills_state(planner: LoadPlanner) -> bool:
    """Whether ``planner`` resolves tensors to memory of its state dict, as DCP's planner and ours do."""
    is_dcps = _hooks.are_own(planner, *_PER_TENSOR) or _dcps_hooks.are_own(planner, *_PER_TENSOR)
    return is_dcps and type(planner.state_dict) is dict  # type: ignore[attr-defined]


def _make_meta_tensors(container: Any) -> None:
    """In the containers themselves: their keys need not be the text that a flat name has of them."""
    for key, value in [*(container.items() if isinstance(container, Mapping) else enumerate(container))]:
        if isinstance(value, torch.Tensor):
            # A ShardedTensor cannot always say; it keeps its shards, and is refused when they are to be filled.
            if not isinstance(value, ShardedTensor) and value.is_meta:
                made = {"": value}
                _compat.init_meta_tensors(made)
                container[key] = made[""]
        elif isinstance(value, Mapping | list):
            _make_meta_tensors(value)
