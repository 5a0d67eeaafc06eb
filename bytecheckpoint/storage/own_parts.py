# SPDX-License-Identifier: Apache-2.0
"""The note that a folder has the part of some ranks alone, and that machines with disks of their own have the others.

It is ``.bcp/part.txt``: the id of the save, then the ranks. It is written once all of these machines have committed, so
that with it the folder counts for a prune of this disk, and without it an older one is still needed.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from bytecheckpoint.errors import StorageError
from bytecheckpoint.storage.names import RECORDS
from bytecheckpoint.storage.small_files import made_folder, read_small_file, write_small_file

__all__ = ["note_own_part", "ranks_of_own_part"]

_NAME = "part.txt"
_MOST_BYTES = 1 << 20
_NOTE = re.compile(r"([0-9a-f]{32})\n((?:\d{1,9} )*\d{1,9})\n")


def note_own_part(folder: Path, save_id: str, ranks: Collection[int]) -> None:
    """Durably notes whose files a folder has.

    Args:
        folder: The checkpoint, which all machines have committed.
        save_id: Id of its save, 32 hex digits.
        ranks: The ranks that have saved to this disk.

    Raises:
        StorageError: The file system refused.
    """
    made_folder(folder / RECORDS)
    write_small_file(folder / RECORDS / _NAME, f"{save_id}\n{' '.join(map(str, sorted(ranks)))}\n".encode())


def ranks_of_own_part(folder: Path, save_id: str) -> frozenset[int] | None:
    """Returns the ranks whose files a folder has; None if nothing is noted of that save."""
    try:
        text = read_small_file(folder / RECORDS / _NAME, _MOST_BYTES) or b""
    except StorageError:  # it is no note of ours
        return None
    found = _NOTE.fullmatch(text.decode(errors="replace"))
    return frozenset(map(int, found[2].split())) if found is not None and found[1] == save_id else None
