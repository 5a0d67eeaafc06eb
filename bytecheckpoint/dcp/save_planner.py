# SPDX-License-Identifier: Apache-2.0
"""``BcpSavePlanner``, the save planner for DCP."""

from __future__ import annotations

import dataclasses
import functools
import io
import sys
import time
from collections import ChainMap
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

from bytecheckpoint.compat import private_names as _compat
from bytecheckpoint.config import Config
from bytecheckpoint.dcp._gaps import gaps_of_save
from bytecheckpoint.dcp._hooks import Hooks
from bytecheckpoint.dcp.call_context import CallContext
from bytecheckpoint.dcp.metadata import fill_planned_metadata, planned_metadata
from bytecheckpoint.errors import InvalidPlanError
from bytecheckpoint.native import _C
from bytecheckpoint.planning.assignment import DeferredAssignment, RankAssignment, assign, assign_later
from bytecheckpoint.planning.copies import copies_of, judge, seed_of
from bytecheckpoint.planning.inventory import LazyPaths, LocalInventory, RemoteInventory, refuse_digests
from bytecheckpoint.planning.key_choice import KeyChoice
from bytecheckpoint.planning.plan_cache import CachedPlan, EncodedAssignment, digest_of, part_of, plan_cache
from bytecheckpoint.planning.plan_items import PlanItems, source_of
from bytecheckpoint.planning.plan_tree import PlanTree
from bytecheckpoint.planning.rank_plan import RankPlan, check_ranks, checksums_of_copies
from bytecheckpoint.planning.write_part import WritePart
from bytecheckpoint.probes.of_torch import SAVE_AND_LOAD
from bytecheckpoint.probes.probe import require
from bytecheckpoint.report import PlanReport
from bytecheckpoint.runtime.descriptions import described
from bytecheckpoint.runtime.gil_interval import quick_switches
from bytecheckpoint.tensors.dtensor_pieces import with_pieces
from bytecheckpoint.tensors.hidden_tensors import refuse_hidden_tensors
from bytecheckpoint.tensors.sharded import flatten_sharded
from bytecheckpoint.tensors.side_values import warn_of_side_values
from bytecheckpoint.tensors.subclass_parts import with_parts

__all__ = ["BcpSavePlanner", "WritePart", "as_plain", "kept_state", "stores_parts", "to_stage"]


class BcpSavePlanner(DefaultSavePlanner):
    """Plans a save in C++. Replicated tensors are written once, and each rank that holds them writes an equal part.

    Pass it to ``dcp.save`` as ``planner``, for one save at a time, as with DCP's own planner. It works with any
    ``StorageWriter``. With ``BcpWriter`` no Python code runs for a plain tensor in host memory, unless a subclass
    overrides a hook that DCP calls per tensor. The ranks exchange a few bytes per tensor.

    Subclasses may use and override whatever subclasses of ``DefaultSavePlanner`` may. The plan follows ``state_dict``
    and ``mappings`` as they are after ``set_up_planner``. If a subclass resolves or transforms data itself, boxes are
    not split between ranks.

    What several ranks hold under one key must be equal on all of them. Replicas of a DTensor are, by what torch says of
    them, so each rank may write some rows of it. A plain tensor is written whole by one rank. Plain tensors and objects
    are compared: see ``Config.differing_copies``.

    Args:
        flatten_state_dict: Handle nested dicts and lists.
        flatten_sharded_tensors: Handle ShardedTensors within ShardedTensors, as FSDP over tensor parallelism makes
            them.
        dedup_replicated_tensors: Has no effect. DCP has deprecated it.
        dedup_save_to_lowest_rank: The lowest rank that holds a replicated tensor writes all of it.
        enable_plan_caching: Keep plans in this process, and use them again for the same names, shapes, dtypes, boxes,
            ranks and settings, whatever class the planner has. For an unchanged state a rank then sends some 50 bytes.
        config: Settings of the cache and the tree. ``None`` reads the ``BYTECHECKPOINT_*`` variables when the planner
            is made.
        include: Patterns of the keys to save, as ``LoadSpec`` has them; none: all keys. A pattern may match keys of
            some ranks only.
        exclude: Patterns of keys that are left out, also if ``include`` matches them.
        cast: Dtypes in which floating-point tensors are stored, by pattern, such as ``{"model_bf16": "bfloat16"}``. A
            tensor may be in the state under two names, and be cast under one. Floats of 8 bits stay as they are. What
            is cast takes memory beside the tensor until the save ends.

    Attributes:
        last_plan: Report of how this rank got its last plan.

    A save may fail with ``InvalidPlanError``, on all ranks and inside DCP's ``CheckpointException``: a value cannot be
    stored, ranks disagree about a tensor, or boxes overlap or leave a gap. The message names keys, boxes and ranks.
    Gaps are allowed with ``Config(allow_partial_tensors=True)``, and where each rank saves on its own. A pattern that
    matches no key of any rank is a ``ConfigError``.
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
        include: str | Sequence[str] = (),
        exclude: str | Sequence[str] = (),
        cast: Mapping[str, str | torch.dtype] | None = None,
    ) -> None:
        require(SAVE_AND_LOAD)
        self._path: object = None
        self._call_context = CallContext()
        super().__init__(
            flatten_state_dict, flatten_sharded_tensors, dedup_replicated_tensors, dedup_save_to_lowest_rank
        )
        self.enable_plan_caching = enable_plan_caching
        self.config = config or Config.from_env()
        choice = KeyChoice(include, exclude, cast)
        self.include, self.exclude, self.cast = choice.include, choice.exclude, choice.cast
        self._unmatched: tuple[str, ...] = ()
        self._copies: list[str] = []  # keys of which ranks hold copies that must be equal
        self.last_plan = PlanReport()

    def __repr__(self) -> str:
        return described(
            self,
            flatten_state_dict=True,
            flatten_sharded_tensors=True,
            dedup_save_to_lowest_rank=False,
            enable_plan_caching=True,
            include=(),
            exclude=(),
            cast={},
        )

    @property
    def key_choice(self) -> KeyChoice:
        """Which keys ``include`` and ``exclude`` choose, and what ``cast`` casts."""
        return KeyChoice(self.include, self.exclude, self.cast)

    @quick_switches()
    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Keeps what is to be saved of the state dict, flattened if ``flatten_state_dict``."""
        # From here on the call sends failures safely, with any storage writer.
        self._call_context = CallContext.of_save(self)
        self._path = getattr(storage_meta, "checkpoint_id", None)
        if not self.flatten_state_dict:
            super().set_up_planner(state_dict, storage_meta, is_coordinator)
            if self.key_choice:
                self.state_dict, _, self._unmatched = self.key_choice.chosen(self.state_dict, None)
            return
        warn_of_side_values(state_dict)
        flat, mappings = _C.flatten_state_dict(state_dict)
        if self.key_choice:
            flat, mappings, self._unmatched = self.key_choice.chosen(flat, mappings)
        special = _C.find_special_tensors(flat)
        self._copies = special.copies
        for key in special.subclasses:
            refuse_hidden_tensors(flat[key], key)
        if special.subclasses and self.config.tensor_subclasses == "parts":
            flat, mappings, _ = with_parts(flat, mappings, special.subclasses)
            self._copies = _C.find_special_tensors(flat).copies
        if self.flatten_sharded_tensors and special.has_sharded_tensor:
            flat = flatten_sharded(flat)
        self.state_dict, self.mappings, self.is_coordinator = flat, mappings, is_coordinator

    @quick_switches()
    def create_local_plan(self) -> SavePlan:
        """Returns a plan with the inventory of this rank: all that it holds."""
        begin = time.perf_counter()
        self.last_plan = PlanReport()
        mappings = self.mappings if self.flatten_state_dict else None
        self.state_dict = with_pieces(self.state_dict)
        state = _C.LocalState(
            dict(self.state_dict),
            mappings,
            _compat.chunks_of,
            _compat.write_items_of,
            # A subclass that resolves data itself does not know parts of boxes.
            can_split=_hooks.are_own(self, *_PER_ITEM),
        )
        self._inventory = LocalInventory(
            state,
            mappings,
            self._settings(),
            self.enable_plan_caching,
            self._tree_threshold(),
            self._copies_of(state),
        )
        items: Any = PlanItems(self._inventory)  # DCP only needs a sequence
        paths = None if mappings is None else LazyPaths(self._inventory)
        self.plan = SavePlan(items, planner_data=paths)
        if self.key_choice or self._copies:
            copies = checksums_of_copies(self.state_dict, [key for key in self._copies if key in self.state_dict])
            self.plan = RankPlan(items, planner_data=paths, unmatched=self._unmatched, copies=copies)
        self._seconds = time.perf_counter() - begin
        return self.plan

    @quick_switches()
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Assigns to each rank what it writes; runs on the coordinator.

        If somebody has looked at the items of a plan, and so may have changed them, DCP's own planner plans instead.
        """
        check_ranks(all_plans)
        inventories: list[LocalInventory | RemoteInventory] = []
        is_nested = True
        for plan in all_plans:  # a single pass, as there may be tens of thousands of plans
            of_rank = source_of(plan.items)
            if not isinstance(of_rank, (LocalInventory, RemoteInventory)):
                return self._plan_by_dcp(all_plans)
            inventories.append(of_rank)
            is_nested = is_nested and isinstance(plan.planner_data, LazyPaths)
        if not _hooks.are_own(self, "_create_global_plan", "_dedup_save_plans"):
            return self._plan_by_dcp(all_plans)
        options: dict[str, Any] = {
            "dedup_to_lowest_rank": self.dedup_save_to_lowest_rank,
            "is_nested": is_nested,
            "gaps": self._gaps(),
        }
        settings = repr((options, self.config.differing_copies)).encode()
        key = digest_of((settings, b"".join([of_rank.digest for of_rank in inventories])))
        cache, planned = self._planned(key, inventories, options)
        if planned is None:
            refuse_digests(inventories)
            num_items = sum(of_rank.num_items for of_rank in inventories)
            self.global_plan = assign_later(key, num_items, self.config.tree_topo_fan_out, inventories)
            self.metadata = Metadata({})
            self._awaited = key, options
        else:
            self.global_plan = assign(all_plans, inventories, planned, cache)
            self.metadata = planned_metadata(planned.manifest)
        data = () if is_nested else [plan.planner_data for plan in all_plans]
        if data and all(isinstance(of_rank, Mapping) for of_rank in data):
            self.metadata.planner_data = dict(ChainMap(*data))  # a hook has added planner data; joined as DCP does
        return self.global_plan, self.metadata

    @quick_switches()
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Gives this rank its assignment.

        If the coordinator has not sent the assignment with the plan, the rank takes it from its cache, or the ranks
        exchange plans here.
        """
        source = source_of(new_plan.items)
        begin = time.perf_counter()
        if isinstance(source, DeferredAssignment):
            source = self._assignment_of(source)
            items: Any = PlanItems(source)
            new_plan = dataclasses.replace(new_plan, items=items)
        if isinstance(source, RankAssignment) and isinstance(source.inventory, LocalInventory):
            if self.enable_plan_caching and source.all_can_exchange:
                assignments = {**source.inventory.known_assignments, source.part: source.assignment}
                plan_cache().keep_assignments(source.inventory.digest, assignments, self.config.planner_cache_capacity)
            self.last_plan = PlanReport(
                cache=source.cache,
                bytes_sent=source.inventory.num_bytes_sent,
                bytes_received=source.num_bytes_received,
                seconds=self._seconds + time.perf_counter() - begin,
            )
        else:
            self.last_plan = PlanReport(as_given="planner: it is another one on some rank")
        return super().finish_plan(new_plan)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Returns the value of a key; of a tensor that is marked as boxes of a larger one, the box at ``index``."""
        value: Any = self.state_dict.get(index.fqn)
        if index.offset is not None and _C.is_marked_as_parts(value):
            # An empty box, which is not stored, may begin where another one does.
            for number, (begin, sizes) in enumerate(zip(value.global_offsets, value.local_sizes, strict=True)):
                if torch.Size(begin) == index.offset and 0 not in sizes:
                    index = MetadataIndex(index.fqn, index.offset, number)
        return super().lookup_object(index)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Returns the tensor of ``write_item``, or the bytes of an object. For a ``WritePart``, the rows to write."""
        if not isinstance(write_item, WritePart):
            data: torch.Tensor | io.BytesIO = super().resolve_data(write_item)
            if isinstance(data, torch.Tensor):  # other writers than ours do not check where its memory ends
                _C.check_memory(data, write_item.index.fqn)
            return data
        assert write_item.held is not None
        assert write_item.tensor_data is not None
        index = MetadataIndex(write_item.index.fqn, write_item.held.offsets)
        whole = self.transform_object(write_item, self.lookup_object(index))
        _C.check_memory(whole, write_item.index.fqn)
        part = write_item.tensor_data.chunk
        begins = [at - of_held for at, of_held in zip(part.offsets, write_item.held.offsets, strict=True)]
        return _compat.narrow(whole, begins, part.sizes)

    def _plan_by_dcp(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        for rank, plan in enumerate(all_plans):
            if not getattr(plan, "usable", True):
                raise InvalidPlanError(
                    f"rank {rank} has sent no plan, because its planner keeps plans (enable_plan_caching) and takes it "
                    "that the coordinator's does, too. Use the same planner class and options on all ranks"
                )
        plans, metadata = super().create_global_plan(all_plans)
        _C.check_coverage(metadata.state_dict_metadata, self._gaps())
        return plans, metadata

    def _gaps(self) -> str:
        return gaps_of_save(self.config, self._save_context().use_collectives)

    def _save_context(self) -> CallContext:
        if not self._call_context.is_running():  # a subclass has not called `set_up_planner`, or nothing is known
            self._call_context = CallContext.of_save(self)
        return self._call_context

    def _tree_threshold(self) -> int | None:
        """Returns the number of ranks above which plans go through a tree; None if the ranks cannot exchange plans."""
        if not _hooks.are_own(self, *_BETWEEN_RANKS):
            return None
        return self.config.tree_topo_threshold if self.config.enable_tree_topo else sys.maxsize

    def _settings(self) -> bytes:
        return repr((self.flatten_state_dict, self.flatten_sharded_tensors, self.dedup_save_to_lowest_rank)).encode()

    def _copies_of(self, state: _C.LocalState) -> _C.CopiesOfState | None:
        """Returns what other ranks may hold copies of; None if this rank saves alone."""
        context = self._save_context()
        if context.size == 1 or context.use_collectives is False or (context.size == 0 and not _has_other_ranks()):
            return None
        compares = self.config.differing_copies != "trust"
        return copies_of(state, compares=compares, num_ranks=context.size, seed=seed_of(self._path))

    def _planned(
        self, key: bytes, inventories: list[LocalInventory | RemoteInventory], options: dict[str, Any]
    ) -> tuple[str, CachedPlan | None]:
        """Returns what the cache did, and the plan.

        The plan is None if a rank sent only digests of what it holds, and that is not in the cache.
        """
        kept = plan_cache().plan(key) if self.enable_plan_caching else None
        if kept is not None and kept.copies_agree(inventories):
            return "hit", kept
        if kept is not None:
            options["known_differing"] = sorted(kept.differing)
        cache = "miss" if self.enable_plan_caching else "off"
        messages: list[bytes] = []
        for of_rank in inventories:
            message = of_rank.message
            if message is None and not of_rank.has_checksums:
                message = plan_cache().blob(of_rank.digest)
            if message is None:
                return cache, None
            messages.append(message)
        planned = self._new_plan(key, options, _C.plan_ranks(messages, **options))
        if len(inventories) <= self.config.tree_topo_threshold:
            blobs = {of_rank.digest: message for of_rank, message in zip(inventories, messages, strict=True)}
            planned = dataclasses.replace(planned, blobs=blobs)
        self._keep_plan(key, planned)
        return cache, planned

    def _new_plan(self, key: bytes, options: dict[str, Any], plan: tuple[Any, ...]) -> CachedPlan:
        """Makes a plan of what C++ returned, and reports copies that differ."""
        differing = plan[4]
        judge(differing, self.config.differing_copies, self._path)
        return CachedPlan.of(key, options.get("known_differing", ()), plan)

    def _keep_plan(self, key: bytes, planned: CachedPlan) -> None:
        if self.enable_plan_caching:
            plan_cache().keep_plan(key, planned, self.config.planner_cache_capacity)

    def _assignment_of(self, deferred: DeferredAssignment) -> RankAssignment:
        if deferred.fan_out is None:
            return self._assignment_by_key(deferred.key)
        return self._assignment_by_exchange(deferred.fan_out)

    def _assignment_by_key(self, key: bytes) -> RankAssignment:
        assert self._inventory.peers is not None
        part = part_of(key, self._inventory.peers.rank)
        assignment = RankAssignment(
            self._inventory, part, self._inventory.known_assignments[part], "hit", all_can_exchange=True
        )
        assignment.num_bytes_received = len(key)
        return assignment

    def _assignment_by_exchange(self, fan_out: int) -> RankAssignment:
        inventory = self._inventory
        assert inventory.peers is not None
        channel = inventory.peers.connect()
        plan = functools.partial(self._plan_tree, inventory) if inventory.peers.is_coordinator else None
        encoded = PlanTree(channel, inventory.peers, fan_out).exchange(inventory.message, plan)
        cache = "miss" if self.enable_plan_caching else "off"
        part = part_of(encoded.key, inventory.peers.rank)
        assignment = RankAssignment(inventory, part, encoded, cache, all_can_exchange=True)
        inventory.num_bytes_sent += channel.bytes_sent
        assignment.num_bytes_received = channel.bytes_received
        return assignment

    def _plan_tree(self, own: LocalInventory, below: list[bytes]) -> list[EncodedAssignment]:
        """Plans at the root of the tree, and fills the metadata that ``create_global_plan`` gave DCP empty."""
        assert own.peers is not None
        key, options = self._awaited
        planned = self._new_plan(key, options, _C.plan_tree(own.message, own.peers.rank, below, **options))
        self._keep_plan(key, planned)
        fill_planned_metadata(self.metadata, planned.manifest)
        return planned.assignments


def _has_other_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


_hooks = Hooks(BcpSavePlanner)
_dcps_hooks = Hooks(DefaultSavePlanner)
# Hooks that see the plans of other ranks, or in which a rank may fail while others wait for it.
_BETWEEN_RANKS = ("create_local_plan", "create_global_plan", "_create_global_plan", "_dedup_save_plans", "finish_plan")
_PER_ITEM = ("resolve_data", "lookup_object", "transform_object")


def as_plain(planner: object) -> BcpSavePlanner | None:
    """Returns ``planner`` if its hooks per item need not be called, else None.

    They need not be called if they are those of this class and of DCP, and the state dict is a plain dict.
    """
    if isinstance(planner, BcpSavePlanner) and _hooks.are_own(planner, *_PER_ITEM) and type(planner.state_dict) is dict:
        return planner
    return None


def kept_state(planner: SavePlanner) -> dict[str, Any] | None:
    """Returns the state dict if ``planner`` resolves each tensor to the one in it, as DCP's planner and ours do.

    Returns None if the planner may do otherwise.
    """
    if not (_hooks.are_own(planner, *_PER_ITEM) or _dcps_hooks.are_own(planner, *_PER_ITEM)):
        return None
    state: Any = planner.state_dict  # type: ignore[attr-defined]
    return state if type(state) is dict else None


def to_stage(state_dict: dict[str, Any], planner: object) -> dict[str, Any]:
    """Returns what is to be staged of a state for a save with ``planner``: what its patterns choose, cast."""
    choice = planner.key_choice if isinstance(planner, BcpSavePlanner) and planner.flatten_state_dict else None
    return choice.applied(state_dict) if choice else state_dict


def stores_parts(planner: object) -> bool:
    """Returns whether a save with ``planner`` stores tensors of subclasses by their parts."""
    if not isinstance(planner, BcpSavePlanner):
        return False
    return planner.flatten_state_dict and planner.config.tensor_subclasses == "parts"
