# SPDX-License-Identifier: Apache-2.0
"""The save planner."""

from __future__ import annotations

import dataclasses
import functools
import io
import sys
import time
from collections import ChainMap
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

from bytecheckpoint import _C
from bytecheckpoint._described import described
from bytecheckpoint.config import Config
from bytecheckpoint.dcp import _compat
from bytecheckpoint.dcp._gaps import gaps_of_call
from bytecheckpoint.dcp._held import Held, HeldElsewhere, Ways, refuse_digests
from bytecheckpoint.dcp._hooks import Hooks
from bytecheckpoint.dcp._part import WritePart
from bytecheckpoint.dcp._plan_cache import Answer, Planned, digest_of, part_of, plan_cache
from bytecheckpoint.dcp._plan_items import PlanItems, source_of
from bytecheckpoint.dcp._plan_tree import PlanTree
from bytecheckpoint.dcp._sharded import flatten_sharded
from bytecheckpoint.dcp._switching import quick_switches
from bytecheckpoint.dcp._told import Later, Told, tell, tell_later
from bytecheckpoint.dcp.metadata import fill_planned_metadata, planned_metadata
from bytecheckpoint.probes.of_torch import SAVE_AND_LOAD
from bytecheckpoint.probes.probe import require
from bytecheckpoint.report import PlanReport

__all__ = ["BcpSavePlanner", "WritePart", "as_plain", "kept_state"]


class BcpSavePlanner(DefaultSavePlanner):
    """Plans a save in C++: what several ranks hold is written once, by all of them in equal parts.

    Collective: used by ``dcp.save`` alone, and, as DCP's own, by one save at a time. Works with any ``StorageWriter``;
    with ``BcpWriter`` no Python runs for a plain tensor in host memory, unless a subclass overrides a hook that DCP
    calls per tensor. Between ranks travel a few bytes a tensor. Subclasses may use and override whatever those of
    ``DefaultSavePlanner`` may: ``state_dict`` and ``mappings`` are the truth; boxes are not split if a subclass
    resolves or transforms data itself.

    A plain tensor that several ranks have under one key must be equal on all: each writes some rows of it. If it is
    not, give each rank a key of its own, or keep one rank's with ``dedup_save_to_lowest_rank``.

    Args:
        flatten_state_dict: Handle nested dicts and lists.
        flatten_sharded_tensors: Handle ShardedTensors within ShardedTensors, of FSDP over tensor parallelism.
        dedup_replicated_tensors: Deprecated by DCP, and without effect.
        dedup_save_to_lowest_rank: What several ranks hold is written by the lowest of them, whole.
        enable_plan_caching: Keep plans in this process and find them again by what they are made of: names, shapes,
            dtypes, boxes, ranks and settings, never by a class. Then an unchanged state sends 36 bytes a rank.
        config: Settings of cache and tree; ``None`` reads ``BYTECHECKPOINT_*`` variables now.

    Attributes:
        last_plan: How the last plan came about, as this rank saw it.

    During a save, on all ranks and inside DCP's ``CheckpointException``: ``InvalidPlanError`` for what cannot be
    stored, ranks that disagree about a tensor, boxes that overlap or leave a gap; it names keys, boxes and ranks. Gaps
    are allowed with ``Config(allow_partial_tensors=True)``, and where each rank saves on its own.
    """

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        dedup_replicated_tensors: bool | None = None,
        dedup_save_to_lowest_rank: bool = False,
        enable_plan_caching: bool = True,
        *,
        config: Config | None = None,
    ) -> None:
        require(SAVE_AND_LOAD)
        super().__init__(
            flatten_state_dict, flatten_sharded_tensors, dedup_replicated_tensors, dedup_save_to_lowest_rank
        )
        self.enable_plan_caching = enable_plan_caching
        self.config = config or Config.from_env()
        self.last_plan = PlanReport()

    def __repr__(self) -> str:
        return described(
            self,
            flatten_state_dict=True,
            flatten_sharded_tensors=True,
            dedup_save_to_lowest_rank=False,
            enable_plan_caching=True,
        )

    @quick_switches()
    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Flattens the state dict."""
        if not self.flatten_state_dict:
            super().set_up_planner(state_dict, storage_meta, is_coordinator)
            return
        flat, mappings = _C.flatten_state_dict(state_dict)
        if self.flatten_sharded_tensors and _C.peculiarities(flat)[0]:
            flat = flatten_sharded(flat)
        self.state_dict, self.mappings, self.is_coordinator = flat, mappings, is_coordinator

    @quick_switches()
    def create_local_plan(self) -> SavePlan:
        """What this rank holds."""
        begin = time.perf_counter()
        self.last_plan = PlanReport()
        mappings = self.mappings if self.flatten_state_dict else None
        state = _C.LocalState(
            dict(self.state_dict),
            mappings,
            _compat.chunks_of,
            _compat.write_items_of,
            # Whoever resolves data in a way of his own does not know of parts.
            can_split=_hooks.are_own(self, *_PER_ITEM),
        )
        self._held = Held(state, mappings, self._settings(), self.enable_plan_caching, self._tree_threshold())
        items: Any = PlanItems(self._held)  # a sequence is what DCP needs
        self.plan = SavePlan(items, planner_data=None if mappings is None else Ways(self._held))
        self._seconds = time.perf_counter() - begin
        return self.plan

    @quick_switches()
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Who writes what. Plans that somebody has looked at, and may have changed, are left to DCP's own planner."""
        held: list[Held | HeldElsewhere] = []
        is_nested = True
        for plan in all_plans:  # once over all of them: there may be tens of thousands
            of_rank = source_of(plan.items)
            if not isinstance(of_rank, (Held, HeldElsewhere)):
                return self._plan_by_dcp(all_plans)
            held.append(of_rank)
            is_nested = is_nested and isinstance(plan.planner_data, Ways)
        if not _hooks.are_own(self, "_create_global_plan", "_dedup_save_plans"):
            return self._plan_by_dcp(all_plans)
        options: dict[str, Any] = {
            "dedup_to_lowest_rank": self.dedup_save_to_lowest_rank,
            "is_nested": is_nested,
            "gaps": gaps_of_call(self.config),
        }
        key = digest_of((repr(options).encode(), b"".join([of_rank.digest for of_rank in held])))
        cache, planned = self._planned(key, held, options)
        if planned is None:
            refuse_digests(held)
            num_items = sum(of_rank.num_items for of_rank in held)
            self.global_plan = tell_later(key, num_items, self.config.tree_topo_fan_out, held)
            self.metadata = Metadata({})
            self._awaited = key, options
        else:
            self.global_plan = tell(all_plans, held, key, planned, cache)
            self.metadata = planned_metadata(planned.manifest)
        data = () if is_nested else [plan.planner_data for plan in all_plans]
        if data and all(isinstance(of_rank, Mapping) for of_rank in data):
            self.metadata.planner_data = dict(ChainMap(*data))  # somebody has added to it; as DCP joins them
        return self.global_plan, self.metadata

    @quick_switches()
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Exchanges plans with the other ranks, if the coordinator has not told this one what to write."""
        source = source_of(new_plan.items)
        begin = time.perf_counter()
        if isinstance(source, Later):
            source = self._answer_to(source)
            items: Any = PlanItems(source)
            new_plan = dataclasses.replace(new_plan, items=items)
        if isinstance(source, Told) and isinstance(source.held, Held):
            if self.enable_plan_caching and source.all_can_exchange:
                answers = {**source.held.known_answers, source.part: source.answer}
                plan_cache().keep_answers(source.held.digest, answers, self.config.planner_cache_capacity)
            self.last_plan = PlanReport(
                cache=source.cache,
                bytes_sent=source.held.num_bytes_sent,
                bytes_received=source.num_bytes_received,
                seconds=self._seconds + time.perf_counter() - begin,
            )
        return super().finish_plan(new_plan)

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

    def _plan_by_dcp(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        _C.check_coverage(metadata.state_dict_metadata, gaps_of_call(self.config))
        return plans, metadata

    def _tree_threshold(self) -> int | None:
        """More ranks than that exchange plans in a tree; None if they cannot."""
        if not _hooks.are_own(self, *_BETWEEN_RANKS):
            return None
        return self.config.tree_topo_threshold if self.config.enable_tree_topo else sys.maxsize

    def _settings(self) -> bytes:
        return repr((self.flatten_state_dict, self.flatten_sharded_tensors, self.dedup_save_to_lowest_rank)).encode()

    def _planned(
        self, key: bytes, held: list[Held | HeldElsewhere], options: dict[str, Any]
    ) -> tuple[str, Planned | None]:
        """What the cache did, and the plan; no plan if what some rank holds is not here."""
        planned = plan_cache().plan(key) if self.enable_plan_caching else None
        if planned is not None:
            return "hit", planned
        cache = "miss" if self.enable_plan_caching else "off"
        blobs: dict[bytes, bytes] = {}
        for of_rank in held:
            blob = plan_cache().blob(of_rank.digest) if of_rank.blob is None else of_rank.blob
            if blob is None:
                return cache, None
            blobs[of_rank.digest] = blob
        planned = Planned.of(_C.plan_ranks([blobs[of_rank.digest] for of_rank in held], **options))
        if len(held) <= self.config.tree_topo_threshold:
            planned = dataclasses.replace(planned, blobs=blobs)
        self._keep_plan(key, planned)
        return cache, planned

    def _keep_plan(self, key: bytes, planned: Planned) -> None:
        if self.enable_plan_caching:
            plan_cache().keep_plan(key, planned, self.config.planner_cache_capacity)

    def _answer_to(self, later: Later) -> Told:
        if later.fan_out is None:
            return self._answer_by_key(later.key)
        return self._answer_by_exchange(later.key, later.fan_out)

    def _answer_by_key(self, key: bytes) -> Told:
        assert self._held.peers is not None
        part = part_of(key, self._held.peers.rank)
        told = Told(self._held, part, self._held.known_answers[part], "hit", all_can_exchange=True)
        told.num_bytes_received = len(key)
        return told

    def _answer_by_exchange(self, key: bytes, fan_out: int) -> Told:
        held = self._held
        assert held.peers is not None
        channel = held.peers.connect()
        plan = functools.partial(self._plan_tree, held) if held.peers.is_coordinator else None
        answer = PlanTree(channel, held.peers, fan_out).exchange(held.blob, plan)
        cache = "miss" if self.enable_plan_caching else "off"
        told = Told(held, part_of(key, held.peers.rank), answer, cache, all_can_exchange=True)
        held.num_bytes_sent += channel.bytes_sent
        told.num_bytes_received = channel.bytes_received
        return told

    def _plan_tree(self, own: Held, below: list[bytes]) -> list[Answer]:
        """Root of the exchange: plans, and fills the metadata that DCP was promised."""
        assert own.peers is not None
        key, options = self._awaited
        planned = Planned.of(_C.plan_tree(own.blob, own.peers.rank, below, **options))
        self._keep_plan(key, planned)
        fill_planned_metadata(self.metadata, planned.manifest)
        return planned.answers


_hooks = Hooks(BcpSavePlanner)
_dcps_hooks = Hooks(DefaultSavePlanner)
# Hooks that see plans of other ranks, or in which a rank may fail that others wait for.
_BETWEEN_RANKS = ("create_local_plan", "create_global_plan", "_create_global_plan", "_dedup_save_plans", "finish_plan")
_PER_ITEM = ("resolve_data", "lookup_object", "transform_object")


def as_plain(planner: object) -> BcpSavePlanner | None:
    """``planner``, if nobody would miss the calls per item: all of them are as defined here and in DCP."""
    if isinstance(planner, BcpSavePlanner) and _hooks.are_own(planner, *_PER_ITEM) and type(planner.state_dict) is dict:
        return planner
    return None


def kept_state(planner: SavePlanner) -> dict[str, Any] | None:
    """The state dict, if ``planner`` resolves tensors to what is in it, as DCP's planner and ours do."""
    if not (_hooks.are_own(planner, *_PER_ITEM) or _dcps_hooks.are_own(planner, *_PER_ITEM)):
        return None
    state: Any = planner.state_dict  # type: ignore[attr-defined]
    return state if type(state) is dict else None
