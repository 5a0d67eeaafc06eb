# SPDX-License-Identifier: Apache-2.0
"""``Peers``: what the holders of other machines have of a run, and what goes to them."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from bytecheckpoint.runtime.per_process import PerProcess
from bytecheckpoint.storage.memory.peer_frames import (
    MOST_HEADER_BYTES,
    enter,
    receive_frame,
    receive_into,
    send_file,
    send_frame,
)

__all__ = ["Copies", "Machine", "Peers", "end_peers", "is_data_file", "meet", "peers_of"]

_CONNECTS_WITHIN_S = 10.0
_MOST_A_REQUEST = 32 << 20
_MOST_IDLE = 2  # connections to one machine
_DATA_FILE = re.compile(r"__(\d+)_\d+\.[0-9a-f]{16}\.distcp")


def is_data_file(name: str) -> bool:
    """Whether a name is that of the data file of a rank, which one machine has, and those with a copy."""
    return _DATA_FILE.fullmatch(name.rpartition("/")[2]) is not None


@dataclass(frozen=True)
class Machine:
    """A machine with a holder.

    Attributes:
        host: Its name, for messages.
        address: Where its holder listens: an IP address and a port.
        domain: What it shares the fate of; "" for itself alone.
        ranks: The ranks on it, ascending.
    """

    host: str
    address: tuple[str, int]
    domain: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.host} ({self.address[0]}:{self.address[1]})"


class _Connection:
    """A connection to the holder of another machine, by one thread at a time."""

    def __init__(self, machine: Machine, token: bytes, moves_within_s: float) -> None:
        self.machine = machine
        self._owner = os.getpid()
        try:
            self._socket = socket.create_connection(machine.address, timeout=_CONNECTS_WITHIN_S)
        except OSError as error:
            raise OSError(
                error.errno or errno.ETIMEDOUT, f"the holder on {machine} cannot be reached: {error.strerror or error}"
            ) from error
        try:
            enter(self._socket, token)
            self._socket.settimeout(moves_within_s)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except BaseException:
            self._socket.close()
            raise

    def ask(self, request: dict[str, Any], fd: int | None = None) -> tuple[dict[str, Any], bytes | bytearray]:
        """Returns an answer and its body.

        Args:
            request: What is asked for.
            fd: Descriptor of a file that goes along; None for none.

        Raises:
            OSError: The holder refuses, has gone, or nothing moves any more.
        """
        try:
            if fd is None:
                send_frame(self._socket, request)
            else:
                send_file(self._socket, request, fd, os.fstat(fd).st_size)
            answer, came = self._receive()
        except (OSError, ValueError) as error:
            self.close()
            raise OSError(
                getattr(error, "errno", None) or errno.EIO, f"the holder on {self.machine}: {error}"
            ) from error
        except BaseException:  # its answer must not be taken for that of the next request
            self.close()
            raise
        if "errno" in answer:
            raise OSError(answer["errno"], f"the holder on {self.machine}: {answer['why']}")
        return answer, came

    def _receive(self) -> tuple[dict[str, Any], bytearray]:
        received = receive_frame(self._socket, MOST_HEADER_BYTES)
        if received is None:
            raise ConnectionResetError(errno.ECONNRESET, "it has gone")
        answer, num_bytes = received
        if num_bytes > _MOST_A_REQUEST:
            raise ValueError(f"an answer with {num_bytes:,} bytes")
        came = bytearray(num_bytes)
        receive_into(self._socket, memoryview(came))
        return answer, came

    @property
    def is_open(self) -> bool:
        return self._socket.fileno() >= 0

    def has_ended(self) -> bool:
        """Whether the other end has gone, while nothing was asked."""
        return bool(select.select([self._socket], [], [], 0)[0])

    def close(self) -> None:
        with contextlib.suppress(OSError):
            if os.getpid() == self._owner:  # a forked child may have it, too, and must not keep it open
                self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


@dataclass
class Peers:
    """The machines of a run, from one of them. Thread-safe.

    Args:
        machines: In the order of their lowest ranks.
        own: Which of them this process is on.
        token: What their holders let in who knows it.
        moves_within_s: A machine fails if nothing moves on its connection for so many seconds.
        where: Which machine has a data file, by its name in the run, as far as that was said.
    """

    machines: Sequence[Machine]
    own: int
    token: bytes = field(repr=False)
    moves_within_s: float
    where: Mapping[str, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _idle: dict[int, list[_Connection]] = field(default_factory=dict, repr=False)

    def targets(self, replicas: int, of: int | None = None) -> list[int]:
        """Returns the machines that take copies of what one has: the next ones in the ring of other domains.

        Args:
            replicas: How many copies.
            of: Which machine; None for this one.

        Raises:
            ValueError: There are not so many such machines.
        """
        of = self.own if of is None else of
        domains = {_domain(self.machines, of)}
        found: list[int] = []
        for offset in range(1, len(self.machines)):
            if len(found) == replicas:
                break
            machine = (of + offset) % len(self.machines)
            domain = _domain(self.machines, machine)
            if domain not in domains:
                domains.add(domain)
                found.append(machine)
        if len(found) < replicas:
            raise ValueError(
                f"{self.machines[of]} has {len(found)} machines of other failure domains for {replicas} replicas"
            )
        return found

    def copies(self) -> Copies:
        """Returns what gives copies to the other machines."""
        return Copies(self)

    def find(self, name: str) -> tuple[int, dict[str, Any]] | None:
        """Returns which machine has a data file, and what is known of it; None if no machine has it.

        Args:
            name: Name in the run.

        Raises:
            OSError: None has it of those that answer, and one does not.
        """
        failure: OSError | None = None
        for machine in self._likely(name):
            try:
                with self._connected(machine) as connection:
                    return machine, connection.ask({"op": "head", "name": name})[0]
            except FileNotFoundError:
                continue
            except OSError as error:
                failure = error
        if failure is not None:  # which may have it
            raise failure
        return None

    def read(self, machine: int, name: str, e_tag: str, offset: int, num_bytes: int) -> bytes | bytearray:
        """Returns bytes of a file of a machine.

        Raises:
            OSError: The machine does not answer, or has that version no more.
        """
        request = {"op": "get", "name": name, "e_tag": e_tag, "offset": offset, "bytes": num_bytes}
        with self._connected(machine) as connection:
            return connection.ask(request)[1]

    def get(self, machine: int, name: str) -> bytes:
        """Returns all of a small file of a machine."""
        whole, size, e_tag = bytearray(), 1, None
        with self._connected(machine) as connection:
            while len(whole) < size:
                request = {"op": "get", "name": name, "e_tag": e_tag, "offset": len(whole), "bytes": _MOST_A_REQUEST}
                answer, part = connection.ask(request)
                size, e_tag = int(answer["size"]), answer["e_tag"]
                if not part and len(whole) < size:
                    raise OSError(errno.EIO, f"{name} is cut short on {self.machines[machine]}")
                whole += part
        return bytes(whole)

    def names(self, machine: int, below: str) -> list[str]:
        """Returns the names in the run that begin with ``below``, of all files of a machine."""
        with self._connected(machine) as connection:
            return [each["path"] for each in connection.ask({"op": "list", "below": below})[0]["objects"]]

    def note(self, where: Mapping[str, int], most_folders: int) -> None:
        """Notes which machines have the files of a save.

        Args:
            where: The machine of each, by its name in the run.
            most_folders: Of how many folders it is known then; the oldest are forgotten.
        """
        known = {**{name: at for name, at in self.where.items() if name not in where}, **where}  # the newest last
        folders = [*dict.fromkeys(name.rpartition("/")[0] for name in reversed([*known]))][:most_folders]
        self.where = {name: at for name, at in known.items() if name.rpartition("/")[0] in folders}

    def names_in(self, folder: str) -> list[str]:
        """Returns the names of data files right in a folder, on whatever machine, as far as that was said."""
        return [last for of, _, last in (name.rpartition("/") for name in self.where) if of == folder]

    def close(self) -> None:
        """Ends all connections that nobody uses now."""
        with self._lock:
            ending, self._idle = [each for of_one in self._idle.values() for each in of_one], {}
        for connection in ending:
            connection.close()

    def _likely(self, name: str) -> Iterator[int]:
        """Yields the other machines, those first that a file is likely on: where it was said to be, or was made."""
        first = self.where.get(name)
        found = _DATA_FILE.fullmatch(name.rpartition("/")[2])
        if first is None and found is not None:
            rank = int(found[1])
            first = next((at for at, machine in enumerate(self.machines) if rank in machine.ranks), None)
        for offset in range(len(self.machines)):
            machine = ((first or 0) + offset) % len(self.machines)
            if machine != self.own:
                yield machine

    @contextmanager
    def _connected(self, machine: int) -> Iterator[_Connection]:
        with self._lock:
            idle = self._idle.setdefault(machine, [])
            connection = idle.pop() if idle else None
        if connection is not None and connection.has_ended():
            connection.close()
            connection = None
        if connection is None:
            connection = self.connect(machine)
        try:
            yield connection
        finally:
            with self._lock:
                idle = self._idle.setdefault(machine, [])
                if connection.is_open and len(idle) < _MOST_IDLE:
                    idle.append(connection)
                else:
                    connection.close()

    def connect(self, machine: int) -> _Connection:
        """Returns a connection of the caller's own.

        Raises:
            OSError: The machine cannot be reached, or does not let this process in.
        """
        return _Connection(self.machines[machine], self.token, self.moves_within_s)


class Copies:
    """Gives copies of files to other machines, for one save. Each goes with it, until there is a commit mark beside it.

    Not thread-safe.

    Args:
        peers: The machines.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._to: dict[int, _Connection] = {}

    def put(self, machine: int, name: str, fd: int) -> None:
        """Gives a machine a copy, which it has compared with the checksums in the file when this returns.

        Args:
            machine: Which one.
            name: Name in the run.
            fd: Descriptor of the file.

        Raises:
            OSError: It refuses, or cannot be reached.
        """
        if machine not in self._to:
            self._to[machine] = self._peers.connect(machine)
        self._to[machine].ask({"op": "reserve", "name": name, "bytes": os.fstat(fd).st_size})
        self._to[machine].ask({"op": "put", "name": name, "stays": False}, fd=fd)

    def end(self) -> None:
        """Ends the connections: copies without a commit mark beside them are freed there."""
        for connection in self._to.values():
            connection.close()
        self._to = {}


def _domain(machines: Sequence[Machine], at: int) -> str | int:
    return machines[at].domain or at


_peers: PerProcess[dict[str, Peers]] = PerProcess(dict)


def meet(run: str, peers: Peers | None) -> None:
    """Notes the machines of a run, in place of those noted before; None for this one alone."""
    before = _peers.get().pop(run, None)
    if before is not None:
        before.close()
    if peers is not None:
        _peers.get()[run] = peers


def end_peers() -> None:
    """Ends the connections of this process to other machines."""
    for run in [*(_peers.if_made() or {})]:
        meet(run, None)


def peers_of(run: str) -> Peers | None:
    """Returns the machines of a run; None if this one is all."""
    known = _peers.if_made()
    return None if known is None else known.get(run)
