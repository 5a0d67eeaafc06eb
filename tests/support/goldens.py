# SPDX-License-Identifier: Apache-2.0
"""The golden checkpoints, unpacked. ``tests/interop/golden`` has an archive for each writer of them.

``python tests/support/goldens.py ARCHIVE FOLDER`` adds what lies in a folder to an archive, or makes it. Its names are
those below ``GOLDEN``, as in ``stock/2.15.0-plain/.metadata``. What an archive has already is not replaced.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

__all__ = ["GOLDEN"]

_ROOT = Path(__file__).parents[2]
_ARCHIVES = _ROOT / "tests" / "interop" / "golden"


def _unpacked() -> Path:
    """Unpacks all archives, unless that was done, and returns the folder. Processes may do so at once."""
    archives = sorted(_ARCHIVES.glob("*.tar.xz"))
    assert archives, f"{_ARCHIVES} has no archives"
    digest = hashlib.sha256(b"".join(archive.read_bytes() for archive in archives)).hexdigest()[:16]
    folder = _ROOT / "build" / "golden" / digest
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as made:
            for archive in archives:
                with tarfile.open(archive) as members:
                    members.extractall(Path(made, "all"), filter="data")
            try:
                Path(made, "all").rename(folder)
            except OSError:  # another process was faster
                assert folder.exists()
    return folder


def _add(archive: Path, folder: Path) -> None:
    with tempfile.TemporaryDirectory() as made:
        if archive.exists():
            with tarfile.open(archive) as members:
                members.extractall(made, filter="data")
        for path in sorted(folder.rglob("*")):
            target = Path(made, path.relative_to(folder))
            if path.is_file():
                assert not target.exists(), f"{archive} has {target.name} already"
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
        with tarfile.open(archive, "w:xz") as members:
            for path in sorted(Path(made).rglob("*")):
                if path.is_file():
                    member = tarfile.TarInfo(path.relative_to(made).as_posix())  # of nobody, and of no time
                    member.size = path.stat().st_size
                    with path.open("rb") as content:
                        members.addfile(member, content)


GOLDEN = _unpacked() if __name__ != "__main__" else _ARCHIVES

if __name__ == "__main__":
    _add(Path(sys.argv[1]), Path(sys.argv[2]))
