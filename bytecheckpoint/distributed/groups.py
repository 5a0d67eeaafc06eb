# SPDX-License-Identifier: Apache-2.0
"""Process groups with a liveness monitor, and calls over them."""

from __future__ import annotations

import re
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import TracebackType
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from bytecheckpoint.compat import private_names as _compat
from bytecheckpoint.config import Config
from bytecheckpoint.distributed.call_order import take_back_turn
from bytecheckpoint.distributed.channel import next_name, unused_name
from bytecheckpoint.distributed.launch import refuse_unaware_rank
from bytecheckpoint.distributed.links import connect_star
from bytecheckpoint.distributed.liveness import LivenessMonitor
from bytecheckpoint.distributed.liveness_frames import LossReason
from bytecheckpoint.distributed.meeting import Meeting
from bytecheckpoint.distributed.mixed_calls import CallKind
from bytecheckpoint.distributed.sent_data import SentData, own_sockets, plain_address
from bytecheckpoint.errors import CheckpointError, ConfigError, OutOfStepError
from bytecheckpoint.probes.of_torch import GROUPS
from bytecheckpoint.probes.probe import require
from bytecheckpoint.runtime.fork_locks import ForkSafeLock
from bytecheckpoint.runtime.place import name_own_address

__all__ = [
    "between_ranks",
    "calling",
    "destroy_own_groups",
    "exchanging",
    "group_of_save",
    "keep_watching",
    "monitor_of",
    "own_group",
    "ranks_of",
    "watched_group",
]

# How long a failed call waits for the liveness monitor, which hears of a loss from other ranks, and maybe after gloo.
_TOLD_WITHIN_S = 5.0
_LOOK_S = 0.1
_FAREWELL_S = 5.0
_LEFT_WITHIN_S = 2.0
# Functions in which ranks wait for one another. An error in them that DCP does not hand to all ranks leaves the others
# waiting.
_EXCHANGES = ("_save_state_dict", "_load_state_dict", "between_ranks")

# As in: Read error [::ffff:10.0.0.1]:4242: Connection timed out
_GLOO_ADDRESS = re.compile(r"\[([0-9a-fA-F:.]+)\]:\d+")

T = TypeVar("T")

_lock = ForkSafeLock()
_monitors: weakref.WeakKeyDictionary[dist.ProcessGroup, LivenessMonitor] = weakref.WeakKeyDictionary()
_own: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, dist.ProcessGroup]] = weakref.WeakKeyDictionary()
# Global ranks of the groups that are made here, because torch does not know these groups.
_ranks: weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[int, ...]] = weakref.WeakKeyDictionary()


def watched_group(ranks: Sequence[int] | None, stall_timeout_s: float) -> dist.ProcessGroup:
    """Makes a gloo group of ``ranks`` with a liveness monitor. Collective over these ranks alone.

    Args:
        ranks: Global ranks; None for all.
        stall_timeout_s: See ``Config.stall_timeout_s``.

    Raises:
        CheckpointError: Ranks cannot connect; raised on all of them.
        ConfigError: There is no default group.
        UnsupportedError: This torch lacks something that groups rely on.
    """
    require(GROUPS)
    world = dist.group.WORLD
    if world is None:
        raise ConfigError("new_group: there is no default process group; call init_process_group first")
    members = sorted(range(world.size()) if ranks is None else ranks)
    use = "of all" if ranks is None else f"of {members}"
    call = ("new_group", "all ranks" if ranks is None else str(members))
    _meet(world, use, members, stall_timeout_s, call)
    name = unused_name(world, use)
    sockets = own_sockets()
    made: Any = dist.new_group(backend="gloo") if ranks is None else _compat.new_gloo_group(members, name)
    group: dist.ProcessGroup = made
    _begin_monitor(group, group, SentData.since(sockets), stall_timeout_s)
    return group


def _begin_monitor(group: dist.ProcessGroup, parent: dist.ProcessGroup, sent: SentData, stall_timeout_s: float) -> None:
    """Starts the liveness monitor of ``group``, which ends with ``parent``. Raises what ``watched_group`` does."""
    if group.size() > 1:
        address = sent.own_address()
        if address:
            name_own_address(address)
        monitor = LivenessMonitor(group, parent, *connect_star(group), sent, stall_timeout_s)
        with _lock:
            _monitors[group] = monitor


def _group_within(
    parent: dist.ProcessGroup, use: str, stall_timeout_s: float, call: tuple[str, str], is_over: threading.Event
) -> dist.ProcessGroup:
    """Makes a group of the ranks of ``parent``. It has a liveness monitor if they can connect; else it warns.

    Once ``is_over`` is set, it waits no longer for ranks that have not come.
    """
    members = dist.get_process_group_ranks(parent)
    _meet(parent, use, members, stall_timeout_s, call, is_over)
    sockets = own_sockets()
    group = _compat.gloo_between(parent, unused_name(parent, use))
    with _lock:
        _ranks[group] = tuple(members)
    try:
        _begin_monitor(group, parent, SentData.since(sockets), stall_timeout_s)
    except CheckpointError as error:  # on all ranks
        warnings.warn(
            f"bytecheckpoint: {error}; the loss of a rank will be noticed at the timeout of the process group",
            RuntimeWarning,
            stacklevel=2,
        )
    return group


def _meet(
    parent: dist.ProcessGroup,
    use: str,
    members: Sequence[int],
    stall_timeout_s: float,
    call: tuple[str, str],
    is_over: threading.Event | None = None,
) -> None:
    """Waits until all ``members``, global ranks of ``parent``, have come to make a group. See ``Meeting``."""
    if len(members) < 2:
        return
    # The liveness monitor of a group tells of its ranks, and closes its connections when one is lost.
    gloo = [
        (group, dist.get_process_group_ranks(group))
        for group in (parent, dist.group.WORLD)
        if group is not None and monitor_of(group) is None and _compat.is_gloo_on_host(group)
    ]

    def is_cut_off(rank: int) -> bool:
        return any(_compat.has_lost(group, ranks.index(rank)) for group, ranks in gloo[:1])

    name, rank = next_name(parent, use), members.index(dist.get_rank())
    meeting = Meeting(_compat.default_store(), name, parent.group_name, members, rank, call, is_cut_off, is_over)
    meeting.wait(stall_timeout_s, dist.distributed_c10d.default_pg_timeout.total_seconds())


def monitor_of(group: dist.ProcessGroup | None) -> LivenessMonitor | None:
    """Returns the liveness monitor of ``group``; None if it has none."""
    if group is None:
        return None
    with _lock:
        return _monitors.get(group)


def ranks_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    """Returns the global ranks of ``group``, by their numbers in it."""
    with _lock:
        known = _ranks.get(group)
    return tuple(dist.get_process_group_ranks(group)) if known is None else known


def keep_watching(group: dist.ProcessGroup | None, save: Future[Any]) -> None:
    """Keeps the liveness monitor of ``group`` until the background ``save`` ends, even if the group is destroyed."""
    monitor = monitor_of(group)
    if monitor is not None:
        monitor.keep()
        save.add_done_callback(lambda _: monitor.let_go())


def own_group(
    group: dist.ProcessGroup | None, no_dist: bool, use: str, stall_timeout_s: float, call: tuple[str, str]
) -> dist.ProcessGroup | None:
    """Returns a group of the ranks of ``group`` for one ``use`` alone, with which messages of other uses cannot mix.

    It has a liveness monitor. Collective the first time for each group and use, and again after a call that lost a
    rank. No monitor watches the ranks while they make their very first group; see ``Meeting`` for how they wait then.

    Args:
        group: None for the default group.
        no_dist: Whether this rank calls alone.
        use: Names what the group is for.
        stall_timeout_s: See ``Config.stall_timeout_s``.
        call: What is being done, and its path, for errors.

    Returns:
        The group; None if this rank calls alone, or if there is no process group.

    Raises:
        RankLostError: A rank was lost while ranks made the group.
        OutOfStepError: Ranks wait for one another in different first calls.
        ConfigError: ``group`` was destroyed. Or there is no process group, a launcher has started several ranks, and
            this one would save as if it were alone.
        UnsupportedError: This torch lacks something that groups rely on.
    """
    if no_dist:
        return None
    has_groups = dist.is_available() and dist.is_initialized()
    if has_groups:
        require(GROUPS)
    if group is not None and not _compat.is_registered(group):
        raise ConfigError(f"{call[0]}({call[1]}): process_group was destroyed before the call")
    if not has_groups:
        if call[0] == "save":
            refuse_unaware_rank(*call)
        return None
    parent = group or dist.group.WORLD
    assert parent is not None
    if _compat.is_fake(parent):
        return parent
    given = monitor_of(parent)
    if given is not None:
        if use == "calls":
            return parent
        stall_timeout_s = given.stall_timeout_s
    with _lock:
        others = dict(_own.get(parent, {}))
    own = others.pop(use, None)
    monitor = monitor_of(own)
    # A loss makes one call fail on each rank, also on a rank that was in no call when it happened, or that is itself
    # the rank that stopped. Only calls after that one make a new group, for which a rank that stopped must be heard
    # again. If a rank has died, no new group is made, and every call fails.
    if own is None or (monitor is not None and monitor.has_told_peers and not monitor.is_final):
        watching = [it for it in (given, monitor, *map(monitor_of, others.values())) if it is not None]
        try:
            own = _made_beside(
                watching, lambda is_over: _group_within(parent, use, stall_timeout_s, call, is_over), call
            )
        except OutOfStepError:  # of ranks that did not meet: the same call may be made later
            take_back_turn()
            raise
        with _lock:
            _own.setdefault(parent, {})[use] = own
    elif monitor is not None:
        monitor.set_stall_timeout(stall_timeout_s)
    return own


def group_of_save(
    group: dist.ProcessGroup | None, no_dist: bool, config: Config, path: str
) -> dist.ProcessGroup | None:
    """Returns the group that ``async_save`` saves over: the caller's gloo group if one is given, else one of our own.

    See ``own_group``. None if there is only this rank.
    """
    if group is not None:
        require(GROUPS)
    if not no_dist and group is not None and _compat.is_registered(group) and _compat.is_gloo_on_host(group):
        return group if group.size() > 1 else None
    return own_group(group, no_dist, "async_save", config.stall_timeout_s, ("save", path))


def destroy_own_groups(group: dist.ProcessGroup) -> None:
    """Ends the groups that ``own_group`` made of the ranks of ``group``, and the threads of their monitors. Local.

    No call over these groups may be under way on this rank.
    """
    with _lock:
        made = list(_own.pop(group, {}).values())
    for own in made:
        monitor = monitor_of(own)
        if monitor is not None:
            monitor.close(_FAREWELL_S)


def _made_beside(
    monitors: Sequence[LivenessMonitor], make: Callable[[threading.Event], dist.ProcessGroup], call: tuple[str, str]
) -> dist.ProcessGroup:
    """Returns the group that ``make`` makes.

    Args:
        monitors: Of other groups of the same ranks. Some may have lost ranks before.
        make: Called in another thread. It leaves when the event is set that it gets.
        call: What is being done, and its path, for errors.

    Raises:
        RankLostError: One of ``monitors`` notices the loss of a rank, or has done so and no call of this rank has
            failed for that yet, or a rank that has stopped is not heard again within the stall timeout.
    """
    if not monitors:
        return make(threading.Event())
    made: Future[dist.ProcessGroup] = Future()
    is_over = threading.Event()
    lost: dict[int, LossReason] = {}  # complete once `is_over` is set
    watching = [(monitor, monitor.has_told_peers) for monitor in monitors]
    begin = time.monotonic()

    def loss() -> tuple[LivenessMonitor, dict[int, LossReason]] | None:
        waited = time.monotonic() - begin
        return next(((it, noticed) for it, is_told in watching if (noticed := it.losses(is_told, waited))), None)

    def pass_on() -> None:
        """Tells the loss to the ranks for which ``make`` succeeded, such as one that had stopped and came after all."""
        fresh = monitor_of(made.result())
        if fresh is not None:
            fresh.lose(lost)

    def work() -> None:
        try:
            made.set_result(make(is_over))
        except BaseException as error:
            made.set_exception(error)
            return
        if is_over.is_set():
            pass_on()

    with ExitStack() as calls:
        for monitor in monitors:
            calls.enter_context(monitor.in_call())
        # Nothing can end a wait for ranks that do not come. So a thread waits for them, until the timeout of the group.
        threading.Thread(target=work, name="bytecheckpoint-new-group", daemon=True).start()
        while (noticed := loss()) is None:
            if wait([made], _LOOK_S).done:
                return made.result()
        monitor, losses = noticed
        lost.update(losses)
        is_over.set()
        # The next call must not come to the same meeting before this one has left it.
        wait([made], _LEFT_WITHIN_S)
        if made.done() and made.exception() is None:
            pass_on()
        raise monitor.error(*call, lost)


def exchanging(group: dist.ProcessGroup | None, kind: CallKind) -> AbstractContextManager[None]:
    """Returns a ``with`` block, within one of ``calling``, in which a call of that kind exchanges."""
    monitor = monitor_of(group)
    return nullcontext() if monitor is None else monitor.in_call(kind)


@contextmanager
def calling(
    group: dist.ProcessGroup | None, what: str, path: str, kind: CallKind = CallKind.AGREEMENT
) -> Iterator[None]:
    """Marks a ``with`` block of exchanges with the ranks of ``group``: if one is lost, all raise a RankLostError."""
    monitor = monitor_of(group)
    if monitor is None:
        yield
        return
    with monitor.in_call(kind):
        if monitor.is_lost:
            raise monitor.error(what, path)
        try:
            yield
        except CheckpointException as error:
            if monitor.is_lost:  # a hook met the loss first
                raise monitor.error(what, path) from error
            raise
        except BaseException as error:
            if not _is_raised_between_ranks(error.__traceback__):
                raise
            is_of_torch = isinstance(error, RuntimeError)
            if not (is_of_torch and monitor.wait_for_loss(_TOLD_WITHIN_S)):
                monitor.give_up(_cut_off_from(str(error)) if is_of_torch else "")
            if is_of_torch:
                raise monitor.error(what, path) from error
            raise


def between_ranks(exchange: Callable[[], T]) -> T:
    """Returns what ``exchange``, a collective of our own, returns.

    ``calling`` finds this function in the traceback of an error, and then knows that other ranks may be waiting.
    """
    return exchange()


def _cut_off_from(text: str) -> str:
    """Returns the address in an error of gloo about a connection; "" if it has none."""
    found = _GLOO_ADDRESS.search(text)
    try:
        return plain_address(found[1]) if found else ""
    except ValueError:
        return ""


def _is_raised_between_ranks(traceback: TracebackType | None) -> bool:
    while traceback is not None:
        if traceback.tb_frame.f_code.co_name in _EXCHANGES:
            return True
        traceback = traceback.tb_next
    return False
