# SPDX-License-Identifier: Apache-2.0
"""Runs in the memory of several machines: how their holders meet, and what each takes from the others.

Each machine has the data files of its own ranks, and copies of those of others. The notes of a checkpoint, which are
all but its data files, are on every machine, and its commit mark last: it makes what is beside it stay.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from errno import ENOENT
from pathlib import Path

import torch.distributed as dist

from bytecheckpoint.distributed.agreement import all_together, gathered
from bytecheckpoint.distributed.links import address_of, own_addresses
from bytecheckpoint.errors import ConfigError, StorageError
from bytecheckpoint.runtime.boot_id import boot_id
from bytecheckpoint.storage.memory.client import HolderClient
from bytecheckpoint.storage.memory.connection import run_of
from bytecheckpoint.storage.memory.peers import Copies, Machine, Peers, is_data_file, meet, peers_of
from bytecheckpoint.storage.names import is_mark
from bytecheckpoint.storage.parts import PARTS
from bytecheckpoint.storage.paths import below
from bytecheckpoint.storage.small_files import storage_errors
from bytecheckpoint.storage.step_places import begin_of
from bytecheckpoint.storage.tiers import MemoryTier, Tiers

__all__ = ["Machines"]

_TOKEN_BYTES = 32

_logger = logging.getLogger("bytecheckpoint")


@dataclass
class _About:
    """Where a rank is.

    Attributes:
        machine: The same for ranks that reach one holder.
        host: Name of the host.
        failure_domain: As in ``MemoryTier``.
        replicas: As in ``MemoryTier``.
        goes_on: Whether a save goes on to a disk.
        token: On the lowest rank what holders let in who knows it; else empty.
    """

    machine: str
    host: str
    failure_domain: str
    replicas: int
    goes_on: bool
    token: bytes = field(repr=False)


@dataclass
class _Offer:
    """What a machine says of its holder.

    Attributes:
        address: Where it listens.
        begins: When the save of each checkpoint that it has a mark of began, by the folder in the run.
        data_files: Names in the run of its data files.
    """

    address: tuple[str, int]
    begins: Mapping[str, int]
    data_files: Sequence[str]


class Machines:
    """The machines of the ranks of a group, in one call. Making it is collective over the group.

    Args:
        tiers: Places of the run, with memory.
        group: The ranks; None for this one alone.
        call: What is being done, and its path, for errors.
        stall_timeout_s: See ``Config``.
        looks: Whether they say what they have, for a load.
        goes_on: Whether a save goes on to a disk, as this rank has counted.

    Attributes:
        goes_on: Whether it does, as the lowest rank has counted.
        acts: Whether this rank acts for its machine: it is the lowest on it.
        peers: The machines; None if this one is all.

    Raises:
        ConfigError: There are too few machines for the replicas.
        CheckpointError: Machines cannot reach one another.
    """

    def __init__(
        self,
        tiers: Tiers,
        group: dist.ProcessGroup | None,
        call: tuple[str, str],
        stall_timeout_s: float,
        *,
        looks: bool = False,
        goes_on: bool = True,
    ) -> None:
        assert tiers.memory is not None
        self._stall_timeout_s, self.goes_on = stall_timeout_s, goes_on
        self._tiers, self._memory, self._group, self._call = tiers, tiers.memory, group, call
        self._run = run_of(tiers.in_memory)
        self.acts = True
        self.peers: Peers | None = None
        self._copies: Copies | None = None
        self._offers: list[_Offer] = []
        if group is None or group.size() == 1:
            _refuse_too_few(self._memory, 1, call)
            meet(self._run, None)
        else:
            self._meet(group, looks)

    def _meet(self, group: dist.ProcessGroup, looks: bool) -> None:
        known = peers_of(self._run)
        token = secrets.token_bytes(_TOKEN_BYTES) if known is None else known.token
        own = _About(
            _own_machine(),
            socket.gethostname(),
            self._memory.failure_domain,
            self._memory.replicas,
            self.goes_on,
            token if group.rank() == 0 else b"",
        )
        said: list[_About] = gathered(group, *self._call, own)
        ranks_of: dict[str, list[int]] = {}
        for rank, about in enumerate(said):
            ranks_of.setdefault(about.machine, []).append(rank)
        self._refuse_different(said)
        self.goes_on = said[0].goes_on
        _refuse_too_few(self._memory, len(ranks_of), self._call)
        self.acts = ranks_of[own.machine][0] == group.rank()
        if len(ranks_of) == 1:
            meet(self._run, None)
            return
        token = said[0].token
        offer = all_together(group, *self._call, lambda: self._offer(token, looks) if self.acts else None)
        offers: list[_Offer | None] = gathered(group, *self._call, offer)
        machines: list[Machine] = []
        for about, of_rank in zip(said, offers, strict=True):
            if of_rank is not None:
                ranks = tuple(ranks_of[about.machine])
                machines.append(Machine(about.host, of_rank.address, about.failure_domain, ranks))
                self._offers.append(of_rank)
        number = [*ranks_of].index(own.machine)
        where = {name: at for at, of_one in enumerate(self._offers) for name in of_one.data_files}
        if known is not None and known.machines == machines and known.token == token:
            known.where = where if looks else known.where
        else:
            meet(self._run, Peers(machines, number, token, self._stall_timeout_s, where))
        self.peers = peers_of(self._run)
        all_together(group, *self._call, self._check_targets)

    def _refuse_different(self, said: Sequence[_About]) -> None:
        odd = next((rank for rank, about in enumerate(said) if about.replicas != said[0].replicas), None)
        if odd is not None:
            raise ConfigError(
                f"{self._call[0]}({self._call[1]}): MemoryTier(replicas=) is {said[0].replicas} on rank 0, and "
                f"{said[odd].replicas} on rank {odd}: it must be the same on all ranks",
                self._call[1],
            )

    def _offer(self, token: bytes, looks: bool) -> _Offer:
        address = _own_address(self._memory.interface, self._call)
        held = HolderClient(self._tiers.in_memory)
        with storage_errors("listen", self._tiers.in_memory):
            port = held.listen(address, token)
            names = [each.name for each in held.everything("")] if looks else []
        folders = {name.rpartition("/")[0] for name in names if is_mark(name)}
        begins = {folder: begin_of(below(self._tiers.in_memory, *folder.split("/"))) for folder in folders}
        # Without a mark beside them, files of a rank that has died may go at any time.
        stay = [name for name in names if is_data_file(name) and name.rpartition("/")[0] in folders]
        return _Offer((address, port), begins, stay)

    def _check_targets(self) -> None:
        assert self.peers is not None
        try:
            self.peers.targets(self._memory.replicas)
        except ValueError as error:
            raise ConfigError(f"{self._call[0]}({self._call[1]}): MemoryTier: {error}", self._call[1]) from None

    def copy_files(self, path: str, names: Sequence[str]) -> None:
        """Gives copies of what this rank has written to the machines behind its own, before it says so.

        Args:
            path: URL of the checkpoint.
            names: Names of the files.

        Raises:
            StorageError: A machine refuses, or cannot be reached.
        """
        if self.peers is None:
            return
        self._copies = self._copies or self.peers.copies()
        held = HolderClient(path)
        for name in names:
            with storage_errors("copy", f"{path}/{name}"):
                fd = held.descriptor(name)
                try:
                    for machine in self.peers.targets(self._memory.replicas):
                        self._copies.put(machine, held.key(name), fd)
                finally:
                    os.close(fd)

    def commit(self, path: str, names: Sequence[str]) -> None:
        """Commits on all machines what the coordinator has committed on its own. Collective.

        Args:
            path: URL of the checkpoint.
            names: Names of the files that this rank has written.

        Raises:
            CheckpointError: A machine could not take the notes; on all ranks.
        """
        if self.peers is None or self._group is None:
            return
        peers, group = self.peers, self._group
        of_ranks: list[list[str]] = gathered(group, *self._call, [*names])
        of_machines = [[name for rank in machine.ranks for name in of_ranks[rank]] for machine in peers.machines]

        def on_this_machine() -> None:
            if peers.own != 0:
                self._take_notes(path, 0)
            copied = [at for at in range(len(of_machines)) if peers.own in peers.targets(self._memory.replicas, at)]
            self._check_held(path, [name for at in (peers.own, *copied) for name in of_machines[at]])

        all_together(group, *self._call, lambda: on_this_machine() if self.acts else None)
        self.end()
        if self.acts:
            self._sweep(path, {name for of_one in of_machines for name in of_one})
        key = HolderClient(path).key
        peers.note(
            {key(name): at for at, of_one in enumerate(of_machines) for name in of_one},
            (self._memory.keep + 1) * len(PARTS),
        )

    def _check_held(self, path: str, names: Sequence[str]) -> None:
        """Checks that a machine has what it is to have, now that a mark makes that stay: who sent it may have died.

        Raises:
            StorageError: It has not.
        """
        missing = {*names} - {each.name for each in HolderClient(path).entries()}
        if missing:
            raise StorageError(
                f"save({path}): {socket.gethostname()} has not {min(missing)}: the rank that wrote it is gone",
                path,
                ENOENT,
            )

    def _sweep(self, path: str, names: Collection[str]) -> None:
        """Frees the data files of a save that this one replaces."""
        held = HolderClient(path)
        with contextlib.suppress(OSError):
            held.delete([n for each in held.entries() if is_data_file(n := each.name) and n not in names])

    def end(self) -> None:
        """Ends the connections of copies: those of a save that was not committed are freed at the other machines."""
        if self._copies is not None:
            self._copies.end()

    def adopt(self) -> None:
        """Takes the notes of checkpoints that only other machines have, so that each machine knows of all. Collective.

        Raises:
            CheckpointError: A machine could not take them; on all ranks.
        """
        if self.peers is None or self._group is None:
            return
        all_together(self._group, *self._call, self._adopt)

    def _adopt(self) -> None:
        assert self.peers is not None
        if not self.acts:
            return
        own = self._offers[self.peers.own].begins
        newest: dict[str, tuple[int, int]] = {}  # when the newest save of a folder began, and which machine has it
        for at, offer in enumerate(self._offers):
            for folder, begin in offer.begins.items():
                newest[folder] = max(newest.get(folder, (begin, -at)), (begin, -at))
        if all(own.get(folder, -1) >= begin for folder, (begin, _) in newest.items()):
            return
        # The order of marks is that of commits, so those that were here are put again behind older ones.
        for folder, (begin, at) in sorted(newest.items(), key=lambda item: item[1][0]):
            path = str(below(self._tiers.in_memory, *folder.split("/")))
            if begin > own.get(folder, -1):
                try:
                    self._take_notes(path, -at)
                except StorageError as error:  # a step that only others know of is none here
                    _logger.warning("%s: %s", path, str(error))
            else:
                self._put_marks_again(path)

    def _put_marks_again(self, path: str) -> None:
        held = HolderClient(path)
        with storage_errors("commit", path):
            for mark in filter(is_mark, (each.name for each in held.entries())):
                held.put(mark, held.get(mark))

    def _take_notes(self, path: str, machine: int) -> None:
        assert self.peers is not None
        held = HolderClient(path)
        beginning = f"{held.key('')}/"
        with storage_errors("copy", path):
            names = [name.removeprefix(beginning) for name in self.peers.names(machine, beginning)]
            for name in sorted((name for name in names if not is_data_file(name)), key=is_mark):
                held.put(name, self.peers.get(machine, held.key(name)))


def _own_machine() -> str:
    """Returns what is the same for processes that reach one holder."""
    with contextlib.suppress(OSError):
        return f"{boot_id()} {Path('/proc/self/ns/net').stat().st_ino}"
    return socket.gethostname()


def _own_address(interface: str, call: tuple[str, str]) -> str:
    try:
        return address_of(interface) if interface else own_addresses()[0]
    except OSError as error:
        raise ConfigError(
            f"{call[0]}({call[1]}): MemoryTier(interface={interface!r}): {error.strerror}", call[1]
        ) from None


def _refuse_too_few(memory: MemoryTier, num_machines: int, call: tuple[str, str]) -> None:
    if memory.replicas >= num_machines:
        here = (
            "the ranks that are known are on one machine"
            if num_machines == 1
            else f"the ranks are on {num_machines} machines"
        )
        raise ConfigError(
            f"{call[0]}({call[1]}): MemoryTier(replicas={memory.replicas}): {here}, and each copy goes to another one "
            "than those that have the state: pass fewer replicas, or start ranks on more machines",
            call[1],
        )
