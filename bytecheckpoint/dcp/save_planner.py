# SPDX-License-Identifier: Apache-2.0
"""The save planner."""

from __future__ import annotations

import dataclasses
import functools
import io
from collections import ChainMap
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from bytecheckpoint import _C
from bytecheckpoint.dcp import _compat
from bytecheckpoint.dcp._hooks import Hooks
from bytecheckpoint.dcp._plan_items import Home, PlanItems, Travels, at_home, home_of, source_of
from bytecheckpoint.dcp.metadata import planned_metadata

__all__ = ["BcpSavePlanner", "WritePart", "as_plain", "bytes_of", "plan_to_write"]


@dataclasses.dataclass(frozen=True)
class WritePart(WriteItem):
    """Some rows of a box that several ranks hold, each of which writes a part.

    Attributes:
        held: The whole box. ``tensor_data.chunk`` lies in it.
    """

    held: ChunkStorageMetadata | None = None


class BcpSavePlanner(DefaultSavePlanner):
    """Plans a save in C++: what several ranks hold is written once, by all of them in equal parts.

    Collective: used by ``dcp.save`` alone. Works with any ``StorageWriter``; with ``BcpWriter`` no Python runs for a
    plain tensor in host memory, unless a subclass overrides a hook that DCP calls per tensor. Between ranks travel a
    few bytes a tensor. Subclasses may use and override whatever those of ``DefaultSavePlanner`` may: ``state_dict`` and
    ``mappings`` are the truth; boxes are not split if a subclass resolves or transforms data itself.

    A plain tensor that several ranks have under one key must be equal on all: each writes some rows of it. If it is
    not, give each rank a key of its own, or keep one rank's with ``dedup_save_to_lowest_rank``.

    Args:
        flatten_state_dict: Handle nested dicts and lists.
        flatten_sharded_tensors: Handle ShardedTensors within ShardedTensors, of FSDP over tensor parallelism.
        dedup_replicated_tensors: Deprecated by DCP, and without effect.
        dedup_save_to_lowest_rank: What several ranks hold is written by the lowest of them, whole.
        enable_plan_caching: Without effect yet. DCP's own cache, which tells states apart by the name of the planner's
            class alone, is not used.

    During a save, on all ranks and inside DCP's ``CheckpointException``: ``InvalidPlanError`` for what cannot be
    stored, ranks that disagree about a tensor, boxes that overlap or, with several ranks, leave a gap; it names keys,
    boxes and ranks.
    """

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        dedup_replicated_tensors: bool | None = None,
        dedup_save_to_lowest_rank: bool = False,
        enable_plan_caching: bool = False,
    ) -> None:
        super().__init__(
            flatten_state_dict, flatten_sharded_tensors, dedup_replicated_tensors, dedup_save_to_lowest_rank
        )

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Flattens the state dict."""
        flat, mappings = _C.flatten_state_dict(state_dict) if self.flatten_state_dict else ({}, {})
        if not self.flatten_state_dict or (self.flatten_sharded_tensors and _C.peculiarities(flat)[0]):
            super().set_up_planner(state_dict, storage_meta, is_coordinator)
            return
        self.state_dict, self.mappings, self.is_coordinator = flat, mappings, is_coordinator

    def create_local_plan(self) -> SavePlan:
        """What this rank holds."""
        mappings = self.mappings if self.flatten_state_dict else None
        state = _C.LocalState(
            dict(self.state_dict),
            mappings,
            _compat.chunks_of,
            _compat.write_items_of,
            # Whoever resolves data in a way of his own does not know of parts.
            can_split=_hooks.are_own(self, *_PER_ITEM),
        )
        held = _Held(state, mappings)
        items: Any = PlanItems(held)  # a sequence is what DCP needs
        self.plan = SavePlan(items, planner_data=None if mappings is None else _Ways(held))
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Who writes what. Plans that somebody has looked at, and may have changed, are left to DCP's own planner."""
        held = [source_of(plan.items) for plan in all_plans]
        plans_by_itself = _hooks.are_own(self, "_create_global_plan", "_dedup_save_plans")
        if not plans_by_itself or not all(isinstance(of_rank, _Held | _HeldElsewhere) for of_rank in held):
            return super().create_global_plan(all_plans)
        answers, num_items, _, planned = _C.plan_ranks(
            [of_rank.blob for of_rank in held],
            dedup_to_lowest_rank=self.dedup_save_to_lowest_rank,
            is_nested=all(isinstance(plan.planner_data, _Ways) for plan in all_plans),
        )
        told: list[Any] = [PlanItems(_Told(*of_rank)) for of_rank in zip(held, answers, num_items, strict=True)]
        self.global_plan = [dataclasses.replace(plan, items=items) for plan, items in zip(all_plans, told, strict=True)]
        self.metadata = planned_metadata(planned)
        data = [plan.planner_data for plan in all_plans]
        if not all(isinstance(of_rank, _Ways) for of_rank in data) and all(
            isinstance(of_rank, Mapping) for of_rank in data
        ):
            self.metadata.planner_data = dict(ChainMap(*data))  # somebody has added to it; as DCP joins them
        return self.global_plan, self.metadata

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The tensor of ``write_item``, or the bytes of an object."""
        if not isinstance(write_item, WritePart):
            return super().resolve_data(write_item)
        assert write_item.held is not None
        assert write_item.tensor_data is not None
        index = MetadataIndex(write_item.index.fqn, write_item.held.offsets)
        whole = self.transform_object(write_item, self.lookup_object(index))
        part = write_item.tensor_data.chunk
        begins = [at - of_held for at, of_held in zip(part.offsets, write_item.held.offsets, strict=True)]
        return _compat.narrow(whole, begins, part.sizes)


class _Held(Travels):
    """What this rank holds: items of everything."""

    def __init__(self, state: _C.LocalState, mappings: dict[str, Any] | None) -> None:
        self.state = state
        self.mappings = mappings or {}
        self.blob = state.blob
        self.num_items = state.num_items
        self.home = home_of(self)

    def items(self) -> list[WriteItem]:
        return self.state.items()

    def __reduce__(self) -> tuple[Any, ...]:
        return _HeldElsewhere, (self.home, self.blob, self.num_items)


class _HeldElsewhere(Travels):
    """What another rank holds."""

    def __init__(self, home: Home, blob: bytes, num_items: int) -> None:
        self.home, self.blob, self.num_items = home, blob, num_items

    def items(self) -> list[WriteItem]:
        return _C.items_of_blob(self.blob, None, WritePart)

    @functools.cached_property
    def mappings(self) -> dict[str, Any]:
        """Read from the blob, which takes as long as planning it."""
        _, _, _, planned = _C.plan_ranks([self.blob], dedup_to_lowest_rank=True, is_nested=True)
        mappings: dict[str, Any] = planned.planner_data
        return mappings


class _Told(Travels):
    """What a rank is to write, of what it holds."""

    def __init__(self, held: _Held | _HeldElsewhere, answer: bytes, num_items: int) -> None:
        self.held, self.answer, self.num_items = held, answer, num_items

    def items(self) -> list[WriteItem]:
        if isinstance(self.held, _Held):
            return self.plan().items()
        return _C.items_of_blob(self.held.blob, self.answer, WritePart)

    def plan(self) -> _C.WritePlan:
        assert isinstance(self.held, _Held)
        return _C.WritePlan.of_answer(self.held.state, self.answer, WritePart)

    def __reduce__(self) -> tuple[Any, ...]:
        return _told, (self.held.home, self.answer, self.num_items)


def _told(home: Home, answer: bytes, num_items: int) -> _Told:
    held = at_home(home)
    # The answer of one rank is of no use to another, nor to a rank that no longer has the plan.
    return _Told(_HeldElsewhere(home, b"", 0) if held is None else held, answer, num_items)


class _Ways(Mapping[str, Any]):
    """Planner data of a flattened state: FQN to the way through nested dicts. Travels within the inventory."""

    def __init__(self, held: _Held | _HeldElsewhere | None) -> None:
        self._held = held

    def __getitem__(self, fqn: str) -> Any:
        return self._mappings()[fqn]

    def __iter__(self) -> Iterator[str]:
        return iter(self._mappings())

    def __len__(self) -> int:
        return len(self._mappings())

    def _mappings(self) -> dict[str, Any]:
        return {} if self._held is None else self._held.mappings

    def __reduce__(self) -> tuple[Any, ...]:
        # From the coordinator back to its rank they have nothing to say.
        return type(self), (self._held if isinstance(self._held, _Held) else None,)


_hooks = Hooks(BcpSavePlanner)
_PER_ITEM = ("resolve_data", "lookup_object", "transform_object")


def as_plain(planner: object) -> BcpSavePlanner | None:
    """``planner``, if nobody would miss the calls per item: all of them are as defined here and in DCP."""
    if isinstance(planner, BcpSavePlanner) and _hooks.are_own(planner, *_PER_ITEM) and type(planner.state_dict) is dict:
        return planner
    return None


def bytes_of(items: Any) -> int:
    """Of the tensors of a local plan, which is checked if it is another planner's."""
    source = source_of(items)
    return source.state.num_bytes if isinstance(source, _Held) else _C.WritePlan(items).num_bytes


def plan_to_write(items: Any) -> _C.WritePlan:
    """The plan that our planner made, or one made of its items."""
    source = source_of(items)
    if isinstance(source, _Told) and isinstance(source.held, _Held):
        return source.plan()
    return _C.WritePlan(items)
