# SPDX-License-Identifier: Apache-2.0
"""Says that a file system has refused direct I/O."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from bytecheckpoint.runtime.per_process import PerProcess

__all__ = ["tell_of_refused_direct_io"]

_logger = logging.getLogger("bytecheckpoint")
_told: PerProcess[set[str]] = PerProcess(set)


def tell_of_refused_direct_io(path: Path | str, module: Any) -> None:
    """Logs a warning, once in a process, if a file system has refused direct I/O on files that it had opened for it.

    Args:
        path: Checkpoint that was written or read just now.
        module: The extension module that did it.
    """
    if module.take_refusal_of_direct() and not _told.get():
        _told.get().add(str(path))
        _logger.warning(
            "%s: the file system takes O_DIRECT when a file is opened, and refuses it (EINVAL) when it is read or "
            "written: everything goes through the page cache, which is slower for large checkpoints. "
            "Config(direct_io=False) saves the attempts. This is said once",
            path,
        )
