# SPDX-License-Identifier: Apache-2.0
"""Machines made of namespaces of this one: each has its own network, mounts, host name and processes.

A bridge in a network namespace of its own is the switch between them: nothing of them reaches the network of this one.
They see one folder at the same path, unless a machine is given a folder of its own there.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Machines", "Network", "why_not"]

PROGRAMS = {
    "ip": "iproute2",
    "nft": "nftables",
    "ethtool": "ethtool",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "unshare": "util-linux",
}
_READY_S = 10.0
_FAR_LINK = Path(__file__).with_name("far_link.py")
# It may read everything, wherever this checkout lies, and write what others may write.
_AS_ANOTHER_USER = (
    "setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups",
    "--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search",
)  # fmt: skip


def why_not() -> str:
    """Returns why this machine cannot make others; "" if it can."""
    missing = sorted({package for program, package in PROGRAMS.items() if shutil.which(program) is None})
    if missing:
        return f"packages are missing: {', '.join(missing)}"
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    may = _run("unshare", "--net", "--mount", "--pid", "--fork", "true", check=False)
    return "" if may else "this system refuses namespaces"


@dataclass(frozen=True)
class Network:
    """How the machines are set up.

    Attributes:
        host: Name of machine ``{}``; one name without braces is that of all.
        resolves_to: What a machine's own name resolves to: its address, or the loopback of Debian's installer.
        apart: Machines whose folder is their own.
        other_uid: Machines on which ranks run as another user.
        other_clock: Machines whose monotonic clock is that of a machine that has run for long.
        ipv6: Whether the machines have addresses of IPv6, and no others.
    """

    host: str = "node{}"
    resolves_to: str = "address"
    apart: frozenset[int] = frozenset()
    other_uid: frozenset[int] = frozenset()
    other_clock: frozenset[int] = frozenset()
    ipv6: bool = False

    def name_of(self, machine: int) -> str:
        return self.host.format(machine)


@dataclass
class Machines:
    """So many machines, as a context manager. ``folder`` is the path at which all see the shared folder."""

    number: int
    base: Path
    network: Network = field(default_factory=Network)

    def __post_init__(self) -> None:
        self.folder, self.shared = self.base / "folder", self.base / "shared"
        self._prefix = f"bcpt{os.getpid()}"
        self._first: dict[int, int] = {}  # pid of the first process of each machine
        self._running: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Machines:
        self.folder.mkdir()
        self.shared.mkdir()
        self.shared.chmod(0o1777)
        try:
            _run("ip", "netns", "add", self._switch)
            _run("ip", "-n", self._switch, "link", "add", "br0", "type", "bridge")
            _run("ip", "-n", self._switch, "link", "set", "br0", "up")
            for machine in range(self.number):
                self._plug_in(machine)
                self._boot(machine)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for machine in list(self._first):
            self._end(machine)
        for process in self._running:
            process.kill()
            process.wait()
        for namespace in (self._switch, *map(self._namespace, range(self.number))):
            _run("ip", "netns", "del", namespace, check=False)

    @property
    def _switch(self) -> str:
        return f"{self._prefix}-sw"

    def _namespace(self, machine: int) -> str:
        return f"{self._prefix}-{machine}"

    def address(self, machine: int) -> str:
        return f"{'fd99::' if self.network.ipv6 else '10.99.0.'}{10 + machine}"

    def _plug_in(self, machine: int) -> None:
        space, port = self._namespace(machine), f"port{machine}"
        _run("ip", "netns", "add", space)
        _run("ip", "-n", space, "link", "set", "lo", "up")
        _run("ip", "-n", self._switch, "link", "add", port, "type", "veth", "peer", "name", "e0", "netns", space)
        _run("ip", "-n", self._switch, "link", "set", port, "master", "br0", "up")
        # Else an address of IPv6 is no use until some seconds have shown that no other machine has it.
        more = ["nodad"] if self.network.ipv6 else []
        _run("ip", "-n", space, "addr", "add", f"{self.address(machine)}/{64 if more else 24}", "dev", "e0", *more)
        _run("ip", "-n", space, "link", "set", "e0", "up")
        # So that packets are as large as on a cable: a filter sees what would travel.
        _run("ip", "netns", "exec", space, "ethtool", "-K", "e0", "tso", "off", "gso", "off", "gro", "off")

    def _boot(self, machine: int) -> None:
        """Starts the first process of a machine; when it ends, all others of the machine do."""
        name = self.network.name_of(machine)
        hosts = self.base / f"hosts{machine}"
        lines = ["127.0.0.1 localhost"]
        others = range(self.number) if "{}" in self.network.host else [machine]
        lines += [f"{self.address(other)} {self.network.name_of(other)}" for other in others if other != machine]
        own = self.address(machine) if self.network.resolves_to == "address" else "127.0.1.1"
        hosts.write_text("\n".join([*lines, f"{own} {name}", ""]))
        seen = self.shared
        if machine in self.network.apart:
            seen = self.base / f"own{machine}"
            seen.mkdir(exist_ok=True)  # a disk outlives its machine
            seen.chmod(0o1777)
        ready = self.base / f"ready{machine}"
        script = (
            f"hostname {name} && mount -t tmpfs tmpfs /dev/shm && mount --bind {seen} {self.folder} && "
            f"mount --bind {hosts} /etc/hosts && touch {ready} && exec sleep 86400"
        )
        clock = ["--time", "--monotonic", "5000000"] if machine in self.network.other_clock else []
        process = subprocess.Popen(
            ["ip", "netns", "exec", self._namespace(machine), "unshare", "--uts", "--ipc", "--mount", "--pid", *clock,
             "--fork", "--kill-child", "--mount-proc", "bash", "-c", script],
            text=True,
        )  # fmt: skip
        self._running.append(process)
        end = time.monotonic() + _READY_S
        while not ready.exists():
            assert time.monotonic() < end, f"machine {machine} does not start"
            time.sleep(0.02)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        self._first[machine] = int(children[0])

    def start(self, machine: int, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Starts a program on a machine."""
        user = [*_AS_ANOTHER_USER] if machine in self.network.other_uid else []
        self._running.append(
            subprocess.Popen(
                ["nsenter", "-t", str(self._first[machine]), "--all", *user, *command], env=dict(environment), text=True
            )
        )

    def in_network(self, machine: int) -> tuple[str, ...]:
        """Returns what comes before a command that is to run in the network of a machine alone, as a server there."""
        return ("ip", "netns", "exec", self._namespace(machine))

    # What happens to a machine.

    def boot(self, machine: int) -> None:
        """Starts a machine again that was powered off: nothing is in its memory."""
        (self.base / f"ready{machine}").unlink()
        self._boot(machine)
        _run("ip", "-n", self._switch, "link", "set", f"port{machine}", "up")

    def power_off(self, machine: int) -> None:
        """Ends all of a machine at once. Nobody on the network hears of it."""
        self.unplug(machine)
        self._end(machine)

    def _end(self, machine: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._first.pop(machine), signal.SIGKILL)

    def unplug(self, machine: int) -> None:
        _run("ip", "-n", self._switch, "link", "set", f"port{machine}", "down")

    def stop(self, machine: int) -> None:
        """Stops all processes of a machine; its kernel goes on."""
        _run("nsenter", "-t", str(self._first[machine]), "--pid", "--mount", "bash", "-c", "kill -STOP -1")

    def cut(self, machine: int, *ways: str) -> None:
        """Drops the packets that come ``in`` or go ``out``."""
        for way in ways:
            self._drop(machine, way, "")

    def let_through(self, machine: int) -> None:
        """Ends what ``cut``, ``lose`` and ``swallow`` have begun."""
        _run(*self.in_network(machine), "nft", "delete", "table", "inet", "t")

    def lose(self, machine: int, percent: int) -> None:
        """Drops so many packets of a hundred, in each direction."""
        for way in ("in", "out"):
            self._drop(machine, way, f"numgen random mod 100 < {percent}")

    def limit(self, machine: int, bytes_per_s: int) -> None:
        """Lets no more bytes out of a machine."""
        shape = ("tbf", "rate", f"{8 * bytes_per_s}bit", "burst", "32kb", "latency", "400ms")
        _run(*self.in_network(machine), "tc", "qdisc", "add", "dev", "e0", "root", *shape)

    def move_away(self, machine: int, seconds: float) -> None:
        """Makes each packet to or from a machine take so many seconds longer."""
        # What goes through a program must have its checksum.
        for each in range(self.number):
            _run(*self.in_network(each), "ethtool", "-K", "e0", "tx", "off")
        inner, outer = f"far{machine}", f"end{machine}"
        _run("ip", "-n", self._switch, "link", "add", inner, "type", "veth", "peer", "name", outer)
        _run("ip", "-n", self._switch, "link", "set", f"port{machine}", "nomaster")
        _run("ip", "-n", self._switch, "link", "set", inner, "master", "br0", "up")
        _run("ip", "-n", self._switch, "link", "set", outer, "up")
        program = [sys.executable, str(_FAR_LINK), f"port{machine}", outer, str(seconds)]
        command = ["ip", "netns", "exec", self._switch, *program]
        relay = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._running.append(relay)
        assert relay.stdout is not None
        with relay.stdout as said:
            assert said.readline() == "ready\n"

    def swallow(self, machine: int, more_than_bytes: int) -> None:
        """Drops the packets that are larger, in each direction, as a switch with a smaller MTU does."""
        for way in ("in", "out"):
            self._drop(machine, way, f"meta length > {more_than_bytes}")

    def _drop(self, machine: int, way: str, which: str) -> None:
        hook, interface = {"in": ("input", "iifname"), "out": ("output", "oifname")}[way]
        rules = (
            f'add table inet t; add chain inet t {way} {{ type filter hook {hook} priority 0; }}; '
            f'add rule inet t {way} {interface} "e0" {which} drop'
        )  # fmt: skip
        _run(*self.in_network(machine), "nft", rules)


def _run(*command: str, check: bool = True) -> bool:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not check or done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.returncode == 0
