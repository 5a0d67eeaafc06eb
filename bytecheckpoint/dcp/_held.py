# SPDX-License-Identifier: Apache-2.0
"""What ranks hold: what stands behind the items of their plans to save, and travels to the coordinator."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from torch.distributed.checkpoint.planner import WriteItem

from bytecheckpoint import _C
from bytecheckpoint.dcp._part import WritePart
from bytecheckpoint.dcp._peers import Peers, peers_of_call
from bytecheckpoint.dcp._plan_cache import digest_of, plan_cache
from bytecheckpoint.dcp._plan_items import Home, Travels, home_of, source_of
from bytecheckpoint.errors import InvalidPlanError

__all__ = ["Held", "HeldElsewhere", "Ways", "bytes_of", "may_send_digest", "refuse_digests"]


# What to do where some ranks rely on an exchange of plans in which others cannot take part.
_ONE_CLASS = (
    "Use the same planner and writer classes on all ranks; or, with Config(enable_tree_topo=False), save again, since "
    "what ranks relied on is now forgotten"
)


class Held(Travels):
    """What this rank holds: items of everything.

    Attributes:
        digest: Of what it holds and of the settings of its planner.
        known_answers: What it was told to write when it held the same, by part of a plan.
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
        self.known_answers = plan_cache().take_answers(self.digest) if is_cached else {}
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
            self.sends_blob = self.peers.size <= self._tree_threshold and not self.known_answers

    def items(self) -> list[WriteItem]:
        self.sends_blob = True  # somebody looks: DCP's own planner will join what all ranks have
        return self.state.items()

    @property
    def can_exchange(self) -> bool:
        return self.peers is not None

    def __reduce__(self) -> tuple[Any, ...]:
        blob = self.blob if self.sends_blob else None
        self.num_bytes_sent += sum(map(len, (self.digest, *self.known_answers, blob or b"")))
        parts = tuple(self.known_answers)
        return HeldElsewhere, (self.home, self.digest, blob, self.num_items, parts, self.can_exchange)


class HeldElsewhere(Travels):
    """What another rank holds, or the digest of it."""

    def __init__(
        self,
        home: Home,
        digest: bytes = b"",
        blob: bytes | None = None,
        num_items: int = 0,
        known_answers: tuple[bytes, ...] = (),
        can_exchange: bool = False,
    ) -> None:
        self.home = home
        self.digest = digest
        self.blob = blob
        self.num_items = num_items
        self.known_answers = known_answers
        self.can_exchange = can_exchange

    def items(self) -> list[WriteItem]:
        return _C.items_of_blob(self.blob_or_raise(), None, WritePart)

    @functools.cached_property
    def mappings(self) -> dict[str, Any]:
        """Read from the blob, which takes as long as planning it."""
        _, _, _, planned = _C.plan_ranks(
            [self.blob_or_raise()], dedup_to_lowest_rank=True, is_nested=True, gaps="ignore"
        )
        mappings: dict[str, Any] = planned.planner_data
        return mappings

    def blob_or_raise(self) -> bytes:
        if self.blob is None:
            raise InvalidPlanError(
                "the items of a rank are looked at that sent the digest of its plan alone: no hook was known to look "
                f"at them. {_ONE_CLASS}"
            )
        return self.blob


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


def may_send_digest(items: Any) -> None:
    """Called by a writer that looks at no items of other ranks: where the coordinator may know what this rank holds, or
    plans go through a tree, the digest of it is enough for DCP to gather.

    Only where all ranks can exchange what is lacking: their group is known, and no hook of the planner is somebody's
    own that sees other ranks' plans or may fail before the exchange.
    """
    source = source_of(items)
    if isinstance(source, Held):
        source.may_send_digest()


def bytes_of(items: Any) -> int:
    """Of the tensors of a local plan, which is checked if it is another planner's."""
    source = source_of(items)
    return source.state.num_bytes if isinstance(source, Held) else _C.WritePlan(items).num_bytes


def refuse_digests(held: list[Held | HeldElsewhere]) -> None:
    """What is lacking can be exchanged by all ranks together, or not at all."""
    for rank, of_rank in enumerate(held):
        if not of_rank.can_exchange:
            raise InvalidPlanError(
                f"rank {rank} cannot exchange plans with others, of which some sent the digest of theirs alone. "
                f"{_ONE_CLASS}"
            )
