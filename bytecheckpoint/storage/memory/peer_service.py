# SPDX-License-Identifier: Apache-2.0
"""``PeerService``: a holder serves processes of other machines, over TCP.

Each connection has a thread, which waits for the network most of the time. The objects belong to ``Holder``, which is
used under one lock; bytes of objects come and go without it, so that a slow peer delays nobody.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import socket
import threading
from collections.abc import Callable

from bytecheckpoint.native import _core
from bytecheckpoint.storage.memory.machine_memory import Promises
from bytecheckpoint.storage.memory.peer_connection import ObjectsOfPeers, PeerConnection
from bytecheckpoint.storage.memory.peer_frames import HANDSHAKE_S, admit, require_token

__all__ = ["MOST_CONNECTIONS", "MOST_STRANGERS", "PeerService"]

MOST_CONNECTIONS = 4096
MOST_STRANGERS = 1024  # of these, those that have shown no token yet

_MOST_TOKENS = 4  # those of the trainings before this one may still be at their end
_WITHOUT_DESCRIPTORS_S = 0.1
_CHECKING_THREADS = 2  # for one file: a few come at once, and training wants the others
# A machine that lost its power says nothing: its connection ends after so much silence, and what goes with it. So does
# that of a process which is stopped for as long while an answer is on its way to it.
_MOST_SILENCE_MS = 60_000
_ASKS_AFTER_S, _ASKS_AGAIN_S = 20, 10


def check_data_file(fd: int) -> None:
    """Raises if a file of the engine is damaged."""
    _core.check_data_file(fd, "what has arrived", num_threads=_CHECKING_THREADS)


class PeerService:
    """Listens on one address, and serves those who know a token. Thread-safe.

    Args:
        holder: The objects.
        lock: Held around each use of the holder.
        address: IP address of this machine; nobody can connect by another one.
        port: Port; 0 for one that the system chooses.
        check: Called with the descriptor of a data file that has arrived; raises if it is damaged.
        handshake_s: Seconds that a peer has to show that it knows a token.
        most_connections: Those above are closed at once.
        most_strangers: Of those who have shown no token yet, the ones above close the oldest: they keep nobody out.

    Raises:
        ValueError: It is no IP address.
        OSError: This machine has not that address, or the port is in use.
    """

    def __init__(
        self,
        holder: ObjectsOfPeers,
        lock: threading.Lock,
        address: str,
        port: int = 0,
        *,
        check: Callable[[int], object] = check_data_file,
        handshake_s: float = HANDSHAKE_S,
        most_connections: int = MOST_CONNECTIONS,
        most_strangers: int = MOST_STRANGERS,
    ) -> None:
        self.address = address
        self._holder, self._lock, self._check = holder, lock, check
        self._handshake_s, self._most_connections = handshake_s, most_connections
        self._most_strangers = most_strangers
        self._promises = Promises()
        self._tokens: tuple[bytes, ...] = ()
        self._own_lock = threading.Lock()  # of what follows; never held while the lock of the holder is waited for
        self._is_closed = threading.Event()
        self._connections: dict[int, tuple[socket.socket, threading.Thread]] = {}
        self._strangers: dict[int, socket.socket] = {}  # the oldest first
        self._numbers = itertools.count(1)
        self._listener = _listening(address, port)
        self.port: int = self._listener.getsockname()[1]
        self._accepting = threading.Thread(target=self._accept_all, name="bytecheckpoint-peers", daemon=True)
        self._accepting.start()

    @property
    def num_connections(self) -> int:
        """Connections that are open now, also of those who have shown no token yet."""
        with self._own_lock:
            return len(self._connections)

    @property
    def promised_bytes(self) -> int:
        """Bytes of the machine that peers have reserved, and that have not arrived yet."""
        return self._promises.num_bytes

    def allow(self, token: bytes) -> None:
        """Accepts a token from now on, and the last ones before it.

        Raises:
            ValueError: It could be guessed.
        """
        require_token(token)
        with self._own_lock:
            self._tokens = (*(each for each in self._tokens if each != token), token)[-_MOST_TOKENS:]

    def close(self, *, waits: bool = True) -> None:
        """Ends the listener and all connections.

        Args:
            waits: Whether the threads have ended when this returns. The caller does not hold the lock of the holder
                then, since they need it.
        """
        self._is_closed.set()
        with self._own_lock:
            connections = [*self._connections.values()]
            # Whoever waits for it wakes up. Its thread closes it: another file may have the same number at once.
            for peer, _ in [(self._listener, self._accepting), *connections]:
                with contextlib.suppress(OSError):
                    peer.shutdown(socket.SHUT_RDWR)
        if waits:
            for thread in [self._accepting, *(thread for _, thread in connections)]:
                thread.join()

    def _accept_all(self) -> None:
        with self._listener:
            while not self._is_closed.is_set():
                try:
                    peer, _ = self._listener.accept()
                except OSError:  # it has gone already, or there is no descriptor for it, or this service ends
                    self._is_closed.wait(_WITHOUT_DESCRIPTORS_S)
                    continue
                self._begin(peer)

    def _begin(self, peer: socket.socket) -> None:
        number = next(self._numbers)
        thread = threading.Thread(
            target=self._serve, args=(number, peer), name=f"bytecheckpoint-peer-{number}", daemon=True
        )
        with self._own_lock:
            if self._is_closed.is_set() or len(self._connections) >= self._most_connections:
                peer.close()
                return
            try:
                thread.start()
            except RuntimeError:  # the machine has no thread for it
                peer.close()
                return
            self._connections[number] = peer, thread
            self._strangers[number] = peer
            if len(self._strangers) > self._most_strangers:
                with contextlib.suppress(OSError):
                    self._strangers.pop(next(iter(self._strangers))).shutdown(socket.SHUT_RDWR)

    def _serve(self, number: int, peer: socket.socket) -> None:
        try:
            with contextlib.suppress(OSError, ValueError):  # it has gone, or sends what no peer of ours sends
                _set_up(peer)
                if admit(peer, self._tokens, self._handshake_s):
                    with self._own_lock:
                        self._strangers.pop(number, None)
                    PeerConnection(peer, self._holder, self._lock, self._promises, self._check).serve()
        finally:
            with self._own_lock:
                self._strangers.pop(number, None)
                del self._connections[number]
                peer.close()


def _listening(address: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except (socket.gaierror, UnicodeError):
        raise ValueError(f"{address!r} is no IP address") from None
    family, _, _, _, place = found[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind(place)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise OSError(error.errno or errno.EIO, f"listen on {address}, port {port}: {error.strerror}") from None
    return listener


def _set_up(peer: socket.socket) -> None:
    peer.settimeout(None)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _ASKS_AFTER_S)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _ASKS_AGAIN_S)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _MOST_SILENCE_MS)
