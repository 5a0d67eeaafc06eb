# SPDX-License-Identifier: Apache-2.0
"""Where ranks wait for one another before they make a group, and see who is missing.

Making a process group waits in C++ for ranks that do not come, in silence, until a timeout of 30 minutes. No liveness
monitor watches the ranks yet. So before a group is made, each rank says in the store of the job that it has come. While
ranks are missing, those that wait name them, and notice if the connection to one of them has ended.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from bytecheckpoint.distributed.answering_store import AnsweringStore
from bytecheckpoint.errors import CheckpointError, OutOfStepError, RankLostError
from bytecheckpoint.listing import listed
from bytecheckpoint.runtime.fork_locks import ForkSafeLock

__all__ = ["Meeting"]

_logger = logging.getLogger("bytecheckpoint")

# A counter of the store has one bit for each of so many ranks that have come. It is an int64.
_BITS = 62
_FIRST_PAUSE_S, _PAUSE_GROWS, _PAUSE_S = 0.0005, 1.3, 0.25
_LOOK_S = 1.0
# Many ranks ask one store, so each asks less often: this much time passes per rank.
_PAUSE_A_RANK_S, _LOOK_A_RANK_S = 0.0002, 0.005
# A rank whose connection has ended may still come: a collective that reached its timeout ends connections, too.
_GRACE_S = 5.0
# A store that many ranks ask at once may be slow.
_LEAST_ANSWER_S = 10.0

_lock = ForkSafeLock()
_here: set[str] = set()  # names of the meetings at which this process waits


class Meeting:
    """Waits on each rank until all ranks of a group have come. Collective over these ranks.

    Args:
        store: Store of the job.
        name: Name of the meeting, the same on all ranks. Names of meetings of the same ranks begin with ``ranks_name``.
        ranks_name: Name of the group of these ranks.
        ranks: Global ranks, by their numbers in the group.
        rank: Number of this rank in the group.
        call: What is being done, and its path, for errors.
        is_cut_off: Whether the connection of this process to a global rank has ended.
        is_over: Set by another thread if nobody wants the meeting any more: this rank then leaves it. None: never.
    """

    def __init__(
        self,
        store: Any,
        name: str,
        ranks_name: str,
        ranks: Sequence[int],
        rank: int,
        call: tuple[str, str],
        is_cut_off: Callable[[int], bool],
        is_over: threading.Event | None = None,
    ) -> None:
        self._store = store
        self._is_over = is_over or threading.Event()
        self._name, self._ranks_name = name, ranks_name
        self._ranks, self._rank = ranks, rank
        self._call = call
        self._is_cut_off = is_cut_off
        self._begin = time.monotonic()
        self._num_looks = 0
        self._suspects: dict[int, tuple[float, bytes]] = {}  # since when, and the last sign of life
        self._elsewhere: dict[int, tuple[float, str]] = {}  # since when a missing rank waits in which other call

    def wait(self, warn_after_s: float, limit_s: float) -> None:
        """Waits for the other ranks.

        Args:
            warn_after_s: After so many seconds a warning is logged that names the missing ranks; again after each
                doubling of the time. Ranks that wait for one another in different calls fail after that time, and so
                does each rank if the store does not answer for that time, or for 10 s if that is longer.
            limit_s: Missing ranks count as lost after so many seconds.

        Raises:
            RankLostError: A rank has ended, did not come in time, or the store cannot be reached.
            OutOfStepError: Other ranks wait for this one in another first call.
        """  # noqa: DOC501
        what, path = self._call
        answering = AnsweringStore(self._store, max(warn_after_s, _LEAST_ANSWER_S))
        self._store = answering
        try:
            with self._noted():
                if self._come() or self._all_come(warn_after_s, limit_s):
                    return
        except TimeoutError as error:
            raise RankLostError(
                f"{what}({path}): the store of the process group does not answer ({error}): the process that holds it, "
                "which is rank 0 or torchrun, has stopped, or its machine cannot be reached. Without the store no "
                "group can be made; end the job and start it again",
                path=path,
            ) from error
        except RuntimeError as error:
            if isinstance(error, CheckpointError):
                raise
            # Of the store: the process that held it has ended.
            raise RankLostError(
                f"{what}({path}): the store of the process group cannot be reached, because the process that held it "
                f"has ended ({error})",
                path=path,
            ) from error
        finally:
            answering.close()

    def _come(self) -> bool:
        """Says that this rank has come. Returns whether it is the last one."""
        self._beat()
        self._add(1)
        is_last = bool(self._store.add(self._key("count"), 1) >= len(self._ranks))
        if is_last:
            self._store.set(self._key("all"), "1")
        return is_last

    def _all_come(self, warn_after_s: float, limit_s: float) -> bool:
        size = len(self._ranks)
        pause, next_look, next_warning = _FIRST_PAUSE_S, _LOOK_S, warn_after_s
        while not self._store.check([self._key("all")]):
            if self._is_over.wait(pause) and self._leave():
                raise self._lost(self._missing(), "is not waited for any more")
            pause = min(pause * _PAUSE_GROWS, max(_PAUSE_S, size * _PAUSE_A_RANK_S))
            waited = time.monotonic() - self._begin
            if waited < next_look:
                continue
            next_look = waited + max(_LOOK_S, size * _LOOK_A_RANK_S)
            self._beat()
            missing = self._missing()
            self._refuse_lost(missing)
            self._refuse_other_calls(missing, warn_after_s)
            if waited >= limit_s:
                self._refuse_late(missing, waited)
            if waited >= next_warning:
                next_warning = 2 * waited
                _logger.warning("%s(%s): %s", *self._call, self._waits_for(missing, waited))
        return True

    def _key(self, kind: str, of: int | None = None) -> str:
        return f"{self._name}{kind}" if of is None else f"{self._name}{kind}/{of}"

    def _add(self, sign: int) -> None:
        word, bit = divmod(self._rank, _BITS)
        self._store.add(self._key("come", word), sign << bit)

    def _beat(self) -> None:
        """Gives a sign of life to those that see no connection to this rank."""
        self._num_looks += 1
        self._store.set(self._key("beat", self._rank), str(self._num_looks))

    def _missing(self) -> list[int]:
        size = len(self._ranks)
        words = [self._store.add(self._key("come", word), 0) for word in range((size + _BITS - 1) // _BITS)]
        return [rank for rank in range(size) if not words[rank // _BITS] >> rank % _BITS & 1]

    def _refuse_lost(self, missing: Sequence[int]) -> None:
        """Raises if the connection to a rank has ended, and nothing was heard of that rank since."""
        now, lost = time.monotonic(), []
        for rank, of_world in enumerate(self._ranks):
            if rank == self._rank or not self._is_cut_off(of_world):
                continue
            sign = b"" if rank in missing else self._store.get(self._key("beat", rank))
            since, known = self._suspects.setdefault(rank, (now, sign))
            if known != sign:
                self._suspects[rank] = (now, sign)
            elif now - since > max(_GRACE_S, 3 * len(self._ranks) * _LOOK_A_RANK_S):
                lost.append(rank)
        if lost:
            raise self._lost(lost, "died, or destroyed its process group: its connection has ended")

    def _refuse_late(self, missing: Sequence[int], waited: float) -> None:
        if missing and self._leave():
            raise self._lost(missing, f"has not come to this call within {waited:.0f} s")

    def _refuse_other_calls(self, missing: Sequence[int], patience_s: float) -> None:
        """Raises if a missing rank waits for this one in another first call, so that both would wait for ever."""
        now = time.monotonic()
        for rank in missing if now - self._begin >= patience_s else ():
            key = self._place_of(rank)
            at = self._store.get(key).decode() if self._store.check([key]) else ""
            name, _, call = at.partition("\n")
            if not name or name in _here:
                self._elsewhere.pop(rank, None)
                continue
            since, known = self._elsewhere.setdefault(rank, (now, name))
            if known != name:
                self._elsewhere[rank] = (now, name)
            elif now - since > _GRACE_S and self._leave():
                what, path = self._call
                raise OutOfStepError(
                    f"{what}({path}): the ranks are at different calls: rank {rank} waits in {call} for the ranks that "
                    "have not come there, such as this one. Each kind of call must first be made by all ranks, in the "
                    "same order",
                    path=path,
                )

    def _leave(self) -> bool:
        """Takes back that this rank has come. Returns False if that is too late, because all have come."""
        if self._store.add(self._key("count"), -1) >= len(self._ranks) - 1:
            self._store.add(self._key("count"), 1)
            return False
        self._add(-1)
        return True

    def _place_of(self, rank: int) -> str:
        return f"bytecheckpoint/{self._ranks_name}/waits/{rank}"

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Says in the store, for those that miss this rank in another meeting, where it waits."""
        place = self._place_of(self._rank)
        self._store.set(place, "{}\n{}({})".format(self._name, *self._call))
        with _lock:
            _here.add(self._name)
        try:
            yield
            self._store.set(place, "")  # not after a failure: ranks that wait for this one in another call see why
        finally:
            with _lock:
                _here.discard(self._name)

    def _waits_for(self, missing: Sequence[int], waited: float) -> str:
        texts = [f"rank {self._ranks[rank]}" for rank in missing]
        return (
            f"has waited {waited:.0f} s for {listed(texts)} of {len(self._ranks)} ranks to come to the same call. All "
            "ranks must make it; they make groups for it here"
        )

    def _lost(self, ranks: Sequence[int], text: str) -> RankLostError:
        what, path = self._call
        texts = listed([f"rank {rank} {text}" for rank in ranks])
        return RankLostError(f"{what}({path}): {texts}", dict.fromkeys(ranks, text), path)
