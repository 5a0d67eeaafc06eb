# SPDX-License-Identifier: Apache-2.0
"""URLs of checkpoints in object stores, as users write them."""

from __future__ import annotations

import os
import re
from urllib.parse import urlsplit

from bytecheckpoint.errors import ConfigError

__all__ = [
    "HELD",
    "SCHEMES",
    "is_held",
    "is_http",
    "is_known_store",
    "is_store_url",
    "joined",
    "key_of_url",
    "store_url",
]

# Of the stores that obstore knows, each in the forms that its users write. Over HTTP a checkpoint can only be read.
SCHEMES = ("s3", "s3a", "gs", "az", "azure", "http", "https", "memory")

# Checkpoints in the memory of a machine; see ``storage.memory``. Nobody needs to know it: ``Tiers`` makes such URLs.
HELD = "held"

_HALF_URL = re.compile(rf"({'|'.join(SCHEMES)}):/?(?!/)", re.IGNORECASE)


def is_store_url(path: object) -> bool:
    """Whether ``path`` is meant as a URL of an object store; also if it is only half a URL, such as ``s3:/bucket``."""
    if not isinstance(path, str):
        return False
    scheme, mark, _ = path.partition("://")
    return (bool(mark) and scheme.lower() != "file") or _HALF_URL.match(path) is not None


def is_known_store(path: object) -> bool:
    """Whether ``path`` is a URL with the scheme of a store that we know."""
    return isinstance(path, str) and path.partition("://")[0].lower() in (*SCHEMES, HELD) and "://" in path


def is_held(url: object) -> bool:
    """Whether ``url`` is a folder in the memory of this machine."""
    return isinstance(url, str) and url.startswith(f"{HELD}://")


def is_http(url: str) -> bool:
    """Whether ``url`` is a folder of a web server, which can only be read, and has no listing."""
    return url.startswith(("http://", "https://"))


def key_of_url(url: str) -> tuple[int, int]:
    """Returns what stands for device and inode of a folder in a store, in this process."""
    return -1, hash(url)


def store_url(path: str | os.PathLike[str]) -> str:
    """Returns the URL of a folder, without a slash at its end.

    Raises:
        ConfigError: It is not a URL that names a bucket and a folder in it. The message does not repeat what may be a
            secret: a user, a password or a query.
    """
    text = os.fspath(path)
    half = _HALF_URL.match(text)
    if half is not None:
        scheme = half[1].lower()
        raise ConfigError(
            f"{scheme}:/...: the URL is incomplete; write {scheme}://bucket/folder, or ./{scheme}:... for a path"
        )
    scheme, _, rest = text.partition("://")
    scheme = scheme.lower()
    if scheme not in (*SCHEMES, HELD):
        raise ConfigError(f"{scheme}://...: unknown kind of store; known are {', '.join(SCHEMES)}, and file")
    try:
        parts = urlsplit(f"{scheme}://{rest}")
    except ValueError:  # its text repeats the URL
        raise ConfigError(f"{scheme}://...: not a URL; write {scheme}://bucket/folder") from None
    if parts.query or parts.fragment:
        raise ConfigError(
            f"{scheme}://{parts.hostname or ''}...: the URL must not have '?' or '#'; pass options as "
            "Config(storage_options=...)"
        )
    if parts.username is not None or parts.password is not None:
        raise ConfigError(
            f"{scheme}://...@{parts.hostname or ''}: the URL must not have a user or password; pass these in the "
            "variables of the provider, or as Config(storage_options=...)"
        )
    if scheme != "memory" and not parts.netloc:
        raise ConfigError(f"{scheme}://: the URL has no bucket; write {scheme}://bucket/folder")
    names = [name for name in parts.path.split("/") if name]
    if any(name in (".", "..") for name in names):
        raise ConfigError(f"{scheme}://{parts.netloc}/...: '.' and '..' mean nothing in a store; write the whole key")
    return "/".join([f"{scheme}://{parts.netloc}", *names])


def joined(*names: str) -> str:
    """Returns a URL or a key of these parts, of which empty ones count for nothing."""
    return "/".join(filter(None, names))
