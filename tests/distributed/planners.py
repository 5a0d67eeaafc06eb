# SPDX-License-Identifier: Apache-2.0
"""Planners as users write them: the examples in DCP's docstrings, with their mistakes corrected.

Each is written once, as a mixin, and combined with DCP's planners and with ours.
"""

from __future__ import annotations

import dataclasses
import io
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._sharded_tensor_utils import _flatten_sharded_tensors
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, WriteItem, WriteItemType

from bytecheckpoint import BcpLoadPlanner, BcpSavePlanner

__all__ = ["OURS", "STOCK", "Planners"]


# The mixins may use only what all bases have in common.
if TYPE_CHECKING:
    _Save, _Load = DefaultSavePlanner, DefaultLoadPlanner
else:
    _Save = _Load = object


class _RenamePlanner(_Save):
    """Prefixes all keys with ``foo_``."""

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner({"foo_" + k: v for k, v in state_dict.items()}, storage_meta, is_coordinator)


class _RenameLoadPlanner(_Load):
    """Removes the prefix again. DCP's example does not handle ``load_bytes`` into nested keys; our states have none."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.original_state_dict = state_dict
        state_dict = {"foo_" + k: v for k, v in state_dict.items()}
        if self.flatten_sharded_tensors:
            state_dict = _flatten_sharded_tensors(state_dict)
        if self.flatten_state_dict:
            state_dict, self.mappings = flatten_state_dict(state_dict)
        self.state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.original_state_dict[read_item.dest_index.fqn[4:]] = torch.load(value, weights_only=False)


class _FP16Planner(_Save):
    """Declares and resolves float16. DCP's example iterates over the plan, which is not iterable."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None:
                item.tensor_data.properties.dtype = torch.float16
        return plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        item: Any = super().resolve_data(write_item)
        return item if write_item.type == WriteItemType.BYTE_IO else item.to(torch.float16)


class _OtherDtypePlanner(_Save):
    """Resolves tensors to float64, but declares their own dtype. Stock DCP stores what is resolved."""

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        item: Any = super().resolve_data(write_item)
        return item if write_item.type == WriteItemType.BYTE_IO else item.to(torch.float64)


class _DDPLoadBalancingPlanner(_Save):
    """Deals the items of rank 0 out to all ranks. DCP's example mixes up the iterators and the transposition."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        iterators = [iter(all_plans[0].items)] * len(all_plans)
        rounds = list(zip_longest(*iterators))
        dealt = [[items[rank] for items in rounds if items[rank] is not None] for rank in range(len(all_plans))]
        plans = [dataclasses.replace(plan, items=items) for plan, items in zip(all_plans, dealt, strict=True)]
        return super().create_global_plan(plans)


class _SaveExtraDataPlanner(_Save):
    """Each rank adds its own data. In DCP's example, flattening has already put its mappings where the data go."""

    def __init__(self, data: Any) -> None:
        super().__init__(flatten_state_dict=False)
        self.data = data

    def create_local_plan(self) -> SavePlan:
        return dataclasses.replace(super().create_local_plan(), planner_data=self.data)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        global_plan, metadata = super().create_global_plan(all_plans)
        return global_plan, dataclasses.replace(metadata, planner_data=[p.planner_data for p in global_plan])


class _MetaModelMaterialize(_Load):
    """Makes tensors as they are needed. DCP's example extends the save planner and keeps one part per key."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return torch.empty(read_item.lengths, dtype=self._whole(read_item.dest_index).dtype)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        whole = self._whole(read_item.dest_index)
        if whole.device.type == "meta":
            whole = self.state_dict[read_item.dest_index.fqn] = torch.empty_like(whole, device="cpu")
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            whole = whole.narrow(dim, offset, length)
        whole.copy_(tensor)

    def _whole(self, index: MetadataIndex) -> torch.Tensor:
        tensor: torch.Tensor = self.state_dict[index.fqn]
        return tensor


@dataclasses.dataclass(frozen=True)
class Planners:
    """All planners above, over one pair of base classes."""

    save: type[DefaultSavePlanner]
    load: type[DefaultLoadPlanner]

    def __getattr__(self, name: str) -> Any:
        mixin = globals().get("_" + name)
        if not isinstance(mixin, type):
            raise AttributeError(name)
        base = self.load if mixin in (_RenameLoadPlanner, _MetaModelMaterialize) else self.save
        return type(name, (mixin, base), {})


STOCK = Planners(DefaultSavePlanner, DefaultLoadPlanner)
OURS = Planners(BcpSavePlanner, BcpLoadPlanner)
