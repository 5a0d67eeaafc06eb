# SPDX-License-Identifier: Apache-2.0
"""Process groups whose ranks are watched, and calls on them."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from bytecheckpoint._fork_locks import ForkSafeLock
from bytecheckpoint.config import Config
from bytecheckpoint.dcp import _compat
from bytecheckpoint.dcp._links import connect_star
from bytecheckpoint.dcp._peers import peers_of_call, unused_name
from bytecheckpoint.dcp._watch import Watch
from bytecheckpoint.errors import CheckpointError, ConfigError
from bytecheckpoint.probes.of_torch import GROUPS
from bytecheckpoint.probes.probe import require

__all__ = [
    "between_ranks",
    "calling",
    "destroy_own_groups",
    "group_of_save",
    "keep_watching",
    "own_group",
    "ranks_of",
    "watch_of",
    "watch_of_call",
    "watched_group",
]

# The watch hears of a loss from others, and may hear of it after gloo.
_TOLD_WITHIN_S = 5.0
_LOOK_S = 0.1
_FAREWELL_S = 5.0
# In which ranks wait for one another; what is raised in them, and not by DCP, leaves the others waiting.
_EXCHANGES = ("_save_state_dict", "_load_state_dict", "between_ranks")

T = TypeVar("T")

_lock = ForkSafeLock()
_watches: weakref.WeakKeyDictionary[dist.ProcessGroup, Watch] = weakref.WeakKeyDictionary()
_own: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, dist.ProcessGroup]] = weakref.WeakKeyDictionary()
# Global ranks of the groups that are made here: torch does not know them.
_ranks: weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[int, ...]] = weakref.WeakKeyDictionary()


def watched_group(ranks: Sequence[int] | None, stall_timeout_s: float) -> dist.ProcessGroup:
    """A gloo group of ``ranks``, all if None, that is watched. Collective over them alone.

    Raises:
        CheckpointError: Ranks cannot connect; on all of them.
        UnsupportedError: This torch is built otherwise.
    """
    require(GROUPS)
    made: Any
    if ranks is None:
        made = dist.new_group(backend="gloo")
    else:
        world = dist.group.WORLD
        assert world is not None
        made = _compat.new_gloo_group(ranks, unused_name(world, f"of {sorted(ranks)}"))
    group: dist.ProcessGroup = made
    _begin_watch(group, group, stall_timeout_s)
    return group


def _begin_watch(group: dist.ProcessGroup, parent: dist.ProcessGroup, stall_timeout_s: float) -> None:
    """As ``watched_group`` raises. ``group`` ends with ``parent``."""
    if group.size() > 1:
        watch = Watch(group, parent, connect_star(group), stall_timeout_s)
        with _lock:
            _watches[group] = watch


def _group_within(parent: dist.ProcessGroup, use: str, stall_timeout_s: float) -> dist.ProcessGroup:
    """A group of the ranks of ``parent``, watched if they can connect; else a warning says so."""
    group = _compat.gloo_between(parent, unused_name(parent, use))
    with _lock:
        _ranks[group] = tuple(dist.get_process_group_ranks(parent))
    try:
        _begin_watch(group, parent, stall_timeout_s)
    except CheckpointError as error:  # on all ranks
        warnings.warn(
            f"bytecheckpoint: {error}; the loss of a rank will be noticed at the timeout of the process group",
            RuntimeWarning,
            stacklevel=2,
        )
    return group


def watch_of(group: dist.ProcessGroup | None) -> Watch | None:
    """None if nobody watches the group."""
    if group is None:
        return None
    with _lock:
        return _watches.get(group)


def ranks_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    """Global ranks, by their numbers in the group."""
    with _lock:
        known = _ranks.get(group)
    return tuple(dist.get_process_group_ranks(group)) if known is None else known


def keep_watching(group: dist.ProcessGroup | None, save: Future[Any]) -> None:
    """The ranks of ``group`` are watched until the background ``save`` over it ends, also if it is destroyed before."""
    watch = watch_of(group)
    if watch is not None:
        watch.keep()
        save.add_done_callback(lambda _: watch.let_go())


def watch_of_call() -> Watch | None:
    """Of the ranks of the call of DCP in which this thread runs a hook."""
    peers = peers_of_call()
    return None if peers is None else watch_of(peers.group)


def own_group(
    group: dist.ProcessGroup | None, no_dist: bool, use: str, stall_timeout_s: float, call: tuple[str, str]
) -> dist.ProcessGroup | None:
    """A watched group of the ranks of ``group`` for one ``use`` alone: what else goes on in theirs cannot mix with it.

    Collective the first time for each group and use, and again after a call that lost a rank. None if there is but this
    rank. The very first group is made unwatched: a rank that does not come to it is waited for as long as torch does.

    Args:
        call: What is being done, and the path, for an error.

    Raises:
        RankLostError: While ranks came to make the group one was lost, as a group that there is already tells.
        ConfigError: ``group`` has been destroyed.
        UnsupportedError: This torch is built otherwise.
    """
    if no_dist:
        return None
    if dist.is_available() and dist.is_initialized():
        require(GROUPS)
    if group is not None and not _compat.is_registered(group):
        raise ConfigError(f"{call[0]}({call[1]}): process_group was destroyed before the call")
    if not (dist.is_available() and dist.is_initialized()):
        return None
    parent = group or dist.group.WORLD
    assert parent is not None
    if _compat.is_fake(parent):
        return parent
    given = watch_of(parent)
    if given is not None:
        if use == "calls":
            return parent
        stall_timeout_s = given.stall_timeout_s
    with _lock:
        others = dict(_own.get(parent, {}))
    own = others.pop(use, None)
    watch = watch_of(own)
    # A loss is told by one call that fails, on each rank: also on one that was in no call when it happened, or that is
    # itself the rank that stopped. Until then the ranks that know do not wait for it in a new group. For one that died
    # nobody waits any more: every call fails.
    if own is None or (watch is not None and watch.is_told and not watch.is_final):
        beside = (watch_of(other) for other in (parent, *others.values()))
        own = _made_beside(
            next((other for other in beside if other is not None and (other.is_final or not other.is_told)), None),
            lambda: _group_within(parent, use, stall_timeout_s),
            call,
        )
        with _lock:
            _own.setdefault(parent, {})[use] = own
    elif watch is not None:
        watch.set_stall_timeout(stall_timeout_s)
    return own


def group_of_save(
    group: dist.ProcessGroup | None, no_dist: bool, config: Config, path: str
) -> dist.ProcessGroup | None:
    """What ``async_save`` saves over: the gloo group that the caller has given for it, else one of our own.

    As ``own_group`` says; None if there is but this rank.
    """
    if group is not None:
        require(GROUPS)
    if not no_dist and group is not None and _compat.is_registered(group) and _compat.is_gloo_on_host(group):
        return group if group.size() > 1 else None
    return own_group(group, no_dist, "async_save", config.stall_timeout_s, ("save", path))


def destroy_own_groups(group: dist.ProcessGroup) -> None:
    """Ends what ``own_group`` has made of the ranks of ``group``, and the threads that watch it. Local.

    No call on them may be under way on this rank.
    """
    with _lock:
        made = list(_own.pop(group, {}).values())
    for own in made:
        watch = watch_of(own)
        if watch is not None:
            watch.close(_FAREWELL_S)


def _made_beside(
    watch: Watch | None, make: Callable[[], dist.ProcessGroup], call: tuple[str, str]
) -> dist.ProcessGroup:
    """What ``make`` gives, or an error if ``watch``, of a group of the same ranks, notices the loss of one before."""
    if watch is None:
        return make()
    made: Future[dist.ProcessGroup] = Future()

    def pass_on(group: dist.ProcessGroup) -> None:
        """To those in the group whose wait has ended well: who has stopped and came after all, for one."""
        fresh = watch_of(group)
        if fresh is not None:
            fresh.lose_as(watch)

    def work() -> None:
        try:
            group = make()
            made.set_result(group)
        except BaseException as error:
            made.set_exception(error)
            return
        if watch.is_lost:
            pass_on(group)

    with watch.in_call():
        # Nothing ends a wait for ranks that do not come: the thread stays in it, until the timeout of the group.
        threading.Thread(target=work, name="bytecheckpoint-new-group", daemon=True).start()
        while not wait([made], _LOOK_S).done and not watch.is_lost:
            pass
        if watch.is_lost:
            if made.done() and made.exception() is None:
                pass_on(made.result())
            raise watch.error(*call)
    return made.result()


@contextmanager
def calling(group: dist.ProcessGroup | None, what: str, path: str) -> Iterator[None]:
    """A call of DCP's flow of hooks with the ranks of ``group``: if one of them is lost, all raise a RankLostError."""
    watch = watch_of(group)
    if watch is None:
        yield
        return
    with watch.in_call():
        if watch.is_lost:
            raise watch.error(what, path)
        try:
            yield
        except CheckpointException as error:
            if watch.is_lost:  # a hook was the first to meet it
                raise watch.error(what, path) from error
            raise
        except BaseException as error:
            if not _is_raised_between_ranks(error.__traceback__):
                raise
            is_of_torch = isinstance(error, RuntimeError)
            if not (is_of_torch and watch.wait_for_loss(_TOLD_WITHIN_S)):
                watch.give_up()
            if is_of_torch:
                raise watch.error(what, path) from error
            raise


def between_ranks(exchange: Callable[[], T]) -> T:
    """What a collective of our own within ``calling`` gives: what is raised in it tells of a rank that is lost."""
    return exchange()


def _is_raised_between_ranks(traceback: TracebackType | None) -> bool:
    while traceback is not None:
        if traceback.tb_frame.f_code.co_name in _EXCHANGES:
            return True
        traceback = traceback.tb_next
    return False
