# SPDX-License-Identifier: Apache-2.0
"""Runs a GlusterFS volume of three replicas on this machine, from its package.

Without its management daemon, which refuses loopback addresses: the bricks and the mounts get the graphs of translators
that the daemon would give them for a new volume.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

from support.ports import free_port

__all__ = ["PACKAGES", "GlusterFS"]

PACKAGES = {"glusterfs-server": "glusterfsd", "glusterfs-client": "glusterfs"}
"""The packages of Debian, each with a program that is in it."""

NUM_REPLICAS = 3
# Seconds after which a mount gives a silent brick up. By default 42.
_PING_TIMEOUT_S = 10
_START_LIMIT_S = 30.0


def _graph(*translators: tuple[str, str, dict[str, object]]) -> str:
    """Returns translators in their own notation, each one above the one before it."""
    text, below = "", ""
    for name, kind, options in translators:
        lines = [f"    option {key} {value}" for key, value in options.items() if key != "subvolumes"]
        subvolumes = options.get("subvolumes", below)
        lines += [f"    subvolumes {subvolumes}"] if subvolumes else []
        text += "\n".join([f"volume {name}", f"    type {kind}", *lines, "end-volume\n"])
        below = name
    return text


class GlusterFS:
    """A new volume.

    Args:
        root: An empty folder for everything.

    Attributes:
        mount: The command that mounts it; the path of the mount comes last. It stays in the foreground.
        bricks: The processes of its three bricks.
    """

    @staticmethod
    def missing() -> list[str]:
        """Returns the packages that are not installed."""
        return [package for package, program in PACKAGES.items() if shutil.which(program) is None]

    def __init__(self, root: Path) -> None:
        self._root = root
        self._ports = [free_port() for _ in range(NUM_REPLICAS)]
        self.bricks: list[subprocess.Popen[bytes]] = []
        names = [f"client-{number}" for number in range(NUM_REPLICAS)]
        tcp = {"transport-type": "socket", "transport.address-family": "inet"}
        clients = "".join(
            _graph((name, "protocol/client", {
                **tcp, "remote-host": "127.0.0.1", "remote-port": port, "remote-subvolume": "brick",
                "ping-timeout": _PING_TIMEOUT_S,
            }))
            for name, port in zip(names, self._ports, strict=True)
        )  # fmt: skip
        layers = _graph(
            ("replicate", "cluster/replicate", {
                "quorum-type": "auto", "afr-pending-xattr": ",".join(names), "subvolumes": " ".join(names),
            }),
            ("distribute", "cluster/distribute", {}),
            ("write-behind", "performance/write-behind", {}),
            ("open-behind", "performance/open-behind", {}),
            ("quick-read", "performance/quick-read", {}),
            ("md-cache", "performance/md-cache", {}),
            ("statistics", "debug/io-stats", {}),
        )  # fmt: skip
        (root / "client.vol").write_text(clients + layers)
        self.mount = ("glusterfs", "-N", "-f", str(root / "client.vol"), "-l", str(root / "client.log"))
        try:
            for number in range(NUM_REPLICAS):
                self.bricks.append(self.start(number))
        except BaseException:  # nobody else could end the processes
            self.close()
            raise

    def start(self, number: int) -> subprocess.Popen[bytes]:
        """Starts a brick, also one that has died. Returns its process."""
        data = self._root / f"brick-{number}"
        (data / ".glusterfs").mkdir(parents=True, exist_ok=True)
        volume = self._root / f"brick-{number}.vol"
        log = volume.with_suffix(".log")
        volume.write_text(_graph(
            ("posix", "storage/posix", {"directory": data}),
            ("access", "features/access-control", {}),
            ("locks", "features/locks", {}),
            ("threads", "performance/io-threads", {}),
            ("index", "features/index", {"index-base": data / ".glusterfs" / "indices"}),
            ("brick", "debug/io-stats", {}),
            ("server", "protocol/server", {
                "transport-type": "socket", "transport.address-family": "inet",
                "transport.socket.bind-address": "127.0.0.1",
                "transport.socket.listen-port": self._ports[number], "auth.addr.brick.allow": "*",
            }),
        ))  # fmt: skip
        process = subprocess.Popen(["glusterfsd", "-N", "-f", str(volume), "-l", str(log)])
        until = time.monotonic() + _START_LIMIT_S
        # In /proc, a line a socket: nobody connects, so the brick does not take the test for a client.
        listens = f":{self._ports[number]:04X} 00000000:0000 0A"
        while listens not in Path("/proc/net/tcp").read_text():
            if process.poll() is not None or time.monotonic() > until:
                process.kill()
                raise AssertionError(f"a brick does not start: {log.read_text()[-3000:]}")
            time.sleep(0.05)
        return process

    def kill(self, number: int) -> None:
        self.bricks[number].kill()
        self.bricks[number].wait()

    def close(self) -> None:
        for process in self.bricks:
            process.kill()
            process.wait()
