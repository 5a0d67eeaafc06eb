# SPDX-License-Identifier: Apache-2.0
"""Runs MooseFS on this machine, from its packages: a master and a chunk server, in a network namespace of their own.

Its chunk servers refuse loopback addresses, so the namespace has another address.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from pathlib import Path

__all__ = ["PACKAGES", "MooseFS"]

PACKAGES = {
    "moosefs-master": "mfsmaster",
    "moosefs-chunkserver": "mfschunkserver",
    "moosefs-client": "mfsmount",
    "iproute2": "ip",
}
"""The packages of Debian, each with a program that is in it."""

_ADDRESS = "10.81.0.1"
_START_LIMIT_S = 30.0
_USER = "WORKING_USER = root\nWORKING_GROUP = root\n"
_MASTER = """\
DATA_PATH = {root}/master
EXPORTS_FILENAME = {root}/exports
MATOML_LISTEN_HOST = {address}
MATOCS_LISTEN_HOST = {address}
MATOCL_LISTEN_HOST = {address}
"""
_CHUNKS = """\
DATA_PATH = {root}/chunks
HDD_CONF_FILENAME = {root}/disks
MASTER_HOST = {address}
CSSERV_LISTEN_HOST = {address}
HDD_LEAVE_SPACE_DEFAULT = 64MiB
"""


class MooseFS:
    """A new file system.

    Args:
        root: An empty folder for everything.

    Attributes:
        mount: The command that mounts it, with ``{at}`` for the path of the mount. It stays in the foreground.
    """

    @staticmethod
    def missing() -> list[str]:
        """Returns the packages that are not installed."""
        return [package for package, program in PACKAGES.items() if shutil.which(program) is None]

    def __init__(self, root: Path) -> None:
        self._log = (root / "log").open("w+")
        self._processes: list[subprocess.Popen[bytes]] = []
        for folder in ("master", "chunks", "disk"):
            (root / folder).mkdir()
        for name, text in (("master.cfg", _USER + _MASTER), ("chunks.cfg", _USER + _CHUNKS)):
            (root / name).write_text(text.format(root=root, address=_ADDRESS))
        (root / "exports").write_text(f"{_ADDRESS}/24 / rw,alldirs,maproot=0\n{_ADDRESS}/24 . rw\n")
        (root / "disks").write_text(f"{root}/disk\n")
        (root / "master" / "metadata.mfs").write_text("MFSM NEW")
        try:
            # The namespace lives as long as this process, or one that has entered it.
            network = f"ip link set lo up && ip address add {_ADDRESS}/24 dev lo && echo up && exec sleep infinity"
            holder = self._start("unshare", "--net", "sh", "-c", network)
            self._wait_for("up\n", "the network namespace")
            enter = ("nsenter", f"--net=/proc/{holder.pid}/ns/net")
            self._start(*enter, "mfsmaster", "-f", "-c", str(root / "master.cfg"), "start")
            self._wait_for("mfsmaster daemon initialized properly", "the master")
            self._start(*enter, "mfschunkserver", "-f", "-c", str(root / "chunks.cfg"), "start")
            self._wait_for("mfschunkserver daemon initialized properly", "the chunk server")
            self.mount = (*enter, "mfsmount", "{at}", "-f", "-H", _ADDRESS)
        except BaseException:  # nobody else could end the processes
            self.close()
            raise

    def _start(self, *command: str) -> subprocess.Popen[bytes]:
        self._processes.append(subprocess.Popen(command, stdout=self._log, stderr=self._log))
        return self._processes[-1]

    def _wait_for(self, words: str, who: str) -> None:
        until = time.monotonic() + _START_LIMIT_S
        while words not in (said := Path(self._log.name).read_text()):
            if self._processes[-1].poll() is not None or time.monotonic() > until:
                raise AssertionError(f"{who} of MooseFS does not start: {said[-3000:]}")
            time.sleep(0.05)

    def close(self) -> None:
        # The master ends a process of its own, which writes its data, only if it may end by itself.
        for process in reversed(self._processes):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_START_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._log.close()
