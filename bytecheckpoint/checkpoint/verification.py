# SPDX-License-Identifier: Apache-2.0
"""Verifies a whole checkpoint. Needs no torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from bytecheckpoint.checkpoint.direct_io import tell_of_refused_direct_io
from bytecheckpoint.config import Config
from bytecheckpoint.contents.wrong_path import explaining
from bytecheckpoint.listing import listed
from bytecheckpoint.native import _core
from bytecheckpoint.report import Problem, VerifyReport
from bytecheckpoint.storage.folders import folder_at
from bytecheckpoint.storage.in_use import reading
from bytecheckpoint.storage.paths import location_to_read
from bytecheckpoint.storage.shared_files import others_that_have

__all__ = ["verify"]


def verify(
    path: str | os.PathLike[str] | None,
    *,
    config: Config | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> VerifyReport:
    """Reads every byte of a checkpoint and compares it with its checksum.

    It also proves that the two parts of ``.metadata`` say the same, that the archives around the elements of each
    tensor, which stock readers read, are what they must be, and that every element of every tensor is in exactly one
    chunk. It looks for data files that nothing refers to. For a checkpoint of stock DCP, it compares the CRCs in its
    records, and the report says how many bytes have none. Safetensors have no checksums: of them it checks headers,
    sizes, and the index against the files, and the report says so.

    Local. It opens nothing for writing and takes no lock, so it does not disturb a save. It goes on after a problem, so
    that one run finds all problems.

    Args:
        path: Directory of a checkpoint; or safetensors, a file or a folder of Hugging Face.
        config: Settings, of which ``direct_io``, ``ring_bytes`` and ``io_threads`` are used: so many threads read, and
            as many compute checksums. None reads ``BYTECHECKPOINT_*`` variables now.
        progress: Function that is called at least a few times a second with the bytes done and the bytes to do.

    Returns:
        What was checked, and ``problems``, which is empty if the checkpoint is whole. Its ``raise_if_damaged()`` raises
        if there are problems.

    Raises:
        CheckpointNotFoundError: There is no checkpoint, or it was removed during the check.
        UnsupportedError: The metadata are those of another tool, and we do not read them.
        CheckpointChangedError: A newer commit replaced the checkpoint during the check.
        StorageError: The directory or ``.metadata`` cannot be read.
    """
    config = config or Config.from_env()
    directory = str(location_to_read(path))
    folder = folder_at(directory)
    folder.use(config)
    config = folder.tuned(config)
    with explaining(directory), reading(directory):
        found = _core.verify(
            directory,
            direct_io=config.direct_io,
            num_threads=config.io_threads,
            ring_bytes=config.ring_bytes,
            progress=progress,
        )
    tell_of_refused_direct_io(directory, _core)
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
    for name in sorted({problem.file for problem in problems}):
        others = others_that_have(Path(directory), name) if isinstance(folder.place, Path) else []
        if others:
            found["notes"].append(f"{name} is the same file in {listed(others)}: its damage is there, too")
    if not folder.has_listing:
        found["notes"].append("unreferenced files were not looked for: over HTTP a folder has no listing")
    return VerifyReport(path=directory, problems=problems, **found)
