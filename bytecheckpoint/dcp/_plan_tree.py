# SPDX-License-Identifier: Apache-2.0
"""Plans up and down a tree of ranks.

DCP gathers what all ranks say at one of them. Here each inner node joins what the nodes below it hold, so that what
replicas share goes up once, and no rank hears more than a few others.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from bytecheckpoint import _C
from bytecheckpoint.dcp._held_interrupt import HeldInterrupt
from bytecheckpoint.dcp._peers import Channel, Peers
from bytecheckpoint.dcp._plan_cache import Answer
from bytecheckpoint.errors import CheckpointError, RankError, sendable

if TYPE_CHECKING:
    Plan = Callable[[list[bytes]], list[Answer]]

__all__ = ["PlanTree"]


class PlanTree:
    """A k-ary tree over the ranks of a call, the coordinator at its root.

    Every rank takes part to the end, whatever has failed, and carries its error up; the root sends the first one down
    to all. So an error anywhere is raised everywhere, and no rank is left waiting.
    """

    def __init__(self, channel: Channel, peers: Peers, fan_out: int) -> None:
        self._channel = channel
        self._peers = peers
        self._fan_out = fan_out
        self._place = (peers.rank - peers.coordinator) % peers.size

    def exchange(self, held: bytes, plan: Plan | None) -> Answer:
        """Collective.

        Args:
            held: What this rank holds: ``LocalState.blob``.
            plan: At the root: makes the answers of all ranks, given what the nodes right below hand up.

        Returns:
            What this rank is told to write.

        Raises:
            Exception: Whatever was raised first on any rank, on all of them.
            CheckpointError: A rank has died, or was not heard of within the timeout of the group.
        """
        with HeldInterrupt():
            below, failure = self._take_from_below()
            answers: dict[int, Answer] = {}
            if plan is None:
                self._hand_up(held, below, failure)
                answers, failure = self._await_answers()
            elif failure is None:
                try:
                    answers = dict(enumerate(plan(below)))
                except BaseException as error:
                    failure = error
            self._hand_down(answers, failure)
            if failure is not None:
                raise failure
        return answers[self._peers.rank]

    def _take_from_below(self) -> tuple[list[bytes], BaseException | None]:
        """From every node below, also when one has failed: the others would wait for somebody to listen."""
        below: list[bytes] = []
        failure: BaseException | None = None
        for child in self._below(self._place):
            try:
                held, error = pickle.loads(self._receive(child))
            except BaseException as of_channel:
                held, error = b"", of_channel
            below.append(held)
            failure = error if failure is None else failure
        return below, failure

    def _hand_up(self, held: bytes, below: list[bytes], failure: BaseException | None) -> None:
        merged = b""
        if failure is None:
            try:
                merged = _C.merge_below(held, self._peers.rank, below)
            except BaseException as error:
                failure = error
        message = _packed(merged, failure)
        with contextlib.suppress(CheckpointError):  # nothing will be received from there either, and that is told
            self._send(message, self._above())

    def _await_answers(self) -> tuple[dict[int, Answer], BaseException | None]:
        try:
            answers, failure = pickle.loads(self._receive(self._above()))
        except BaseException as error:
            return {}, error
        return answers, failure

    def _hand_down(self, answers: dict[int, Answer], failure: BaseException | None) -> None:
        for child in self._below(self._place):
            ranks = () if failure is not None else map(self._rank_at, self._subtree(child))
            with contextlib.suppress(CheckpointError):  # DCP, which waits for all ranks, will find out
                self._send(_packed({rank: answers[rank] for rank in ranks}, failure), child)

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
            f"plans are exchanged: rank {self._peers.rank} has lost rank {self._rank_at(place)}: {error}"
        )

    def _above(self) -> int:
        return (self._place - 1) // self._fan_out

    def _below(self, place: int) -> range:
        first = place * self._fan_out + 1
        return range(min(first, self._peers.size), min(first + self._fan_out, self._peers.size))

    def _subtree(self, place: int) -> Iterator[int]:
        """All places at and below one."""
        yield place
        for child in self._below(place):
            yield from self._subtree(child)

    def _rank_at(self, place: int) -> int:
        return (place + self._peers.coordinator) % self._peers.size


def _packed(value: object, failure: BaseException | None) -> bytes:
    """A message, whatever happens: somebody waits for it. Without ``value`` if there is no memory for it."""
    try:
        return pickle.dumps((value, None if failure is None else sendable(failure)))
    except BaseException as error:
        return pickle.dumps((None, RankError(f"plans are exchanged: {type(error).__name__}: {error}")))
