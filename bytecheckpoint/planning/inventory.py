# SPDX-License-Identifier: Apache-2.0
"""Inventories: what each rank holds. They stand behind the items of save plans and travel to the coordinator."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from torch.distributed.checkpoint.planner import WriteItem

from bytecheckpoint.distributed.channel import Peers
from bytecheckpoint.errors import InvalidPlanError
from bytecheckpoint.native import _C
from bytecheckpoint.planning.handles import Handle, handle_of
from bytecheckpoint.planning.plan_cache import digest_of, plan_cache
from bytecheckpoint.planning.plan_items import PickledSource, source_of
from bytecheckpoint.planning.write_part import WritePart

__all__ = [
    "LazyPaths",
    "LocalInventory",
    "RemoteInventory",
    "bytes_of",
    "may_look",
    "may_send_digest",
    "refuse_digests",
]


# Advice for errors where some ranks rely on an exchange of plans in which other ranks cannot take part.
_ONE_CLASS = (
    "Use the same planner and writer classes on all ranks, or set Config(enable_tree_topo=False), or "
    "Config(planning='as given') if no rank has a planner of ours; then save again: the ranks no longer rely on plans "
    "that they sent before"
)


class LocalInventory(PickledSource):
    """The inventory of this rank: everything that it holds.

    Attributes:
        digest: Digest of what the rank holds and of the settings of its planner. It depends on no values.
        message: What the coordinator plans with: the inventory, and beside it the checksums of copies.
        known_assignments: What the rank was assigned in earlier saves when it held the same, by the names that
            ``part_of`` gives.
        known_hashes: For each of these, hashes of the copies that were found equal then.
        has_checksums: Whether the message has anything that depends on values.
        sees_no_others: Whether no hook of the planner looks at the plans of other ranks.
        peers: The ranks with which this one can exchange plans after DCP has gathered them; None if it cannot.
        sends_blob: Whether the coordinator gets the message; otherwise it gets only the digest, and the hashes.
        num_bytes_sent: Bytes sent to DCP and to other ranks, without what DCP wraps around them.
    """

    def __init__(
        self,
        state: _C.LocalState,
        mappings: dict[str, Any] | None,
        settings: bytes,
        is_cached: bool,
        tree_threshold: int | None,
        copies: _C.CopiesOfState | None = None,
    ) -> None:
        self.state = state
        self.mappings = mappings or {}
        blob = state.blob
        self.num_items = state.num_items
        self.digest = digest_of((blob, settings, b"" if copies is None else copies.meshes))
        self.message = blob if copies is None else copies.message(blob)
        self.has_checksums = copies is not None and copies.has_checksums
        self.known_assignments = plan_cache().take_assignments(self.digest) if is_cached else {}
        self.known_hashes: dict[bytes, bytes] = {}
        for part, assignment in self.known_assignments.items():
            hashes = b"" if copies is None else copies.hashes_of_groups(assignment.groups)
            if hashes is not None:  # else the assignment is of a save that compared otherwise
                self.known_hashes[part] = hashes
        self.peers: Peers | None = None
        self.sends_blob = True
        self.num_bytes_sent = 0
        self.handle = handle_of(self)
        self.sees_no_others = tree_threshold is not None
        self._tree_threshold = tree_threshold

    def may_send_digest(self, peers: Peers | None) -> None:
        """Sends only the digest from now on, if the coordinator may know the blob or a tree will carry it.

        No effect if the ranks cannot exchange plans.
        """
        if self._tree_threshold is None:
            return
        self.peers = peers
        if self.peers is not None:
            self.sends_blob = self.peers.size <= self._tree_threshold and not self.known_hashes

    def items(self) -> list[WriteItem]:
        self.sends_blob = True  # somebody looks at items, so DCP's own planner will join the items of all ranks
        return self.state.items()

    @property
    def can_exchange(self) -> bool:
        return self.peers is not None

    def send_whole(self) -> None:
        self.sends_blob = True

    def __reduce__(self) -> tuple[Any, ...]:
        message = self.message if self.sends_blob else None
        known = self.known_hashes
        self.num_bytes_sent += sum(map(len, (self.digest, *known, *known.values(), message or b"")))
        arguments = (self.handle, self.digest, message, self.num_items, known, self.can_exchange, self.has_checksums)
        return RemoteInventory, arguments


class RemoteInventory(PickledSource):
    """The inventory of another rank, or only the digest of it (``message`` is None)."""

    def __init__(
        self,
        handle: Handle,
        digest: bytes = b"",
        message: bytes | None = None,
        num_items: int = 0,
        known_hashes: Mapping[bytes, bytes] | None = None,
        can_exchange: bool = False,
        has_checksums: bool = False,
    ) -> None:
        self.handle = handle
        self.digest = digest
        self.message = message
        self.num_items = num_items
        self.known_hashes = known_hashes or {}
        self.can_exchange = can_exchange
        self.has_checksums = has_checksums

    def items(self) -> list[WriteItem]:
        return _C.items_of_blob(self.any_message(), None, WritePart)

    @property
    def is_away(self) -> bool:
        # Also where an earlier save left the items in the cache: what was sent then may have had other checksums.
        return self.message is None

    @functools.cached_property
    def mappings(self) -> dict[str, Any]:
        """Paths by FQN, read from the message. Reading them takes as long as planning it."""
        *_, planned = _C.plan_ranks([self.any_message()], dedup_to_lowest_rank=True, is_nested=True, gaps="ignore")
        mappings: dict[str, Any] = planned.planner_data
        return mappings

    def any_message(self) -> bytes:
        """Returns the message, or that of an earlier save. Its items are the same; its checksums may not be."""
        message = self.message or plan_cache().blob(self.digest)
        if message is None:
            raise InvalidPlanError(
                "the plan items of another rank were read, but that rank sent only the digest of its plan, because no "
                f"hook was known to read them. {_ONE_CLASS}"
            )
        return message


class LazyPaths(Mapping[str, Any]):
    """Planner data of a flattened state: maps each FQN to its path through nested dicts.

    The paths travel within the inventory, and are read from it when somebody asks.
    """

    def __init__(self, inventory: LocalInventory | RemoteInventory | None) -> None:
        self._inventory = inventory

    def __getitem__(self, fqn: str) -> Any:
        return self._mappings()[fqn]

    def __iter__(self) -> Iterator[str]:
        return iter(self._mappings())

    def __len__(self) -> int:
        return len(self._mappings())

    def _mappings(self) -> dict[str, Any]:
        return {} if self._inventory is None else self._inventory.mappings

    @property
    def is_away(self) -> bool:
        """Whether the paths cannot be read in this process."""
        return self._inventory is not None and self._inventory.is_away

    def send_whole(self) -> None:
        """Makes pickling send the inventory with the paths."""
        if self._inventory is not None:
            self._inventory.send_whole()

    def __reduce__(self) -> tuple[Any, ...]:
        # A rank needs no paths back from the coordinator.
        return type(self), (self._inventory if isinstance(self._inventory, LocalInventory) else None,)


def may_send_digest(items: Any, peers: Peers | None) -> None:
    """Lets DCP gather only the digest of this rank's inventory where that is enough.

    It is enough if the coordinator may know the inventory, or if plans go through a tree. A writer that does not look
    at items of other ranks calls this. It has an effect only if all ranks can exchange what is missing: their group is
    known, and no overridden hook of the planner sees plans of other ranks or may fail before the exchange.

    Args:
        items: Items of the local plan.
        peers: The ranks of the call; None if they are not known.
    """
    source = source_of(items)
    if isinstance(source, LocalInventory):
        source.may_send_digest(peers)


def may_look(items: Any) -> bool:
    """Returns whether, with the planner that made this local plan, hooks may look at items of other ranks."""
    source = source_of(items)
    return not (isinstance(source, LocalInventory) and source.sees_no_others)


def bytes_of(items: Any) -> int:
    """Returns the bytes of the tensors of a local plan. A plan of another planner is checked on the way."""
    source = source_of(items)
    return source.state.num_bytes if isinstance(source, LocalInventory) else _C.WritePlan(items).num_bytes


def refuse_digests(inventories: list[LocalInventory | RemoteInventory]) -> None:
    """Checks that every rank can exchange plans. All ranks can exchange what the coordinator lacks, or none can.

    Raises:
        InvalidPlanError: Some rank cannot.
    """
    for rank, of_rank in enumerate(inventories):
        if not of_rank.can_exchange:
            raise InvalidPlanError(
                f"rank {rank} cannot exchange plans with the other ranks, but some of them sent only a digest. "
                f"{_ONE_CLASS}"
            )
