# SPDX-License-Identifier: Apache-2.0
"""Digests that a save stored in the user metadata of its checkpoint. Needs no torch."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from bytecheckpoint.errors import ConfigError, CorruptCheckpointError
from bytecheckpoint.storage.stored_hashes import HASHES

__all__ = ["stored_in", "with_stored", "without_stored"]

_KEY = "bytecheckpoint.digest"
_DIGEST_BYTES = 32


def with_stored(user_metadata: Any, total: str, keys: Mapping[str, str]) -> dict[str, Any]:
    """Returns user metadata with a digest in them.

    Args:
        user_metadata: What the user passed; a dict, or None.
        total: The digest of everything, as hex digits.
        keys: The digest of each key, as hex digits, in the order of the names' UTF-8 bytes.

    Raises:
        ConfigError: The user metadata are not a dict, so nothing can be added to them.
    """
    if user_metadata is not None and not isinstance(user_metadata, dict):
        raise ConfigError(f"user_metadata: must be a dict if a digest is stored, got a {type(user_metadata).__name__}")
    packed = base64.b64encode(bytes.fromhex("".join(keys.values()))).decode("ascii")
    return {**(user_metadata or {}), _KEY: {"total": total, "keys": packed}}


def without_stored(user_metadata: Any) -> Any:
    """Returns user metadata as the user passed them."""
    ours = (_KEY, HASHES)
    if not isinstance(user_metadata, dict) or not any(name in user_metadata for name in ours):
        return user_metadata
    return {name: value for name, value in user_metadata.items() if name not in ours} or None


def stored_in(user_metadata: Any, names: list[str], path: str) -> tuple[str, dict[str, str]] | None:
    """Returns the digest of everything and of each key, as hex digits; None if the save stored none.

    Args:
        user_metadata: JSON value of the user metadata.
        names: Keys of the checkpoint, in any order.
        path: Path of the checkpoint, for messages.

    Raises:
        CorruptCheckpointError: It is none that a save writes.
    """
    found = user_metadata.get(_KEY) if isinstance(user_metadata, dict) else None
    if found is None:
        return None
    try:
        total, keys = str(found["total"]), base64.b64decode(found["keys"], validate=True)
    except (TypeError, KeyError, ValueError, binascii.Error):
        keys = b""
        total = ""
    if len(total) != 2 * _DIGEST_BYTES or len(keys) != _DIGEST_BYTES * len(names):
        raise CorruptCheckpointError(f"open({path}): the stored digest is none that a save writes", path)
    ordered = sorted(names, key=lambda name: name.encode("utf-8", "surrogatepass"))
    digests = (keys[at : at + _DIGEST_BYTES].hex() for at in range(0, len(keys), _DIGEST_BYTES))
    return total, dict(zip(ordered, digests, strict=True))
