# SPDX-License-Identifier: Apache-2.0
"""Hashes of records that a save stored in the user metadata of its checkpoint; see FORMAT.md. Needs no torch."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable
from typing import Any

from bytecheckpoint.errors import ConfigError

__all__ = ["HASHES", "hashes_in", "refuse_other_metadata", "with_hashes"]

HASHES = "bytecheckpoint.hashes"
_MOST_LINKS = 1 << 20


def refuse_other_metadata(user_metadata: Any) -> None:
    """Raises a ConfigError for user metadata that hashes cannot be added to: anything but a dict, or None."""
    if user_metadata is not None and not isinstance(user_metadata, dict):
        kind = type(user_metadata).__name__
        raise ConfigError(f"user_metadata: must be a dict with Config(link_unchanged=True), got a {kind}")


def with_hashes(user_metadata: str, of_files: Iterable[tuple[str, int, bytes]]) -> str:
    """Returns user metadata with the hashes of files in them, as JSON text.

    Args:
        user_metadata: What the user passed, as JSON text; "" for nothing.
        of_files: Name of each file, in how many saves it was linked, and the hashes of its records.
    """
    found = json.loads(user_metadata or "{}")
    refuse_other_metadata(found)
    stored = {name: [links, base64.b64encode(hashes).decode("ascii")] for name, links, hashes in of_files}
    return json.dumps({**(found or {}), HASHES: stored})


def hashes_in(user_metadata: Any) -> dict[str, tuple[int, bytes]]:
    """Returns what ``with_hashes`` stored, by the name of the file; without what is none that a save writes.

    Args:
        user_metadata: JSON value of the user metadata.
    """
    stored = user_metadata.get(HASHES) if isinstance(user_metadata, dict) else None
    found = {}
    for name, of_file in stored.items() if isinstance(stored, dict) else ():
        try:
            links, text = of_file
            hashes = base64.b64decode(text, validate=True)
        except (TypeError, ValueError, binascii.Error):
            continue  # the file is written anew
        if isinstance(links, int) and 0 <= links <= _MOST_LINKS:
            found[name] = links, hashes
    return found
