# SPDX-License-Identifier: Apache-2.0
"""Looks for names of the machine in what a maker wrote."""

from __future__ import annotations

import getpass
import socket
import sys
import zipfile
from pathlib import Path

__all__ = ["check_names"]


def check_names(root: Path) -> None:
    """Fails if a file below ``root`` has the name of this machine, of its user, or of a folder of theirs."""
    names = {socket.gethostname(), str(Path.home()) + "/", f"/{getpass.getuser()}/", str(root.absolute()), "/tmp/"}
    names |= {str(Path(__file__).parents[3]), sys.prefix}
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        parts = [path.read_bytes()]
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                parts += [archive.read(name) for name in archive.namelist()]
        for name in (name for name in names if len(name) > 4):  # a shorter one is in random bytes by chance
            assert not any(name.encode() in part for part in parts), f"{path} names {name}"
