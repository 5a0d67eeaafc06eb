# SPDX-License-Identifier: Apache-2.0
"""Where checkpoints are: in directories, not behind URLs."""

from __future__ import annotations

import os
from pathlib import Path

from bytecheckpoint.errors import ConfigError

__all__ = ["is_url", "local_path"]


def is_url(path: str | os.PathLike[str]) -> bool:
    """Does ``path`` name what only a network library can open?"""
    return not isinstance(path, os.PathLike) and "://" in str(path)


def local_path(path: str | os.PathLike[str]) -> Path:
    """``path``, which must not be a URL: as a path it would silently become a directory of that name.

    Raises:
        ConfigError: It is one. The message says no more of it than the scheme: the rest may hold secrets.
    """
    if is_url(path):
        scheme = str(path).partition("://")[0]
        raise ConfigError(
            f"{scheme}://...: a directory is wanted, not a URL; give the path where it is mounted, or leave the URL to "
            "DCP's own FsspecWriter and FsspecReader"
        )
    return Path(path)
