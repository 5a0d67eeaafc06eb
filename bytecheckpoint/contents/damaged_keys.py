# SPDX-License-Identifier: Apache-2.0
"""Names the keys whose bytes are damaged, and the other steps that have the damaged file. Needs no torch.

The engine checks blocks of files, and knows neither.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from bytecheckpoint.errors import CheckpointError, CorruptCheckpointError
from bytecheckpoint.listing import listed
from bytecheckpoint.native import _core
from bytecheckpoint.storage.paths import is_local
from bytecheckpoint.storage.shared_files import others_that_have

if TYPE_CHECKING:
    from bytecheckpoint.native import _C

__all__ = ["naming_keys"]

_BLOCK = re.compile(r", offset=(\d+), (\d+) bytes\)")
_KEYS = "; the block has bytes of "
_STEPS = "; it is the same file in "
_MOST_NAMED = 5


@contextmanager
def naming_keys(checkpoint: _core.Checkpoint | _C.Checkpoint) -> Iterator[None]:
    """If the ``with`` block finds a damaged file, adds to the error which keys have bytes in the damaged block.

    Only then are the chunks of the checkpoint searched, once. Other steps that have the same file are named, too.

    Args:
        checkpoint: What is read; of a view, the keys are those of the view.

    Raises:
        CorruptCheckpointError: The error of the ``with`` block.
    """
    try:
        yield
    except CorruptCheckpointError as error:
        found = _BLOCK.search(str(error))
        if found is not None and error.path and _KEYS not in str(error):
            begin, num_bytes = int(found[1]), int(found[2])
            keys = _keys_in(checkpoint, os.path.basename(error.path), begin, begin + num_bytes)  # noqa: PTH119
            if keys:
                error.args = (f"{error}{_KEYS}{listed([*map(repr, keys)], _MOST_NAMED)}",)
        if error.path and is_local(error.path) and _STEPS not in str(error):
            others = others_that_have(Path(error.path).parent, os.path.basename(error.path))  # noqa: PTH119
            if others:
                error.args = (f"{error}{_STEPS}{listed(others, _MOST_NAMED)}",)
        raise


def _keys_in(checkpoint: _core.Checkpoint | _C.Checkpoint, file: str, begin: int, end: int) -> list[str]:
    """Returns the keys that have a record in a range of a file; none if that cannot be found out."""
    try:
        chunks = checkpoint.chunks()
    except CheckpointError:
        return []
    return [
        name
        for (name, *_), of_item in zip(checkpoint.contents(), chunks, strict=True)
        if any(chunk[2] == file and chunk[3] < end and begin < chunk[3] + chunk[4] for chunk in of_item)
    ]
