# SPDX-License-Identifier: Apache-2.0
"""Sends inventories up a tree of ranks, and assignments down.

DCP gathers the plans of all ranks at one rank. Here each inner node merges its own inventory with those of the nodes
below it. What replicas share thus goes up once, and each rank receives messages from only a few others.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING

from bytecheckpoint.distributed.channel import Channel, Peers
from bytecheckpoint.errors import CheckpointError, RankError, sendable
from bytecheckpoint.native import _C
from bytecheckpoint.planning.plan_cache import EncodedAssignment
from bytecheckpoint.runtime.interrupts import DeferredInterrupt

if TYPE_CHECKING:
    Plan = Callable[[list[bytes]], list[EncodedAssignment]]

__all__ = ["PlanTree"]


class PlanTree:
    """A k-ary tree over the ranks of a call, with the coordinator at its root.

    A node and all below it are ranks that follow one another, counted from the coordinator. The node is the first of
    them, and the rest is divided evenly among its children.

    Every rank takes part to the end, whatever has failed, and sends its error up. The root sends the first error down
    to all. So an error on any rank is raised on every rank, and no rank is left waiting.
    """

    def __init__(self, channel: Channel, peers: Peers, fan_out: int) -> None:
        self._channel = channel
        self._peers = peers
        place = (peers.rank - peers.coordinator) % peers.size
        self._above, self._below = _neighbours(place, peers.size, fan_out)

    def exchange(self, inventory: bytes, plan: Plan | None) -> EncodedAssignment:
        """Sends this rank's inventory to the root, and returns what this rank is to write. Collective.

        Args:
            inventory: What this rank holds: ``LocalInventory.message``.
            plan: Given at the root, None elsewhere. Makes the assignments of all ranks from the merged inventories of
                the nodes directly below the root.

        Raises:
            Exception: The first error of any rank, on all ranks.
            CheckpointError: A rank has died, or did not answer within the timeout of the group.
        """
        with DeferredInterrupt():
            below, failure = self._take_from_below()
            assignments: dict[int, EncodedAssignment] = {}
            if plan is None:
                self._hand_up(inventory, below, failure)
                assignments, failure = self._await_assignments()
            elif failure is None:
                try:
                    assignments = dict(enumerate(plan(below)))
                except BaseException as error:
                    failure = error
            self._hand_down(assignments, failure)
            if failure is not None:
                raise failure
        return assignments[self._peers.rank]

    def _take_from_below(self) -> tuple[list[bytes], BaseException | None]:
        """Receives from every child, also after one has failed: the others would wait for this rank to receive."""
        below: list[bytes] = []
        failure: BaseException | None = None
        for subtree in self._below:
            try:
                inventory, error = pickle.loads(self._receive(subtree.start))
            except BaseException as of_channel:
                inventory, error = b"", of_channel
            below.append(inventory)
            failure = error if failure is None else failure
        return below, failure

    def _hand_up(self, inventory: bytes, below: list[bytes], failure: BaseException | None) -> None:
        merged = b""
        if failure is None:
            try:
                merged = _C.merge_below(inventory, self._peers.rank, below)
            except BaseException as error:
                failure = error
        message = _packed(merged, failure)
        with contextlib.suppress(CheckpointError):  # receiving from there will fail, too, and that error is reported
            self._send(message, self._above)

    def _await_assignments(self) -> tuple[dict[int, EncodedAssignment], BaseException | None]:
        try:
            assignments, failure = pickle.loads(self._receive(self._above))
        except BaseException as error:
            return {}, error
        return assignments, failure

    def _hand_down(self, assignments: dict[int, EncodedAssignment], failure: BaseException | None) -> None:
        for subtree in self._below:
            ranks = () if failure is not None else map(self._rank_at, subtree)
            with contextlib.suppress(CheckpointError):  # DCP waits for all ranks afterwards, and will notice the loss
                self._send(_packed({rank: assignments[rank] for rank in ranks}, failure), subtree.start)

    def _send(self, message: bytes, place: int) -> None:
        try:
            self._channel.send(message, self._rank_at(place))
        except RuntimeError as error:
            raise self._lost(place, error) from error

    def _receive(self, place: int) -> bytes:
        try:
            return self._channel.receive(self._rank_at(place))
        except RuntimeError as error:
            raise self._lost(place, error) from error

    def _lost(self, place: int, error: RuntimeError) -> CheckpointError:
        return CheckpointError(
            f"exchange of plans: rank {self._peers.rank} has lost rank {self._rank_at(place)}: {error}"
        )

    def _rank_at(self, place: int) -> int:
        return (place + self._peers.coordinator) % self._peers.size


def _neighbours(place: int, size: int, fan_out: int) -> tuple[int, list[range]]:
    """Returns the place right above ``place`` (that of the root has no meaning), and the subtrees right below it.

    A subtree is a range of places; its node is the first. Siblings have equally many ranks below them, up to one, so
    none has much more to merge than the others. In a tree that is filled level by level, the first of 16 children of
    the root would have a third of 100,000 ranks below it.
    """
    above, subtree = 0, range(size)
    while True:
        rest = subtree[1:]
        num_children = min(len(rest), fan_out)
        below = [rest[len(rest) * i // num_children : len(rest) * (i + 1) // num_children] for i in range(num_children)]
        if subtree.start == place:
            return above, below
        above = subtree.start
        subtree = next(part for part in below if place in part)


def _packed(value: object, failure: BaseException | None) -> bytes:
    """Returns a message, whatever happens, because another rank waits for it.

    If ``value`` cannot be pickled, for lack of memory for example, the message has the error in its place.
    """
    try:
        return pickle.dumps((value, None if failure is None else sendable(failure)))
    except BaseException as error:
        return pickle.dumps((None, RankError(f"exchange of plans: {type(error).__name__}: {error}")))
