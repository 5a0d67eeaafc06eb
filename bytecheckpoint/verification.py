# SPDX-License-Identifier: Apache-2.0
"""The check of a whole checkpoint; needs no torch."""

from __future__ import annotations

import os
from collections.abc import Callable

from bytecheckpoint import _core
from bytecheckpoint._in_use import reading
from bytecheckpoint.config import Config
from bytecheckpoint.local_path import path_to_read
from bytecheckpoint.report import Problem, VerifyReport
from bytecheckpoint.wrong_path import explaining

__all__ = ["verify"]


def verify(
    path: str | os.PathLike[str] | None,
    *,
    config: Config | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> VerifyReport:
    """Reads every byte of a checkpoint and compares it with its checksum.

    Also proves that the two parts of ``.metadata`` say the same, that the archives that stock readers read around the
    elements of each tensor are what they must be, and that every element of every tensor is in one chunk; and looks for
    data files that nobody refers to. Of a checkpoint of stock DCP the CRCs in its records are compared; the report says
    how many bytes have none. Local; opens nothing for writing and takes no lock, so it is in no save's way; goes on
    after a problem, so that one run finds all of them.

    Args:
        path: Directory of a checkpoint.
        config: ``direct_io``, ``ring_bytes`` and ``io_threads``, that read, and as many that sum, are used; ``None``
            reads ``BYTECHECKPOINT_*`` variables now.
        progress: Called a few times a second or more often with the bytes done and the bytes to do.

    Returns:
        What was checked, and ``problems``: none if the checkpoint is whole. ``raise_if_damaged()`` of it raises.

    Raises:
        CheckpointNotFoundError: There is no checkpoint.
        UnsupportedError: Metadata of another tool that we do not read.
        CheckpointChangedError: A newer commit replaced it meanwhile.
        StorageError: The directory or ``.metadata`` cannot be read.
    """
    config = config or Config.from_env()
    directory = str(path_to_read(path))
    with explaining(directory), reading(directory):
        found = _core.verify(
            directory,
            direct_io=config.direct_io,
            num_threads=config.io_threads,
            ring_bytes=config.ring_bytes,
            progress=progress,
        )
    problems = [
        Problem(
            file=file,
            section=section,
            offset=None if offset < 0 else offset,
            num_bytes=None if num_bytes < 0 else num_bytes,
            fqns=fqns,
            message=message,
        )
        for file, section, offset, num_bytes, fqns, message in found.pop("problems")
    ]
    return VerifyReport(path=directory, problems=problems, **found)
