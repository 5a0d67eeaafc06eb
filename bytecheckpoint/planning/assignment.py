# SPDX-License-Identifier: Apache-2.0
"""Assignments: what each rank is to write. They stand behind the items of the plans that the coordinator returns."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from bytecheckpoint.errors import InvalidPlanError
from bytecheckpoint.native import _C
from bytecheckpoint.planning.handles import Handle, object_of
from bytecheckpoint.planning.inventory import LocalInventory, RemoteInventory
from bytecheckpoint.planning.plan_cache import CachedPlan, EncodedAssignment, part_of
from bytecheckpoint.planning.plan_items import PickledSource, PlanItems, source_of
from bytecheckpoint.planning.write_part import WritePart

__all__ = ["DeferredAssignment", "RankAssignment", "assign", "assign_later", "plan_to_write"]


class RankAssignment(PickledSource):
    """What one rank is to write: a part of its inventory.

    Attributes:
        all_can_exchange: Whether every rank could take part in an exchange of plans. Only then does the rank keep its
            assignment for the next save.
    """

    def __init__(
        self,
        inventory: LocalInventory | RemoteInventory,
        part: bytes,
        assignment: EncodedAssignment,
        cache: str,
        *,
        all_can_exchange: bool,
    ) -> None:
        self.inventory = inventory
        self.part = part
        self.assignment = assignment
        self.cache = cache
        self.all_can_exchange = all_can_exchange
        self.num_bytes_received = 0

    @property
    def num_items(self) -> int:
        return self.assignment.num_items

    def items(self) -> list[WriteItem]:
        if isinstance(self.inventory, LocalInventory):
            return self.plan().items()
        return _C.items_of_blob(self.inventory.any_message(), self.assignment.encoded, WritePart)

    def plan(self) -> _C.WritePlan:
        assert isinstance(self.inventory, LocalInventory)
        return _C.WritePlan.of_assignment(self.inventory.state, self.assignment.encoded, WritePart)

    def __reduce__(self) -> tuple[Any, ...]:
        sent = None if self.part in self.inventory.known_hashes else tuple(self.assignment)
        return _arrived, (self.inventory.handle, self.part, sent, self.cache, self.all_can_exchange)


def _arrived(
    handle: Handle, part: bytes, sent: tuple[Any, ...] | None, cache: str, all_can_exchange: bool
) -> RankAssignment:
    inventory = object_of(handle)
    if not isinstance(inventory, LocalInventory):
        # This process does not have the inventory that the assignment is for, so it cannot use the assignment.
        return RankAssignment(RemoteInventory(handle), part, EncodedAssignment(b"", 0), cache, all_can_exchange=False)
    known = inventory.known_assignments[part] if sent is None else EncodedAssignment(*sent)
    assignment = RankAssignment(inventory, part, known, cache, all_can_exchange=all_can_exchange)
    assignment.num_bytes_received = len(part) + (0 if sent is None else assignment.assignment.num_bytes)
    return assignment


class DeferredAssignment(PickledSource):
    """Stands for assignments that the ranks find out in ``finish_plan``. The same object serves all ranks.

    ``finish_plan`` is the place for it because either all ranks arrive there or none does.

    Attributes:
        key: Key of the plan.
        num_items: Items per rank, on average.
        fan_out: Fan-out of the tree through which the ranks exchange plans; None if every rank already knows its
            assignment and only needs the key.
    """

    def __init__(self, key: bytes, num_items: int, fan_out: int | None) -> None:
        self.key = key
        self.num_items = num_items
        self.fan_out = fan_out

    def items(self) -> list[WriteItem]:
        raise InvalidPlanError("the items of a plan were read before the planner's finish_plan has made them")

    def __reduce__(self) -> tuple[Any, ...]:
        return DeferredAssignment, (self.key, self.num_items, self.fan_out)


def assign(
    plans: list[SavePlan],
    inventories: list[LocalInventory | RemoteInventory],
    planned: CachedPlan,
    cache: str,
) -> list[SavePlan]:
    """Returns ``plans`` with the items replaced by what each rank is to write.

    If every rank already knows its assignment, all ranks get one plan that carries only the key.
    """
    key = planned.key
    parts = [part_of(key, rank) for rank in range(len(inventories))]
    all_can_exchange = len(inventories) > 1 and all(of_rank.can_exchange for of_rank in inventories)
    if all_can_exchange and all(part in of_rank.known_hashes for of_rank, part in zip(inventories, parts, strict=True)):
        return assign_later(key, planned.num_items, None, inventories)
    items: list[Any] = [
        PlanItems(RankAssignment(of_rank, part, assignment, cache, all_can_exchange=all_can_exchange))
        for of_rank, part, assignment in zip(inventories, parts, planned.assignments, strict=True)
    ]
    return [dataclasses.replace(plan, items=own) for plan, own in zip(plans, items, strict=True)]


def assign_later(
    key: bytes, num_items: int, fan_out: int | None, inventories: list[LocalInventory | RemoteInventory]
) -> list[SavePlan]:
    """Returns the same plan for all ranks; each makes its own of it in ``finish_plan``. See ``DeferredAssignment``."""
    items: Any = PlanItems(DeferredAssignment(key, num_items // len(inventories), fan_out))
    return [SavePlan(items)] * len(inventories)


def plan_to_write(items: Any) -> _C.WritePlan:
    """Returns the write plan behind ``items`` if our planner made them; otherwise makes one from the items."""
    source = source_of(items)
    if isinstance(source, RankAssignment) and isinstance(source.inventory, LocalInventory):
        return source.plan()
    return _C.WritePlan(items)
