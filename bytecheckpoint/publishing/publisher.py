# SPDX-License-Identifier: Apache-2.0
"""``Publisher``: ranks that train hand versions of their weights to those that serve."""

from __future__ import annotations

import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch.distributed as dist

from bytecheckpoint.config import Config
from bytecheckpoint.distributed.agreement import agree, all_together, held_first, of_each
from bytecheckpoint.distributed.groups import own_group
from bytecheckpoint.errors import (
    CheckpointBusyError,
    CheckpointError,
    CheckpointExistsError,
    ConfigError,
    OutOfStepError,
    RankLostError,
    StagingFullError,
)
from bytecheckpoint.publishing.held_boxes import OBJECT, VERSION, Held, held_in
from bytecheckpoint.publishing.kept_copy import Delta, KeptCopy, why_too_large
from bytecheckpoint.publishing.pruning import prune
from bytecheckpoint.publishing.published import BASE, DELTA, MOST_VERSION, Standing, Versions, folder_name, noted
from bytecheckpoint.publishing.right import Right, place_of, said_by_the_first
from bytecheckpoint.report import SaveReport
from bytecheckpoint.report.text import size_text
from bytecheckpoint.state_dicts import save_state_dict
from bytecheckpoint.storage.paths import below

__all__ = ["PublishReport", "Publisher"]

T = TypeVar("T")

_WHAT = "publish"

_logger = logging.getLogger("bytecheckpoint")


@dataclass(frozen=True, kw_only=True)
class PublishReport:
    """What a publication did.

    Attributes:
        version: The version.
        kind: ``base``: all tensors. ``delta``: the elements that have changed. ``delta and base``: both, since a base
            was due; who has the version before takes the delta.
        reason: Why there is a base and no delta; "" if there is a delta.
        num_changed: Number of elements that have changed on this rank; 0 without a delta.
        delta_bytes: Bytes of positions and values of all ranks; 0 without a delta.
        base_bytes: Bytes of all tensors that are published, of all ranks.
        copy_bytes: Bytes of host memory that this rank keeps, of what it published last.
        find_s: Seconds that this rank took to find changes.
        total_s: Seconds of the call on this rank.
        removed: Names of the folders of old versions that were removed; on the coordinator.
        saves: Reports of the saves: of the delta, of the base, or of both in this order.
    """

    version: int
    kind: str
    reason: str = ""
    num_changed: int = 0
    delta_bytes: int = 0
    base_bytes: int = 0
    copy_bytes: int = 0
    find_s: float = 0.0
    total_s: float = 0.0
    removed: tuple[str, ...] = ()
    saves: tuple[SaveReport, ...] = ()

    @property
    def save_id(self) -> str:
        """Id of the save that committed the version, 32 hex digits; "" on other ranks than the coordinator."""
        return self.saves[0].save_id


class Publisher:
    """Publishes versions of a state in a place, from the ranks that train: whole bases, and exact deltas between them.

    A delta has the elements whose bits differ from those of the version before. Each is a checkpoint of its own,
    ``base-000000000010`` or ``delta-000000000011``, committed all or nothing, with a checksum for each block. A base
    can be loaded like any other checkpoint; ``Subscriber`` takes both.

    The first version of each publisher is a base, so is one whose keys, shapes, dtypes or sharding differ from those of
    the version before, and one of which a delta would be larger.

    Each rank keeps a copy in host memory of what it publishes: as many bytes as its boxes, of which a replica is
    published, and kept, by one rank alone. ``base_every=1`` publishes bases alone, without a copy.

    Making it is local, ``publish`` is collective. One thread may use it at a time.

    Args:
        place: Folder, created if absent, or URL, shared by all ranks and by the subscribers; for nothing else. Of
            ``Tiers``, the nearest place; memory is for subscribers on the same machine.
        base_every: Every how many versions there is a base, too: who begins to subscribe reads it and the deltas behind
            it.
        keep_versions: How many of the newest versions are never removed. Beyond that, a delta goes when a newer base is
            there, and no registered subscriber stands before it.
        process_group: Group of the ranks that publish; None takes the default group, if there is one.
        no_dist: Whether this process publishes alone, whatever groups there are.
        config: Settings; None reads ``BYTECHECKPOINT_*`` variables. ``staging_threads`` threads look for changes.

    Raises:
        ConfigError: An argument is out of range.
    """

    def __init__(
        self,
        place: str | os.PathLike[str],
        *,
        base_every: int = 10,
        keep_versions: int = 10,
        process_group: dist.ProcessGroup | None = None,
        no_dist: bool = False,
        config: Config | None = None,
    ) -> None:
        for name, value in (("base_every", base_every), ("keep_versions", keep_versions)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"Publisher({name}={value!r}): must be an int >= 1")
        self._place = place_of(place)
        self._base_every, self._keep_versions = base_every, keep_versions
        self._process_group, self._no_dist = process_group, no_dist
        self._config = config or Config.from_env()
        self._versions = Versions(self._place, self._config)
        self._id = uuid.uuid4().hex  # that of the lowest rank counts
        self._last: Standing | None = None
        self._since_base = 0
        self._gone: set[str] = set()  # names that were removed
        self._layout: tuple[object, ...] = ()
        self._copy: KeptCopy | None = None

    @property
    def version(self) -> int | None:
        """The version that was published last by this publisher; None if it has published none."""
        return None if self._last is None else self._last.version

    def publish(self, state: Mapping[str, Any], version: int, *, user_metadata: Any = None) -> PublishReport:
        """Publishes a version. Collective.

        It is there for subscribers when the call returns. If the call fails, or a rank dies, the version before stays
        the newest, and the next call may publish the same number. Nobody may change the state during the call.

        Args:
            state: Nested dicts and lists of tensors and objects, with any sharding, on any device. Objects are
                published whole with each version. Tensors of a device are copied to the host first, one at a time.
            version: Number of the version, larger than those before.
            user_metadata: Any JSON-serialisable values, the same on all ranks.

        Returns:
            A report; on other ranks than the coordinator about that rank.

        Raises:
            CheckpointBusyError: Another publisher is publishing here, or has published since this one did. Two of them
                would each undo the work of the other.
            ConfigError: The version is not larger than the newest one, or ranks pass different ones.
            StagingFullError: The machine has no room for the copy of what is published; nothing was published.
            UnsupportedError: A tensor of the state cannot be published.
            CheckpointError: The save failed; see ``save_state_dict``.
        """
        begin = time.perf_counter()
        call = (_WHAT, str(self._place))
        group = own_group(
            self._process_group, self._no_dist, "calls", self._config.stall_timeout_s, ("save", str(self._place))
        )
        agree(group, *call, {"version": version, "base_every": self._base_every}, _fault_of(call, version))
        held = all_together(group, *call, lambda: held_in(call, state))
        right = Right(self._place, self._config)
        try:
            begun = said_by_the_first(group, call, lambda: self._begin(right, call, version))
            report = self._published(group, call, held, version, user_metadata, begun)
            removed = said_by_the_first(group, call, self._prune)
        finally:
            right.give_back()
        return replace(report, removed=tuple(removed), total_s=time.perf_counter() - begin)

    def _begin(self, right: Right, call: tuple[str, str], version: int) -> tuple[str, str, bool]:
        """Takes the right to publish, and looks whether anybody else has published. On the lowest rank.

        Returns:
            Why there must be a base, the id of this publisher, and whether a base is due behind a delta. A save may
            fail on one rank alone, so ranks do not count by themselves.

        Raises:
            CheckpointBusyError: Another publisher is publishing, or has published.
            ConfigError: The version is not larger than the newest one.
        """
        right.take(self._id)
        newest = self._versions.newest()
        other = None if self._last is None else self._versions.other_publisher(self._last.publisher)
        if self._last is not None and other is not None:
            raise CheckpointBusyError(
                f"{call[0]}({call[1]}): version {other.version} is of another publisher, {other.publisher}: it has "
                f"published since this one, {self._last.publisher}, published version {self._last.version}. Only one "
                "job may publish in a place: end the other one, and make a new Publisher",
                call[1],
            )
        if newest is not None and version <= newest.version:
            raise ConfigError(
                f"{call[0]}({call[1]}): version {version} is not larger than {newest.version}, the newest there; "
                "versions must rise",
                call[1],
            )
        is_due = self._since_base + 1 >= self._base_every
        if self._last is None:
            return "it is the first of this publisher", self._id, is_due
        why = ""
        if newest is None or newest.standing != self._last:
            why = f"version {self._last.version}, published last, is not the newest there"
        return why, self._last.publisher, is_due

    def _published(
        self,
        group: dist.ProcessGroup | None,
        call: tuple[str, str],
        held: Held,
        version: int,
        user_metadata: Any,
        begun: tuple[str, str, bool],
    ) -> PublishReport:
        why_base, publisher, is_due = begun
        now = Standing(version, publisher)
        begin = time.perf_counter()
        why_base, delta = self._found(group, call, held, why_base)
        find_s = time.perf_counter() - begin
        saves: list[SaveReport] = []
        sizes = self._sizes(group, call, held, delta, why_base)
        if delta is not None and not why_base and sizes[0] >= max(sizes[1], 1):
            why_base = f"a delta would take {size_text(sizes[0])}, and a base {size_text(sizes[1])}"
        if delta is not None and not why_base:
            assert self._last is not None
            changes = {
                **delta.tensors,
                **{OBJECT + fqn: value for fqn, value in held.objects.items()},
                VERSION: now.version,
            }
            saves.append(self._saved(DELTA, changes, now, self._last.version, user_metadata, call))
            self._keep(group, call, now, lambda copy: copy.apply(delta, self._config.staging_threads))
            self._since_base += 1
            if is_due:
                self._add_base(held.state, now, user_metadata, call, saves)
        else:
            self._make_room(group, call, held)
            saves.append(self._saved(BASE, held.state, now, None, user_metadata, call))
            self._layout, self._since_base = held.layout, 0
            self._keep(group, call, now, lambda copy: copy.take(held.boxes))
        kinds = [DELTA] * (not why_base) + [BASE] * (self._since_base == 0)
        return PublishReport(
            version=version,
            kind=" and ".join(kinds),
            reason=why_base,
            num_changed=0 if delta is None or why_base else delta.num_elements,
            delta_bytes=0 if why_base else sizes[0],
            base_bytes=sizes[1],
            copy_bytes=0 if self._copy is None else self._copy.num_bytes,
            find_s=find_s,
            saves=tuple(saves),
        )

    def _found(
        self, group: dist.ProcessGroup | None, call: tuple[str, str], held: Held, why_base: str
    ) -> tuple[str, Delta | None]:
        """Returns why there must be a base, the same on all ranks, and the changes of this rank if there need not."""
        if not why_base:
            if self._base_every == 1:
                why_base = "base_every=1"
            elif self._copy is None:
                why_base = "the copy of what was published last was lost"
            elif self._layout != held.layout:
                why_base = "keys, shapes, dtypes or sharding have changed"
        of_ranks = _of_ranks(group, call, (why_base, self._last))
        why_base = next((why for why, _ in of_ranks if why), "")
        if not why_base and len({last for _, last in of_ranks}) > 1:
            why_base = "a rank did not come to the end of the version published last"  # its copy is older
        if why_base:
            return why_base, None
        copy = self._copy
        assert copy is not None
        delta = all_together(group, *call, lambda: copy.find(held.boxes, self._config.staging_threads))
        too_many = "" if delta is not None else "a delta would take more bytes than the boxes of a rank"
        return next(filter(None, _of_ranks(group, call, too_many)), ""), delta

    def _sizes(
        self, group: dist.ProcessGroup | None, call: tuple[str, str], held: Held, delta: Delta | None, why_base: str
    ) -> tuple[int, int]:
        """Returns the bytes of the delta and of a base, of all ranks."""
        copy = self._copy
        is_known = copy is not None and self._layout == held.layout
        own = (
            delta.num_bytes if delta is not None and not why_base else 0,
            copy.num_bytes if copy is not None and is_known else sum(box.num_bytes for box in held.boxes),
        )
        of_ranks = _of_ranks(group, call, own)
        return sum(each[0] for each in of_ranks), sum(each[1] for each in of_ranks)

    def _make_room(self, group: dist.ProcessGroup | None, call: tuple[str, str], held: Held) -> None:
        """Makes the copy for a new layout, empty. It is refused before anything is written if there is no room.

        Raises:
            StagingFullError: There is none.
        """
        is_known = self._base_every == 1 or (self._copy is not None and self._layout == held.layout)
        if all(_of_ranks(group, call, is_known)):
            return
        self._copy, self._layout = None, ()  # the new copy has nothing of the last version: deltas wait for a base
        published = held_first(group, *call, [box.key for box in held.boxes])
        own = sum(box.num_bytes for box in held.boxes if box.key in published)
        here = socket.gethostname()
        on_host = sum(size for host, size in _of_ranks(group, call, (here, own)) if host == here)

        def make() -> KeptCopy:
            why = why_too_large(own, here, on_host)
            if why:
                raise StagingFullError(f"{call[0]}({call[1]}): {why}", call[1])
            return KeptCopy(held.boxes, published)

        self._copy = all_together(group, *call, make)
        _logger.info("Publisher(%s): the copy of what was published takes %s here", call[1], size_text(own))

    def _keep(
        self,
        group: dist.ProcessGroup | None,
        call: tuple[str, str],
        now: Standing,
        change: Callable[[KeptCopy], None],
    ) -> None:
        """Notes that ``now`` is published, and brings the copy there. It is lost if that does not come to its end.

        All ranks hear of that: otherwise they would wait for this one.
        """
        copy, self._copy, self._last = self._copy, None, now
        all_together(group, *call, lambda: None if copy is None else change(copy))
        self._copy = copy

    def _add_base(
        self,
        state: Mapping[str, Any],
        now: Standing,
        user_metadata: Any,
        call: tuple[str, str],
        saves: list[SaveReport],
    ) -> None:
        """Publishes a base of a version whose delta is published. If that fails, the next version gets one."""
        try:
            saves.append(self._saved(BASE, state, now, None, user_metadata, call))
        except (RankLostError, OutOfStepError):
            raise
        except CheckpointError as error:
            _logger.warning("%s(%s): version %s has no base: %s", *call, now.version, str(error))
        else:
            self._since_base = 0

    def _saved(
        self,
        kind: str,
        state: Mapping[str, Any],
        now: Standing,
        builds_on: int | None,
        user_metadata: Any,
        call: tuple[str, str],
    ) -> SaveReport:
        try:
            return save_state_dict(
                below(self._place, folder_name(kind, now.version)),
                state,
                process_group=self._process_group,
                no_dist=self._no_dist,
                overwrite=False,
                user_metadata=noted(now, builds_on, user_metadata),
                config=self._config,
            )
        except CheckpointExistsError as error:
            raise CheckpointBusyError(
                f"{call[0]}({call[1]}): another publisher has published version {now.version} meanwhile: {error}",
                call[1],
            ) from error

    def _prune(self) -> list[str]:
        """Removes old versions. On the lowest rank; what fails is said in the log, for the version is published."""
        try:
            return prune(self._place, self._versions, self._keep_versions, self._config, self._gone)
        except CheckpointError as error:
            _logger.warning("%s(%s): old versions are not removed: %s", _WHAT, self._place, str(error))
            return []


def _fault_of(call: tuple[str, str], version: object) -> ConfigError | None:
    if isinstance(version, int) and not isinstance(version, bool) and 0 <= version <= MOST_VERSION:
        return None
    return ConfigError(f"{call[0]}({call[1]}): version={version!r}: must be an int from 0 to {MOST_VERSION}", call[1])


def _of_ranks(group: dist.ProcessGroup | None, call: tuple[str, str], value: T) -> list[T]:
    return [value] if group is None or group.size() == 1 else of_each(group, *call, value)
