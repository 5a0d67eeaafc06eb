# SPDX-License-Identifier: Apache-2.0
"""Which data files the commit marks in an object store name. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from bytecheckpoint.errors import CheckpointError, CheckpointNotFoundError
from bytecheckpoint.native import _core
from bytecheckpoint.storage.names import rank_of_mark
from bytecheckpoint.storage.object_store.client import StoreClient
from bytecheckpoint.storage.object_store.urls import joined

__all__ = ["named_files"]


def named_files(client: StoreClient, marks: Iterable[str], *, strict: bool) -> Iterator[str]:
    """Yields the names of the data files that commit marks name, relative to the URL of ``client``.

    Args:
        client: A client for a folder above.
        marks: Names of the marks: of saves, and of ranks that committed by themselves.
        strict: Whether a mark that does not open is an error; else it names nothing. One that is gone names nothing.

    Raises:
        CheckpointError: A mark does not open.
    """
    for mark in marks:
        folder = mark.rpartition("/")[0]
        try:
            checkpoint = _core.Checkpoint.open(joined(client.url, folder), rank=rank_of_mark(mark))
        except CheckpointNotFoundError:
            continue
        except CheckpointError:
            if strict:
                raise
            continue
        yield from (joined(folder, name) for name, *_ in checkpoint.files())
