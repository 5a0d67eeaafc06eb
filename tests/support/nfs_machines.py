# SPDX-License-Identifier: Apache-2.0
"""Runs an NFS server and its clients on this machine, each with a Linux kernel of its own.

The kernels are user-mode ones, so they are processes; each sees the files of this machine. They are joined by a bridge
in a network namespace of their own. Functions run on a client in a fork server there.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from support.fork_server import TESTS, ForkServer

__all__ = ["MEETING", "MEETING_ENV", "PACKAGES", "Client", "NfsMachines"]

KERNEL = "linux.uml"
BENCHMARKS = TESTS.parent / "benchmarks"
MODULES = Path("/usr/lib/uml/modules")
PACKAGES = {
    "user-mode-linux": KERNEL,
    "nfs-kernel-server": "rpc.nfsd",
    "nfs-common": "mount.nfs",
    "rpcbind": "rpcbind",
    "kmod": "modprobe",
    "iproute2": "ip",
    "e2fsprogs": "mkfs.ext4",
}
"""The packages of Debian, each with a program that is in it."""

_HOST = "10.82.0.1"
_SERVER = "10.82.0.2"
_CLIENTS = ("10.82.0.3", "10.82.0.4")
MEETING = f"tcp://{_CLIENTS[0]}:29500"
MEETING_ENV = {"GLOO_SOCKET_IFNAME": "vec0"}
"""Where ranks on the clients meet, and what lets gloo find its address there."""
_DISK_BYTES = 4 << 30
_START_LIMIT_S = 180.0
_DIES_WITH_US = ("setpriv", "--pdeathsig", "KILL")
_CLONE_NEWNET = 0x40000000

# What every machine does first. Its root is this machine's, so what it changes lies on file systems of its own.
_BEGIN = """\
#!/bin/bash
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8
mount -t proc none /proc; mount -t sysfs none /sys; mount -t tmpfs none /run; mount -t tmpfs none /var/lib/nfs
mountpoint -q /dev || mount -t devtmpfs none /dev; mkdir -p /dev/shm /run/rpcbind /run/lock
mount -t tmpfs -o mode=1777 none /dev/shm
mkdir -p /var/lib/nfs/sm /var/lib/nfs/sm.bak /var/lib/nfs/v4recovery /var/lib/nfs/nfsdcld /run/rpc_pipefs
touch /var/lib/nfs/etab /var/lib/nfs/rmtab /var/lib/nfs/state
hostname {name}
ip link set lo up; ip address add {address}/24 dev vec0; ip link set vec0 up
for module in sunrpc lockd nfs nfsv3 nfsv4 nfsd; do modprobe -d {root} $module; done
rpcbind -w; rpc.statd --no-notify
"""
# A lease of ten seconds instead of 90, and as long a grace: the server gives no locks for so long after its start.
_SERVE = """\
mkdir /run/export; mount -t ext4 /dev/ubda /run/export; mount -t nfsd none /proc/fs/nfsd
echo 10 > /proc/fs/nfsd/nfsv4gracetime; echo 10 > /proc/fs/nfsd/nfsv4leasetime
sysctl -qw fs.nfs.nlm_grace_period=10
exportfs -i -o rw,sync,no_root_squash,no_subtree_check,insecure,fsid=0 {network}:/run/export
mount -t rpc_pipefs none /run/rpc_pipefs; nfsdcld -p /run/rpc_pipefs -s /var/lib/nfs/nfsdcld
rpc.nfsd 8; rpc.mountd
echo THE SERVER IS UP
exec sleep infinity
"""
_WORK = """\
for try in $(seq 60); do mount -t nfs -o {options} {server}:{export} {view} && break; sleep 1; done
mountpoint -q {view} || exec sleep infinity
cd {tests}
{python} -P -c "
import socket, subprocess
lock = subprocess.Popen(['flock', '{view}', 'true'])  # waits for the end of the grace, meanwhile
import torch
from support.fork_server import serve
lock.wait()
serve(socket.create_connection(('{host}', {port})).detach())"
halt -f
"""


class Client(ForkServer):
    """The tests' side of a fork server on a client; see there."""

    def __init__(self, connection: Connection, process: subprocess.Popen[bytes]) -> None:
        self._connection, self._process = connection, process
        self._info: dict[str, Any] | None = None


class NfsMachines:
    """A server of a new file system, and two clients that have mounted it.

    Args:
        root: An empty folder for everything.
        options: Of the mount, such as ``vers=4.2,hard``.
        package: Directory that holds the build of the package that the clients use.

    Attributes:
        view: Where both clients have mounted the file system.
        clients: What runs functions on each of them.
    """

    @staticmethod
    def missing() -> list[str]:
        """Returns the packages that are not installed."""
        return [package for package, program in PACKAGES.items() if shutil.which(program) is None]

    def __init__(self, root: Path, options: str, package: Path) -> None:
        self._root = root
        self.view = root / "view"
        self.view.mkdir()
        # modprobe looks for modules below a folder that this machine may not have.
        (root / "lib").mkdir()
        (root / "lib" / "modules").symlink_to(MODULES)
        self._undo = contextlib.ExitStack()
        try:
            self._start(options, package)
        except BaseException:  # nobody else could end the processes
            self.close()
            raise

    def _start(self, options: str, package: Path) -> None:
        machines = {"server": _SERVER, "client-0": _CLIENTS[0], "client-1": _CLIENTS[1]}
        self._make_network(len(machines))
        disk = self._root / "disk.img"
        with disk.open("wb") as file:
            file.truncate(_DISK_BYTES)
        subprocess.run(["mkfs.ext4", "-q", "-F", str(disk)], check=True)
        serve = _SERVE.format(network=f"{_HOST}/24")
        server = self._boot(0, "server", _SERVER, serve, "512M", f"ubd0={disk}")
        self._wait_for("THE SERVER IS UP", "server", server)
        with self._listen() as listening:
            environment = f"export OPENBLAS_NUM_THREADS=1 PYTHONPATH={package}:{TESTS}:{BENCHMARKS}\n"
            work = environment + _WORK.format(
                options=options, server=_SERVER, export="/" if "vers=4" in options else "/run/export", view=self.view,
                tests=TESTS, python=sys.executable, host=_HOST, port=listening.getsockname()[1],
            )  # fmt: skip
            booted = {
                address: self._boot(number, f"client-{number - 1}", address, work, "2G")
                for number, address in enumerate(_CLIENTS, 1)
            }
            until = time.monotonic() + _START_LIMIT_S
            connections: dict[str, Connection] = {}
            while len(connections) < len(_CLIENTS):
                try:
                    peer, (address, _) = listening.accept()
                except TimeoutError:
                    for number, process in enumerate(booted.values()):
                        self._check(f"client-{number}", process, until)
                    continue
                peer.setblocking(True)
                connections[address] = self._undo.enter_context(Connection(peer.detach()))
        first, second = (Client(connections[address], booted[address]) for address in _CLIENTS)
        self.clients = (first, second)

    def _make_network(self, num_machines: int) -> None:
        """Makes the namespace, which lives as long as a process in it."""
        taps = "".join(
            f"ip tuntap add mode tap tap{number} && ip link set tap{number} master bridge up && "
            for number in range(num_machines)
        )
        network = f"ip link add bridge type bridge && ip address add {_HOST}/24 dev bridge && ip link set bridge up"
        script = f"{network} && {taps}echo up && exec sleep infinity"
        command = [*_DIES_WITH_US, "unshare", "--net", "sh", "-c", script]
        self._holder = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self._undo.callback(self._end, self._holder)
        assert self._holder.stdout is not None
        said = self._holder.stdout.readline()
        assert said == b"up\n", f"no network namespace: {said.decode()}"

    def _listen(self) -> socket.socket:
        """Returns a socket that listens in the namespace: a socket stays in the one in which it was made."""
        made: list[socket.socket | OSError] = []

        def listen() -> None:
            libc = ctypes.CDLL(None, use_errno=True)
            with Path(f"/proc/{self._holder.pid}/ns/net").open() as namespace:
                if libc.setns(namespace.fileno(), _CLONE_NEWNET):
                    made.append(OSError(ctypes.get_errno(), "setns"))
                    return
            made.append(socket.create_server((_HOST, 0)))

        # The thread that enters the namespace ends with that.
        entering = threading.Thread(target=listen)
        entering.start()
        entering.join()
        if isinstance(made[0], OSError):
            raise made[0]
        made[0].settimeout(1.0)
        return made[0]

    def _boot(
        self, number: int, name: str, address: str, work: str, memory: str, *more: str
    ) -> subprocess.Popen[bytes]:
        init = self._root / f"{name}.sh"
        init.write_text(_BEGIN.format(name=name, address=address, root=self._root) + work)
        init.chmod(0o755)
        command = [
            *_DIES_WITH_US, "nsenter", f"--net=/proc/{self._holder.pid}/ns/net", KERNEL,
            "rootfstype=hostfs", "rootflags=/", "rw", "quiet",
            f"mem={memory}", f"init={init}", f"umid={name}", f"uml_dir={self._root}/", "con=null", "con0=fd:0,fd:1",
            f"vec0:transport=tap,ifname=tap{number},depth=64,gro=1,mac=02:82:00:00:00:0{number + 1}", *more,
        ]  # fmt: skip
        with (self._root / f"{name}.log").open("wb") as log:
            # Its memory is a file of this folder. It has processes of its own, which its group ends with it.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "TMPDIR": "/dev/shm"},
                start_new_session=True,
            )
        self._undo.callback(self._end, process, os.killpg)
        return process

    def _wait_for(self, words: str, name: str, process: subprocess.Popen[bytes]) -> None:
        until = time.monotonic() + _START_LIMIT_S
        while words not in (self._root / f"{name}.log").read_text(errors="replace"):
            self._check(name, process, until)
            time.sleep(0.1)

    def _check(self, name: str, process: subprocess.Popen[bytes], until: float) -> None:
        """Raises AssertionError, with what the machine says, if it has ended or takes too long."""
        if process.poll() is not None or time.monotonic() > until:
            said = (self._root / f"{name}.log").read_text(errors="replace")
            raise AssertionError(f"the machine {name} does not start: {said[-3000:]}")

    @staticmethod
    def _end(process: subprocess.Popen[bytes], kill: Any = os.kill) -> None:
        with contextlib.suppress(ProcessLookupError):
            kill(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()

    def close(self) -> None:
        self._undo.close()
