# SPDX-License-Identifier: Apache-2.0
"""File systems that start in seconds, each as two machines see it: two mounts of one storage, or one mount twice."""

from __future__ import annotations

import contextlib
import socket
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from support.fork_server import LIMIT_S, ForkServer
from support.mounts import file_system_in_file, fuse_mounted, mounted

__all__ = ["KINDS", "Ground", "Machines", "Mount", "sshfs", "untested"]

_SFTP_SERVER = "/usr/lib/openssh/sftp-server"


Machines = tuple[ForkServer, ForkServer]
"""What runs functions on each of the two machines."""


@dataclass(frozen=True)
class Ground:
    """A mounted file system.

    Attributes:
        kind: Its name in ``KINDS``.
        views: The directory as each of two machines sees it.
        machines: What runs functions on each of them, if they have kernels of their own; with failpoints.
    """

    kind: str
    views: tuple[Path, Path]
    machines: Machines | None = None


Mount = Callable[[contextlib.ExitStack, Path], tuple[Path, Path]]


def untested(kind: str) -> str:
    return f"THE FILE SYSTEM {kind}"


def _fuse(kind: str, *command: str) -> Mount:
    """Returns what mounts a FUSE file system twice. ``{real}`` in the command is the storage, ``{at}`` the mount."""

    def mount(stack: contextlib.ExitStack, root: Path) -> tuple[Path, Path]:
        (root / "real").mkdir(exist_ok=True)
        views = root / "a", root / "b"
        for at in views:
            filled = [part.format(real=root / "real", at=at) for part in command]
            stack.enter_context(fuse_mounted(at, *filled, untested=untested(kind)))
        return views

    return mount


def sshfs(*options: str) -> Mount:
    """Returns what mounts twice through servers of SFTP of its own, without ssh, with more ``options``."""

    def mount(stack: contextlib.ExitStack, root: Path) -> tuple[Path, Path]:
        (root / "real").mkdir()
        views = root / "a", root / "b"
        for at in views:
            ours, theirs = socket.socketpair()
            with ours, theirs:
                server = subprocess.Popen([_SFTP_SERVER], stdin=theirs, stdout=theirs)
                stack.callback(server.wait, LIMIT_S)
                command = ("sshfs", "-f", "-o", "passive", *options, f":{root}/real", str(at))
                stack.enter_context(fuse_mounted(at, *command, untested=untested("sshfs"), stdin=ours, stdout=ours))
        return views

    return mount


def _gocryptfs(stack: contextlib.ExitStack, root: Path) -> tuple[Path, Path]:
    (root / "word").write_text("not a secret")
    (root / "real").mkdir()
    word = ("-q", "-passfile", str(root / "word"))
    # Few rounds of the key derivation: the password protects nothing.
    subprocess.run(["gocryptfs", "-init", "-scryptn", "10", *word, str(root / "real")], timeout=LIMIT_S, check=False)
    return _fuse("gocryptfs", "gocryptfs", "-fg", "-sharedstorage", *word, "{real}", "{at}")(stack, root)


def _disk(kind: str, *command: str, mounted_as: str = "") -> Mount:
    """Returns what mounts a new disk in a file, which takes room as it is written to."""

    def mount(stack: contextlib.ExitStack, root: Path) -> tuple[Path, Path]:
        image = root / "disk.img"
        file_system_in_file(image, _DISK_BYTES, *command, untested=untested(kind))
        at = stack.enter_context(
            mounted(root / "at", "-t", mounted_as or kind, "-o", "loop", str(image), untested=untested(kind))
        )
        return at, at

    return mount


def _overlayfs(stack: contextlib.ExitStack, root: Path) -> tuple[Path, Path]:
    # An overlay cannot lie on another one, as the root of a container may be.
    below, _ = _disk("overlayfs", "mkfs.ext4", "-q", mounted_as="ext4")(stack, root)
    for name in ("lower", "upper", "work"):
        (below / name).mkdir()
    options = f"lowerdir={below}/lower,upperdir={below}/upper,workdir={below}/work"
    at = stack.enter_context(
        mounted(root / "over", "-t", "overlay", "overlay", "-o", options, untested=untested("overlayfs"))
    )
    return at, at


_DISK_BYTES = 4 << 30

KINDS: dict[str, Mount] = {
    "bindfs": _fuse("bindfs", "bindfs", "-f", "{real}", "{at}"),
    "bindfs, O_DIRECT forwarded": _fuse("bindfs", "bindfs", "-f", "--forward-odirect=512", "{real}", "{at}"),
    # Creates in a branch with less than 4 GB of room are refused by default, as on a full disk.
    "mergerfs": _fuse("mergerfs", "mergerfs", "-f", "-o", "minfreespace=0", "{real}", "{at}"),
    "unionfs-fuse": _fuse("unionfs-fuse", "unionfs", "-f", "{real}=RW", "{at}"),
    "sshfs": sshfs(),
    "gocryptfs": _gocryptfs,
    "overlayfs": _overlayfs,
    "xfs": _disk("xfs", "mkfs.xfs", "-q"),
    "btrfs": _disk("btrfs", "mkfs.btrfs", "-q"),
}
"""The name of each kind, and what mounts it in an empty directory and returns its two views."""
