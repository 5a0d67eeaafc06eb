# SPDX-License-Identifier: Apache-2.0
"""A piece of a target that is one file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from bytecheckpoint.errors import CorruptCheckpointError
from bytecheckpoint.native import _core
from bytecheckpoint.storage.small_files import replaced_by

__all__ = ["write_file"]


def write_file(file: Path, verify: bool, export: Callable[[str], tuple[int, int]]) -> None:
    """Writes a file, which gets its name when it is whole and on disk.

    Args:
        file: Its path.
        verify: Whether to read it back, past the page cache, and compare it.
        export: Writes it to a path, and returns its bytes and their CRC.

    Raises:
        CorruptCheckpointError: What was read back is not what was written.
    """
    with replaced_by(_core.Directory(str(file.parent)), file.name, f"{file.name}.part") as part:
        _, crc = export(str(part))
        if verify:
            found = _core.checksum_of_file(str(part.parent), part.name, None)
            if found != crc:
                raise CorruptCheckpointError(
                    f"convert({file}): written with CRC {crc}, read back with {found}", str(file)
                )
