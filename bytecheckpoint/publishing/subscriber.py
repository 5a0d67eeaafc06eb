# SPDX-License-Identifier: Apache-2.0
"""``Subscriber``: ranks that serve take over the versions of weights that others publish."""

from __future__ import annotations

import logging
import os
import socket
import time
import uuid
from typing import Any

import torch.distributed as dist

from bytecheckpoint.config import Config
from bytecheckpoint.distributed.agreement import all_together, of_each
from bytecheckpoint.distributed.groups import own_group
from bytecheckpoint.errors import (
    CheckpointError,
    ConfigError,
    CorruptCheckpointError,
    OutOfStepError,
    RankLostError,
)
from bytecheckpoint.load_spec.spec import LoadSpec
from bytecheckpoint.publishing.deltas import read_delta
from bytecheckpoint.publishing.held_boxes import Held, held_in
from bytecheckpoint.publishing.published import Published, Standing, Versions
from bytecheckpoint.publishing.registrations import Registration, Registrations, check_subscriber
from bytecheckpoint.publishing.right import place_of, said_by_the_first
from bytecheckpoint.state_dicts import load_state_dict
from bytecheckpoint.storage.paths import below

__all__ = ["Subscriber"]

_WHAT = "update"
_MOST_TRIES = 10
_SAYS_AGAIN = 4  # times within the seconds after which it expires

_logger = logging.getLogger("bytecheckpoint")


class Subscriber:
    """Takes the versions of a ``Publisher`` into a state of any sharding, on the ranks that serve.

    One that stands at a version has bit for bit what was published as that version. It catches up by deltas, or takes a
    base, whichever is fewer bytes; all of the deltas are read and checked before the first is applied.

    A small file in the place says where it stands, so that the publisher keeps the deltas that it needs. It expires.

    Making it is local, ``update`` and ``close`` are collective. One thread may use it at a time. Between two updates
    nobody else may write to the tensors: what torch writes is noticed, other writes are not.

    Args:
        place: Folder or URL in which is published, shared by all ranks.
        name: Name of the subscriber, which no other one has: letters, digits, ``_``, ``.`` and ``-``. "" draws one.
        expires_s: Seconds after its last update for which the publisher keeps what it needs. The clocks of the storage
            and of the publisher are compared.
        registers: Whether to write that file; False needs no right to write there, but deltas may go before they are
            read: it then takes a base.
        process_group: Group of the ranks that serve; None takes the default group, if there is one.
        no_dist: Whether this process serves alone, whatever groups there are.
        config: Settings; None reads ``BYTECHECKPOINT_*`` variables.

    Raises:
        ConfigError: An argument is out of range.
    """

    def __init__(
        self,
        place: str | os.PathLike[str],
        *,
        name: str = "",
        expires_s: float = 3600.0,
        registers: bool = True,
        process_group: dist.ProcessGroup | None = None,
        no_dist: bool = False,
        config: Config | None = None,
    ) -> None:
        if isinstance(expires_s, bool) or not isinstance(expires_s, int | float) or not expires_s > 0:
            raise ConfigError(f"Subscriber(expires_s={expires_s!r}): must be a number of seconds > 0")
        self._place = place_of(place)
        self._name = check_subscriber(name or f"{socket.gethostname()[:40]}-{os.getpid()}-{uuid.uuid4().hex[:8]}")
        self._expires_s, self._registers = float(expires_s), registers
        self._process_group, self._no_dist = process_group, no_dist
        self._config = config or Config.from_env()
        self._versions = Versions(self._place, self._config)
        self._at: Standing | None = None  # None: the tensors are of no version
        self._taken: Published | None = None  # what it was that brought them there
        self._memory: tuple[object, ...] = ()  # what tells the tensors that have it
        self._damaged: set[str] = set()  # names of what this update has found damaged
        self._said: tuple[Registration, float] | None = None
        self._is_warned = False  # that it is not registered

    @property
    def version(self) -> int | None:
        """The version that the tensors have; None before the first update, and after one that broke off within."""
        return None if self._at is None else self._at.version

    @property
    def save_id(self) -> str:
        """Id of the save that published this version, as ``PublishReport.save_id``; "" without one.

        Of a version that is there as delta and as base, it is that of the one that was taken last.
        """
        return "" if self._at is None or self._taken is None else self._taken.save_id

    @property
    def user_metadata(self) -> Any:
        """What was passed to ``publish`` for this version; None if nothing was, or without a version."""
        return None if self._at is None or self._taken is None else self._taken.user_metadata

    def update(self, state: dict[str, Any]) -> int | None:
        """Brings a state to the newest version, in place. Collective; all ranks come to the same version.

        Args:
            state: Nested dicts and lists, with all or some of the keys that are published, in the same shapes and
                dtypes. Tensors are filled, on whatever device; other values are replaced. With other tensors than at
                the update before, or if torch has written to them since, it takes a base.

        Returns:
            The new version; None if there is no newer one, and the state is as it was.

        Raises:
            CorruptCheckpointError: What leads to the newest version is damaged, and no base or other delta leads to one
                that is newer than that of the state.
            KeyMismatchError: The state has a key that is not published.
            ShapeMismatchError: A tensor is of another shape.
            ConfigError: A tensor is of another dtype, or is made by a ``Stateful`` of the state.
            UnsupportedError: A tensor cannot be filled so.
            CheckpointError: The load failed; see ``load_state_dict``. If ``version`` is None then, the tensors are of
                no version, and the next update takes a base.
        """
        call = (_WHAT, str(self._place))
        group = own_group(
            self._process_group, self._no_dist, "calls", self._config.stall_timeout_s, ("load", str(self._place))
        )
        held = all_together(group, *call, lambda: held_in(call, state, is_filled=True))
        if held.memory != self._memory:
            self._at = None
        self._damaged.clear()  # storage may have read wrongly once
        try:
            return self._updated(group, call, held, state)
        finally:
            self._memory = held.memory  # as it was left

    def _updated(
        self, group: dist.ProcessGroup | None, call: tuple[str, str], held: Held, state: dict[str, Any]
    ) -> int | None:
        began = self._agreed(group, call)
        failure: CheckpointError | None = None
        for _ in range(_MOST_TRIES):
            at = self._agreed(group, call)
            steps = said_by_the_first(group, call, lambda at=at: self._way(at))  # type: ignore[misc]
            if steps is None:
                failure = failure or said_by_the_first(group, call, lambda at=at: self._versions.damage_after(at))  # type: ignore[misc]
                if failure is not None and at in (began, None):
                    raise failure
                return None if at == began else self.version
            failure = self._tried(group, call, held, state, steps)
            if failure is None:
                said_by_the_first(group, call, lambda: self._say(None))
                return self.version
        assert failure is not None
        raise failure

    def close(self) -> None:
        """Says that this subscriber needs nothing any more. Call it on each rank; the lowest one does it."""
        said, self._said = self._said, None
        if said is None:
            return
        try:
            Registrations(self._place).remove(self._name)
        except CheckpointError as error:
            _logger.warning("Subscriber(%s): it expires in %g s: %s", self._place, self._expires_s, str(error))

    def _agreed(self, group: dist.ProcessGroup | None, call: tuple[str, str]) -> Standing | None:
        """Returns where all ranks stand; None if they do not stand at one version. Collective."""
        if group is None or group.size() == 1:
            return self._at
        return self._at if len({*of_each(group, *call, self._at)}) == 1 else None

    def _way(self, at: Standing | None) -> list[Published] | None:
        """Returns what to take, and registers that. On the lowest rank."""
        steps = self._versions.way(at, self._damaged)
        first = None if steps is None else steps[0]
        self._say(first.version if first is not None and first.builds_on is None else None)
        return steps

    def _say(self, reads: int | None) -> None:
        """Registers, unless it has said the same a short while ago. What fails is said once in the log."""
        if not self._registers:
            return
        registration = Registration(self.version, reads, self._expires_s)
        if self._said is not None:
            said, when = self._said
            if said == registration and time.monotonic() - when < self._expires_s / _SAYS_AGAIN:
                return
        if self._said is None and self._versions.newest() is None:
            return  # the place may not be there yet
        try:
            Registrations(self._place).write(self._name, registration)
            self._said = registration, time.monotonic()
        except CheckpointError as error:
            if not self._is_warned:
                _logger.warning(
                    "Subscriber(%s): it is not registered, so deltas that it needs may be removed: %s",
                    self._place,
                    str(error),
                )
            self._is_warned = True  # it tries again at the next update

    def _tried(
        self,
        group: dist.ProcessGroup | None,
        call: tuple[str, str],
        held: Held,
        state: dict[str, Any],
        steps: list[Published],
    ) -> CheckpointError | None:
        """Takes steps; returns why that failed if another way may lead on. Collective.

        Raises:
            CheckpointError: It failed, and no other way is better.
            OutOfStepError: See ``load_state_dict``.
            RankLostError: See ``load_state_dict``.
        """
        reading = [steps[0]]  # which is under way
        try:
            self._take(group, call, held, state, steps, reading)
            return None
        except (RankLostError, OutOfStepError):
            raise
        except CorruptCheckpointError as error:
            _logger.warning("%s(%s): %s is damaged: %s", *call, reading[0].name, str(error))
            self._damaged.add(reading[0].name)
            return error
        except CheckpointError as error:
            step = reading[0]
            if not said_by_the_first(group, call, lambda: self._versions.is_gone(step)):
                raise
            return error  # it was removed meanwhile, since there is something newer

    def _take(
        self,
        group: dist.ProcessGroup | None,
        call: tuple[str, str],
        held: Held,
        state: dict[str, Any],
        steps: list[Published],
        reading: list[Published],
    ) -> None:
        read = []
        for step in steps:
            reading[0] = step
            path = below(self._place, step.name)
            if step.builds_on is None:
                self._at = None
                load_state_dict(
                    path,
                    state,
                    process_group=self._process_group,
                    no_dist=self._no_dist,
                    spec=LoadSpec(strict="model"),
                    config=self._config,
                )
                self._at, self._taken = step.standing, step
            else:
                read.append(read_delta(path, held, group, self._process_group, self._no_dist, self._config))
        if not read:
            return
        self._at = None  # until all is applied

        def apply() -> None:
            for delta in read:
                delta.apply(self._config.staging_threads)
                for fqn, value in delta.objects.items():
                    held.put(state, fqn, value)

        all_together(group, *call, apply)
        self._at, self._taken = steps[-1].standing, steps[-1]
