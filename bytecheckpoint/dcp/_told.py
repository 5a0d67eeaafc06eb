# SPDX-License-Identifier: Apache-2.0
"""What ranks are told to write: what stands behind the items of the plans that the coordinator gives back."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from bytecheckpoint import _C
from bytecheckpoint.dcp._held import Held, HeldElsewhere
from bytecheckpoint.dcp._part import WritePart
from bytecheckpoint.dcp._plan_cache import Answer, Planned, part_of
from bytecheckpoint.dcp._plan_items import Home, PlanItems, Travels, at_home, source_of
from bytecheckpoint.errors import InvalidPlanError

__all__ = ["Later", "Told", "plan_to_write", "tell", "tell_later"]


class Told(Travels):
    """What a rank is to write, of what it holds.

    Attributes:
        all_can_exchange: Every rank could take part in an exchange, so that this one may rely on what it knows the next
            time.
    """

    def __init__(
        self, held: Held | HeldElsewhere, part: bytes, answer: Answer, cache: str, *, all_can_exchange: bool
    ) -> None:
        self.held = held
        self.part = part
        self.answer = answer
        self.cache = cache
        self.all_can_exchange = all_can_exchange
        self.num_bytes_received = 0

    @property
    def num_items(self) -> int:
        return self.answer.num_items

    def items(self) -> list[WriteItem]:
        if isinstance(self.held, Held):
            return self.plan().items()
        return _C.items_of_blob(self.held.blob_or_raise(), self.answer.encoded, WritePart)

    def plan(self) -> _C.WritePlan:
        assert isinstance(self.held, Held)
        return _C.WritePlan.of_answer(self.held.state, self.answer.encoded, WritePart)

    def __reduce__(self) -> tuple[Any, ...]:
        answer = None if self.part in self.held.known_answers else tuple(self.answer)
        return _told, (self.held.home, self.part, answer, self.cache, self.all_can_exchange)


def _told(home: Home, part: bytes, answer: tuple[bytes, int] | None, cache: str, all_can_exchange: bool) -> Told:
    held = at_home(home)
    if not isinstance(held, Held):
        # The answer of one rank is of no use to another, nor to a rank that no longer has the plan.
        return Told(HeldElsewhere(home), part, Answer(b"", 0), cache, all_can_exchange=False)
    known = held.known_answers[part] if answer is None else Answer(*answer)
    told = Told(held, part, known, cache, all_can_exchange=all_can_exchange)
    told.num_bytes_received = len(part) + (0 if answer is None else len(told.answer.encoded))
    return told


class Later(Travels):
    """What a rank is to write, known in ``finish_plan``, where all ranks arrive or none. The same object for all ranks.

    Attributes:
        key: Of the plan.
        num_items: Of all ranks, on average.
        fan_out: Of the tree through which plans are exchanged; None if every rank knows its answer.
    """

    def __init__(self, key: bytes, num_items: int, fan_out: int | None) -> None:
        self.key = key
        self.num_items = num_items
        self.fan_out = fan_out

    def items(self) -> list[WriteItem]:
        raise InvalidPlanError("the items of a plan are looked at before the planner's finish_plan has made them")

    def __reduce__(self) -> tuple[Any, ...]:
        return Later, (self.key, self.num_items, self.fan_out)


def tell(
    plans: list[SavePlan], held: list[Held | HeldElsewhere], key: bytes, planned: Planned, cache: str
) -> list[SavePlan]:
    """The plans with what each rank is to write."""
    parts = [part_of(key, rank) for rank in range(len(held))]
    all_can_exchange = len(held) > 1 and all(of_rank.can_exchange for of_rank in held)
    if all_can_exchange and all(part in of_rank.known_answers for of_rank, part in zip(held, parts, strict=True)):
        return tell_later(key, planned.num_items, None, held)
    told: list[Any] = [
        PlanItems(Told(of_rank, part, answer, cache, all_can_exchange=all_can_exchange))
        for of_rank, part, answer in zip(held, parts, planned.answers, strict=True)
    ]
    return [dataclasses.replace(plan, items=items) for plan, items in zip(plans, told, strict=True)]


def tell_later(key: bytes, num_items: int, fan_out: int | None, held: list[Held | HeldElsewhere]) -> list[SavePlan]:
    """The same plan for all ranks, of which ``finish_plan`` makes that of each. See ``Later``."""
    items: Any = PlanItems(Later(key, num_items // len(held), fan_out))
    return [SavePlan(items)] * len(held)


def plan_to_write(items: Any) -> _C.WritePlan:
    """The plan that our planner made, or one made of its items."""
    source = source_of(items)
    if isinstance(source, Told) and isinstance(source.held, Held):
        return source.plan()
    return _C.WritePlan(items)
