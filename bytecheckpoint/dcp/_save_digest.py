# SPDX-License-Identifier: Apache-2.0
"""The digest of a save: computed from what was written, before it is committed, and stored in ``.metadata``."""

from __future__ import annotations

import json
from collections.abc import Callable

from bytecheckpoint.checkpoint.digests import digest_of
from bytecheckpoint.config import Config
from bytecheckpoint.dcp._save_session import SaveSession
from bytecheckpoint.errors import CheckpointChangedError, CorruptCheckpointError, UnsupportedError
from bytecheckpoint.native import _C
from bytecheckpoint.storage.stored_digest import with_stored

__all__ = ["with_digest"]


def with_digest(
    session: SaveSession,
    config: Config,
    user_metadata: str,
    written: _C.Checkpoint,
    raise_if_cancelled: Callable[[SaveSession], object],
) -> str:
    """Reads what all ranks have written, and returns the user metadata with its digest, as JSON text.

    Args:
        session: The save.
        config: Settings.
        user_metadata: What the user passed, as JSON text; "" for nothing.
        written: What is to be committed.
        raise_if_cancelled: Called again and again.

    Raises:
        ConfigError: The user metadata are not a dict.
        CorruptCheckpointError: What was written cannot be read back.
        SaveCancelledError: The save was cancelled meanwhile.
        UnsupportedError: A tensor has no digest; see ``digest``.
        StorageError: The storage refused, or did not answer.
    """
    config = session.folder.tuned(config)
    try:
        digest = digest_of(
            written,
            session.path,
            rank=session.rank if session.commits_alone else None,
            extension=_C,
            config=config,
            progress=lambda done, total: raise_if_cancelled(session),
        )
    except CheckpointChangedError as error:  # the mark at the path is still that of the save before
        raise CorruptCheckpointError(f"save({session.path}): it cannot be read back: {error}", session.path) from error
    except UnsupportedError as error:
        raise UnsupportedError(f"save({session.path}, digest=True): {error}", session.path) from None
    session.digest = digest.total
    session.phases.end("digest_s")
    return json.dumps(with_stored(json.loads(user_metadata or "null"), digest.total, digest.keys))
