# SPDX-License-Identifier: Apache-2.0
"""What ranks hold and what they are told to write: what stands behind the items of a plan to save, and travels."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from torch.distributed.checkpoint.planner import WriteItem

from bytecheckpoint import _C
from bytecheckpoint.dcp._part import WritePart
from bytecheckpoint.dcp._peers import Peers, peers_of_call
from bytecheckpoint.dcp._plan_cache import Answer, digest_of, plan_cache
from bytecheckpoint.dcp._plan_items import Home, Travels, at_home, home_of
from bytecheckpoint.errors import InvalidPlanError

__all__ = ["ONE_CLASS", "Held", "HeldElsewhere", "Later", "Told", "Ways"]


# What to do where some ranks rely on an exchange of plans in which others cannot take part.
ONE_CLASS = (
    "Use the same planner and writer classes on all ranks; or, with Config(enable_tree_topo=False), save again, since "
    "what ranks relied on is now forgotten"
)


class Held(Travels):
    """What this rank holds: items of everything.

    Attributes:
        digest: Of what it holds and of the settings of its planner.
        known: What it was told to write when it held the same, by part of a plan.
        peers: The ranks with which plans can be exchanged once DCP has gathered them; None if they cannot.
        sends_blob: Not the digest alone.
        num_bytes_sent: To DCP and to other ranks, without what DCP wraps around it.
    """

    def __init__(
        self,
        state: _C.LocalState,
        mappings: dict[str, Any] | None,
        settings: bytes,
        is_cached: bool,
        tree_threshold: int | None,
    ) -> None:
        self.state = state
        self.mappings = mappings or {}
        self.blob = state.blob
        self.num_items = state.num_items
        self.digest = digest_of((self.blob, settings))
        self.known = plan_cache().take_answers(self.digest) if is_cached else {}
        self.peers: Peers | None = None
        self.sends_blob = True
        self.num_bytes_sent = 0
        self.home = home_of(self)
        self._tree_threshold = tree_threshold

    def may_send_digest(self) -> None:
        """Within a hook that DCP calls: from now on the blob stays where the coordinator may have it, or a tree is to
        carry it."""
        if self._tree_threshold is None:
            return
        self.peers = peers_of_call()
        if self.peers is not None:
            self.sends_blob = self.peers.size <= self._tree_threshold and not self.known

    def items(self) -> list[WriteItem]:
        self.sends_blob = True  # somebody looks: DCP's own planner will join what all ranks have
        return self.state.items()

    @property
    def can_exchange(self) -> bool:
        return self.peers is not None

    def __reduce__(self) -> tuple[Any, ...]:
        blob = self.blob if self.sends_blob else None
        self.num_bytes_sent += sum(map(len, (self.digest, *self.known, blob or b"")))
        return HeldElsewhere, (self.home, self.digest, blob, self.num_items, tuple(self.known), self.can_exchange)


class HeldElsewhere(Travels):
    """What another rank holds, or the digest of it."""

    def __init__(
        self,
        home: Home,
        digest: bytes = b"",
        blob: bytes | None = None,
        num_items: int = 0,
        known: tuple[bytes, ...] = (),
        can_exchange: bool = False,
    ) -> None:
        self.home = home
        self.digest = digest
        self.blob = blob
        self.num_items = num_items
        self.known = known
        self.can_exchange = can_exchange

    def items(self) -> list[WriteItem]:
        return _C.items_of_blob(self._blob(), None, WritePart)

    @functools.cached_property
    def mappings(self) -> dict[str, Any]:
        """Read from the blob, which takes as long as planning it."""
        _, _, _, planned = _C.plan_ranks([self._blob()], dedup_to_lowest_rank=True, is_nested=True)
        mappings: dict[str, Any] = planned.planner_data
        return mappings

    def _blob(self) -> bytes:
        if self.blob is None:
            raise InvalidPlanError(
                "the items of a rank are looked at that sent the digest of its plan alone: no hook was known to look "
                f"at them. {ONE_CLASS}"
            )
        return self.blob


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
        return _C.items_of_blob(self.held._blob(), self.answer.encoded, WritePart)

    def plan(self) -> _C.WritePlan:
        assert isinstance(self.held, Held)
        return _C.WritePlan.of_answer(self.held.state, self.answer.encoded, WritePart)

    def __reduce__(self) -> tuple[Any, ...]:
        answer = None if self.part in self.held.known else tuple(self.answer)
        return _told, (self.held.home, self.part, answer, self.cache, self.all_can_exchange)


def _told(home: Home, part: bytes, answer: tuple[bytes, int] | None, cache: str, all_can_exchange: bool) -> Told:
    held = at_home(home)
    if not isinstance(held, Held):
        # The answer of one rank is of no use to another, nor to a rank that no longer has the plan.
        return Told(HeldElsewhere(home), part, Answer(b"", 0), cache, all_can_exchange=False)
    known = held.known[part] if answer is None else Answer(*answer)
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


class Ways(Mapping[str, Any]):
    """Planner data of a flattened state: FQN to the way through nested dicts. Travels within the inventory."""

    def __init__(self, held: Held | HeldElsewhere | None) -> None:
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
        return type(self), (self._held if isinstance(self._held, Held) else None,)
