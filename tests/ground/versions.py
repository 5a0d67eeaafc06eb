# SPDX-License-Identifier: Apache-2.0
"""Finds out which version of a file system a test has run on."""

from __future__ import annotations

import platform
import re
import subprocess

from support.fork_server import ForkServer
from support.seaweedfs import find_weed

from ground.mounts import Ground

__all__ = ["version"]

_PROGRAMS = {
    "bindfs": "bindfs --version",
    "mergerfs": "mergerfs --version",
    "unionfs-fuse": "unionfs --version",
    "sshfs": "sshfs --version",
    "gocryptfs": "gocryptfs -version",
    "GlusterFS": "glusterfs --version",
    "MooseFS": "mfsmount --version",
    "CephFS": "ceph-fuse --version",
    "SeaweedFS mount": f"{find_weed() or 'weed'} version",
    "s3fs": "s3fs --version",
    "rclone": "rclone version",
}
"""By the first words of a kind, the command that says the version of its program. All else is in the kernel."""


def version(ground: Ground, machine: ForkServer) -> str:
    """Returns the version of the program, or of the machine's kernel."""
    kind = ground.kind.partition(",")[0]
    if kind not in _PROGRAMS:
        return f"Linux {machine.run(platform.release).unwrap().partition('-')[0]}"
    said = subprocess.run(_PROGRAMS[kind].split(), capture_output=True, text=True, check=False)
    # Some also name the version of libfuse, in a line before or after their own.
    own = [
        line
        for line in (said.stdout + said.stderr).splitlines()
        if not line.startswith(("fusermount", "FUSE", "using FUSE"))
    ]
    number = re.search(r"\d+\.\d+(\.\d+)*", "\n".join(own))
    assert number, f"{_PROGRAMS[kind]} says no version: {said.stdout}{said.stderr}"
    return number[0]
