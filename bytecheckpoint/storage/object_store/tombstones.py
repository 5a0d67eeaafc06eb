# SPDX-License-Identifier: Apache-2.0
"""Tombstones: short objects in the place of a commit mark, put in one conditional request.

No two are equal, so that nobody takes one for another. docs/internals/architecture.md says what they are for.
"""

from __future__ import annotations

import errno
import uuid
from typing import Any

from bytecheckpoint.storage.object_store.client import StoreClient
from bytecheckpoint.storage.object_store.conditions import has_not_changed, refused_in_vain
from bytecheckpoint.storage.object_store.entries import CLAIMED, REMOVED

__all__ = ["bury", "claim"]


def bury(client: StoreClient, name: str, version: dict[str, Any] | None) -> dict[str, Any] | None:
    """Puts a tombstone in the place of a commit mark, or where there is none.

    Args:
        client: The folder of the mark.
        name: Name of the mark.
        version: See ``replaces`` of ``StoreClient.put_if``.

    Returns:
        What ``StoreClient.head`` says of the tombstone; None if somebody else has changed the mark meanwhile.

    Raises:
        OSError: The store refused for another reason.
    """
    return _replaced_by(REMOVED, client, name, version)


def claim(client: StoreClient, name: str, tombstone: dict[str, Any]) -> dict[str, Any] | None:
    """Puts a tombstone of a save in the place of another, which a prune may be about to delete; see ``bury``."""
    return _replaced_by(CLAIMED, client, name, tombstone)


def _replaced_by(kind: str, client: StoreClient, name: str, version: dict[str, Any] | None) -> dict[str, Any] | None:
    data = f"{kind}{uuid.uuid4().hex}".encode()
    refusal: OSError | None = None
    try:
        client.put_if(name, data, version)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ESTALE):
            raise
        refusal = error
    # Refused or not: it is ours if it is there. A reply that was lost makes the client try again.
    try:
        meta, found = client.get_with_meta(name)
    except FileNotFoundError:
        return None
    if found == data:
        return meta
    if refusal is not None and has_not_changed(version, meta):
        raise OSError(refusal.errno, f"put({client.url}/{name}): {refused_in_vain(client, version)}")
    return None
