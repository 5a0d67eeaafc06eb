# SPDX-License-Identifier: Apache-2.0
"""``Tiers``: the places in which a run is kept, the nearest first. Needs no torch."""

from __future__ import annotations

import hashlib
import logging
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from bytecheckpoint.config import Config
from bytecheckpoint.errors import ConfigError, StorageError
from bytecheckpoint.native import _core
from bytecheckpoint.near_names import did_you_mean
from bytecheckpoint.runtime.per_process import PerProcess
from bytecheckpoint.storage.far_looks import look_far
from bytecheckpoint.storage.folders import folder_at, known
from bytecheckpoint.storage.memory.connection import HolderOptions, set_options, url_of_run
from bytecheckpoint.storage.object_store.stores import keep_options
from bytecheckpoint.storage.object_store.urls import is_http, is_store_url
from bytecheckpoint.storage.olmo_steps import in_final_folder
from bytecheckpoint.storage.parts import step_and_part
from bytecheckpoint.storage.paths import Place, TieredPath, as_place, below, location, parent_of
from bytecheckpoint.storage.step_names import is_step_name
from bytecheckpoint.storage.step_places import begin_of, has_all_files, has_mark

__all__ = [
    "MemoryTier",
    "TierStep",
    "Tiers",
    "go_without_memory",
    "has_memory",
    "lend_near",
    "lent_path",
    "note_save",
    "tier_of",
    "tiers_of",
]

_logger = logging.getLogger("bytecheckpoint")

_MEMORY = "memory"
_NAMES = ("near", "durable")
_LOOK_S = 5.0  # for a file system to say what it is


@dataclass(frozen=True, kw_only=True)
class MemoryTier:
    """Keeps the newest states in the memory of the machines, in processes of their own, which outlive those that train.

    Each machine has the part of its ranks, and copies of it are on ``replicas`` other ones: a state survives the loss
    of so many. A state that is saved needs room for one more than ``keep``; if there is none, the save says so, and
    goes on to the next tier.

    Args:
        keep: How many committed states stay in memory.
        max_bytes: Most bytes of these; 0 is what the machine has. More is refused, and never swapped out or killed for.
        linger_s: Seconds for which the process stays when the last rank has died, for a restart to find it. If the
            ranks end by ``bytecheckpoint.shutdown``, it ends with the last of them.
        name: Name of the run in memory; "" makes one of the nearest folder. Needed if there is no other tier.
        replicas: How many other machines have a copy of what a machine has: the next ones, in the order of ranks. The
            save is committed in memory when all copies have arrived. Fewer than there are machines.
        interface: Network interface, or IP address, at which the machines exchange these; "" takes the one by which a
            machine is known to the others. They let in only who knows the job, and what is sent is not encrypted.
        failure_domain: What this machine shares the fate of, such as its rack: copies go to other ones. "" for nothing.
            Each machine passes its own.

    Raises:
        ConfigError: An argument is out of range.
    """

    keep: int = 2
    max_bytes: int = 0
    linger_s: float = 1800.0
    name: str = ""
    replicas: int = 0
    interface: str = ""
    failure_domain: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        for name, least in (("keep", 1), ("max_bytes", 0), ("replicas", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"MemoryTier({name}={value!r}): must be an int >= {least}")
        if not self.linger_s >= 0:
            raise ConfigError(f"MemoryTier(linger_s={self.linger_s!r}): must be 0 or more")


@dataclass(frozen=True, kw_only=True)
class Tiers(TieredPath):
    """The places in which a run is kept: training saves to the near one, from which steps go on to the durable one.

    It stands for the folder of the run: ``tiers / "step-100"`` is the path of a step. Pass that wherever the path of a
    checkpoint is taken, and the ``Tiers`` itself wherever the folder of a run is. A save is done when it is durable on
    the near disk; with ``memory`` it is committed there before. The process of its coordinator then copies it to the
    durable place, in a thread, as ``drain`` does: each byte is compared, and the copy is whole or not there. A load
    takes the nearest place that has the step.

    Local, and nothing is looked at before it is used.

    Args:
        memory: Where states are committed first; None for no memory. See ``MemoryTier``.
        near: Folder of the run on a fast disk; "" for none: saves then go to ``durable``. All ranks share it, or each
            machine has one of its own at this path, and commits the part of its ranks there.
        durable: Folder of the run in durable storage, or its URL; "" for none.
        near_every: Every how many saves go to the near place, counted in this process. The others are in memory alone,
            which a power cut loses. Only with ``memory``.
        durable_every: Every how many saves of this run go to the durable place, counted in this process: 10 takes the
            tenth, the twentieth and so on.
        drain_bytes_per_s: Most bytes that are written to the durable place in a second; 0 is no limit.
        most_waiting: Most steps that wait for the one that is copied. Of more, the oldest are dropped, and a warning
            says so. Steps that wait are pinned near by, so that no prune removes them.
        drain: ``thread``: a thread of the coordinator copies. ``command``: nothing here does; run ``bcp drain``.
        config: Settings of the copies, and for the store of the durable place; None reads ``BYTECHECKPOINT_*``
            variables.

    Raises:
        ConfigError: An argument is out of range, or no place is given, or one place is given twice.
    """

    memory: MemoryTier | None = None
    near: str | os.PathLike[str] = ""
    durable: str | os.PathLike[str] = ""
    near_every: int = 1
    durable_every: int = 1
    drain_bytes_per_s: int = 0
    most_waiting: int = 2
    drain: str = "thread"
    config: Config | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in _NAMES if os.fspath(getattr(self, name))}
        if self.memory is not None and not isinstance(self.memory, MemoryTier):
            raise ConfigError(f"Tiers(memory={self.memory!r}): must be a MemoryTier, or None")
        if not given and (self.memory is None or not self.memory.name):
            raise ConfigError(
                "Tiers(): near or durable must be given: a folder, or for durable a URL; or MemoryTier(name=...) alone"
            )
        for name in given:
            object.__setattr__(self, name, str(location(given[name])))
        for name, least in (("near_every", 1), ("durable_every", 1), ("drain_bytes_per_s", 0), ("most_waiting", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"Tiers({name}={value!r}): must be an int >= {least}")
        if self.near_every != 1 and not (self.memory and given):
            raise ConfigError(f"Tiers(near_every={self.near_every}): the other saves would be nowhere: pass memory")
        if self.drain not in ("thread", "command"):
            raise ConfigError(f"Tiers(drain={self.drain!r}): must be 'thread' or 'command'")
        if self.near and not isinstance(as_place(self.near), Path):
            raise ConfigError(f"Tiers(near={self.near}): must be a directory; a store goes to durable")
        if is_http(str(self.durable)):
            raise ConfigError(f"Tiers(durable={self.durable}): over HTTP a checkpoint can only be read")
        if self.near and folder_at(self.near).is_same(self.durable or "."):
            raise ConfigError(f"Tiers(near={self.near}): near and durable are one folder")

    @classmethod
    def of(cls, given: Tiers | Mapping[str, Any] | None, run: str = "") -> Tiers | None:
        """Returns the tiers of a setting, which may be a dict of the arguments.

        Args:
            given: The setting; None for no tiers.
            run: Folder of the run, which is the place that a dict leaves out.

        Raises:
            ConfigError: It is none; or a dict has other keys, or names both places, of which neither is ``run``.
        """
        if given is None or isinstance(given, Tiers):
            return given
        if not isinstance(given, Mapping):
            raise ConfigError(f"tiers={given!r}: must be Tiers, or a dict of their arguments")
        memory = given.get(_MEMORY)
        for of, arguments in ((cls, given), (MemoryTier, memory if isinstance(memory, Mapping) else {})):
            names = [field.name for field in fields(of)]
            for name in arguments:
                if name not in names:
                    raise ConfigError(f"tiers: no such argument: {name!r}{did_you_mean(str(name), names)}")
        if isinstance(memory, Mapping):
            given = {**given, _MEMORY: MemoryTier(**memory)}
        left_out = [each for each in _NAMES if not given.get(each)]
        return cls(**{**given, left_out[0]: run} if run and left_out else given)

    @property
    def disks(self) -> tuple[Place, ...]:
        """The places but memory, the nearest first."""
        return tuple(as_place(text) for name in _NAMES if (text := str(getattr(self, name))))

    @property
    def in_memory(self) -> str:
        """URL of the run in memory; "" without."""
        if self.memory is None:
            return ""
        name = self.memory.name or str(self.disks[0])
        return url_of_run(hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()[:24])

    @property
    def places(self) -> tuple[Place, ...]:
        lent = _in_use.get().lent
        return (*filter(None, [self.in_memory]), *(lent.get(place, place) for place in self.disks))

    @property
    def place(self) -> Place:
        return (self.disks or self.places)[0]

    @property
    def names(self) -> tuple[str, ...]:
        """What ``places`` are called: ``memory``, ``near``, ``durable``."""
        return tuple(name for name in (_MEMORY, *_NAMES) if getattr(self, name))

    def place_to_write(self) -> Place:
        return _in_use.get().use(self, is_save=True)

    def open(self) -> None:
        """Makes its places known, with their settings."""
        _in_use.get().use(self, is_save=False)

    def place_to_read(self) -> Place:
        self.open()
        return next((place for place in self.disks if not folder_at(place).is_gone()), self.place)

    def __truediv__(self, name: str | os.PathLike[str]) -> TierStep:
        """Returns the path of a step, or of a folder in one, such as ``tiers / "step-100"``.

        Raises:
            ConfigError: It is not the name of a step.
        """
        return TierStep(self, os.fspath(name))

    def step_of(self, path: str | os.PathLike[str]) -> TierStep:
        """Returns the step whose name is the last one in a path, wherever that leads.

        Raises:
            ConfigError: It is not the name of a step.
        """
        return path if isinstance(path, TierStep) else self / os.fspath(path).rstrip("/").rpartition("/")[2]


class TierStep(TieredPath):
    """The path of a step in ``Tiers``, or of a folder in one. ``tiers / "step-100"`` makes it.

    Args:
        tiers: Places of the run.
        name: Name of the step, or of a folder in it.

    Raises:
        ConfigError: It is not the name of a step, or leads out of it.
    """

    def __init__(self, tiers: Tiers, name: str) -> None:
        names = name.split("/")
        if not is_step_name(names[0]) or any(each in ("", ".", "..") for each in names):
            raise ConfigError(
                f"{tiers} / {name!r}: must be the name of a step, such as 'step-100', for Tiers keep the steps of a run"
            )
        self.tiers, self.name = tiers, name

    @property
    def place(self) -> Place:
        return below(self.tiers.place, *self.name.split("/"))

    @property
    def places(self) -> tuple[Place, ...]:
        return tuple(below(place, *self.name.split("/")) for place in self.tiers.places)

    def open(self) -> None:
        self.tiers.open()

    def place_to_write(self) -> Place:
        return below(self.tiers.place_to_write(), *self.name.split("/"))

    def place_to_read(self) -> Place:
        self.tiers.open()
        places = self.places  # what is behind those that saves go to is a copy, and may be far away
        num_saved_to = (self.tiers.memory is not None) + bool(self.tiers.disks)
        # It may have been saved again to one of them alone; of equal ones the nearest is taken.
        nearest, newest = self.place, -2
        for place in places[:num_saved_to]:
            begin = self._begin_in(place, is_needed=newest == -2)
            nearest, newest = (nearest, newest) if begin is None or begin <= newest else (place, begin)
        behind = () if newest > -2 else places[num_saved_to:]
        return next((place for place in behind if self._begin_in(place) is not None), nearest)

    def _begin_in(self, place: Place, *, is_needed: bool = True) -> int | None:
        """Returns when its save in a place began; None if that has none, or cannot be looked at: another may have it.

        A durable place that is not needed, since a nearer one has it, is not waited for if it hangs.
        """

        def look(place: Place) -> int | None:
            is_there = has_mark(place) and has_all_files(place)
            return (begin_of(place) if self.tiers.memory else 0) if is_there else None

        try:
            return look(place) if is_needed or self.tiers.near else look_far(look, place, "load")
        except StorageError as error:
            _logger.warning("load(%s): %s cannot be looked at: %s", self, place, str(error))
            return None

    def __truediv__(self, name: str) -> TierStep:
        return TierStep(self.tiers, f"{self.name}/{name}")

    def __repr__(self) -> str:
        return f"{self.tiers!r} / {self.name!r}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TierStep) and (self.tiers, self.name) == (other.tiers, other.name)

    def __hash__(self) -> int:
        return hash((self.tiers, self.name))


@dataclass
class _Count:
    """How many saves there were, and what of the last one."""

    number: int = 0
    step: Place = ""
    parts: set[str] = field(default_factory=set)


class _InUse:
    """The tiers that this process uses, by the place that saves write to."""

    def __init__(self) -> None:
        self.by_place: dict[str, Tiers] = {}
        self.saved_to: set[Place] = set()
        self.counts: dict[Place, _Count] = {}
        self.without_memory: set[Place] = set()
        self.lent: dict[Place, str] = {}

    def use(self, tiers: Tiers, is_save: bool) -> Place:
        place = tiers.place
        if tiers.config is not None and is_store_url(tiers.durable):
            keep_options(str(tiers.durable), tiers.config)
        for each in tiers.places:
            known(each, tiers.config)
        if tiers.memory is not None:
            set_options(tiers.in_memory, HolderOptions(tiers.memory.max_bytes, tiers.memory.linger_s))
        before = self.by_place.setdefault(str(place), tiers)
        if not is_save:
            return place
        if place not in self.saved_to:
            self.saved_to.add(place)
            if len(tiers.disks) > 1:
                _warn_of(tiers)
        elif before.durable != tiers.durable:
            raise ConfigError(f"Tiers(near={place}): its steps go to {before.durable}, and not to {tiers.durable}")
        self.by_place[str(place)] = tiers
        return place


_in_use = PerProcess(_InUse)


def tiers_of(path: str, *, anywhere: bool = False) -> tuple[Tiers, str] | None:
    """Returns the tiers that this process saves to at a path, and the rest of the path in them; None if it is in none.

    What OLMo-core saves to ``step100-tmp``, which it renames, is in ``step100``.

    Args:
        path: A path or URL below the place that saves write to.
        anywhere: Whether it may be below any of the places.
    """
    in_use = _in_use.if_made()
    for tiers in () if in_use is None else [*in_use.by_place.values()]:
        for place in [str(place) for _, place in _named(tiers)] if anywhere else [str(tiers.place)]:
            if path.startswith(f"{place}/"):
                return tiers, in_final_folder(path[len(place) + 1 :])
    return None


def tier_of(path: str) -> str:
    """Returns which tier a path is in: ``memory``, ``near`` or ``durable``; "" if it is in none of this process."""
    in_use = _in_use.if_made()
    for tiers in () if in_use is None else [*in_use.by_place.values()]:
        for name, place in _named(tiers):
            if path.startswith(f"{place}/"):
                return name
    return ""


def _named(tiers: Tiers) -> list[tuple[str, Place]]:
    """Returns the places by their names; a near one that machines lend twice, as its path, too."""
    lent = [*zip(tiers.names, tiers.places, strict=True)]
    return [*lent, *zip(tiers.names[-len(tiers.disks) :], tiers.disks, strict=False)]


def note_save(tiers: Tiers, path: str) -> bool:
    """Counts a save of a run that is in memory. Returns whether it goes on to a disk, as this process has counted.

    Args:
        tiers: Places of the run.
        path: The step, or a part of it: the parts of one step are one save.
    """
    counts = _in_use.get().counts
    step, part = step_and_part(as_place(path))
    count = counts.setdefault(parent_of(step), _Count())
    if step != count.step or part in count.parts:
        count.number, count.step, count.parts = count.number + 1, step, set()
    count.parts.add(part)
    return bool(tiers.disks) and count.number % tiers.near_every == 0


def has_memory(tiers: Tiers) -> bool:
    """Whether saves of this process are committed in memory first."""
    return tiers.memory is not None and tiers.place not in _in_use.get().without_memory


def go_without_memory(tiers: Tiers) -> None:
    """Has no later save of this process try to: it cannot be."""
    _in_use.get().without_memory.add(tiers.place)


def lend_near(tiers: Tiers, url: str) -> None:
    """Notes where the near place is read from, if each machine has a disk of its own there: what all lend is at a URL.

    Args:
        tiers: Places of the run.
        url: The URL; "" if all machines have one disk.
    """
    lent = _in_use.get().lent
    lent.pop(as_place(str(tiers.near)), None)
    if url:
        lent[as_place(str(tiers.near))] = known(url, tiers.config)  # type: ignore[assignment]


def lent_path(path: str) -> str:
    """Returns where a step of a near place is read from: the path itself, unless machines lend their parts of it."""
    for near, url in _in_use.get().lent.items():
        if path.startswith(f"{near}/"):
            return str(below(url, *path[len(str(near)) + 1 :].split("/")))
    return path


def _warn_of(tiers: Tiers) -> None:
    """Warns of a near place that is no nearer than the durable one."""
    near, durable = tiers.disks
    above = next(path for path in (near, *near.parents) if path.exists())  # type: ignore[union-attr]
    what = ""
    if not _core.is_local(str(above), _LOOK_S):
        what = "it is on network storage, so that saves wait for that"
    elif isinstance(durable, Path):
        other = next(path for path in (durable, *durable.parents) if path.exists())
        if other.stat().st_dev == above.stat().st_dev:
            what = f"it is on one device with {durable}: what loses one loses both"
    if what:
        warnings.warn(f"bytecheckpoint: Tiers(near={near}): {what}", RuntimeWarning, stacklevel=4)
