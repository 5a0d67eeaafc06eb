# SPDX-License-Identifier: Apache-2.0
"""The writer or reader that a call of DCP gets if it passes none, with ``register``."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

from bytecheckpoint.config import Config
from bytecheckpoint.dcp.reader import BcpReader
from bytecheckpoint.dcp.writer import BcpWriter
from bytecheckpoint.storage.folders import can_open_url
from bytecheckpoint.storage.paths import can_be_place, is_local, is_url
from bytecheckpoint.storage.tiers import Tiers

__all__ = ["storage_setup"]

_has_warned_of_url = False


def storage_setup(
    theirs: Callable[..., Any], config: Config | None, tiers: Tiers | None, made: weakref.WeakSet[BcpReader]
) -> Callable[..., Any]:
    """Wraps DCP's choice of a writer or reader: ours take the place of those of the file system.

    Args:
        theirs: DCP's function.
        config: See ``register``.
        tiers: See ``register``.
        made: Each reader that is made is added to it.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

    def setup(storage: Any, checkpoint_id: Any, reader: bool = False) -> Any:
        stock: Any = FileSystemReader if reader else FileSystemWriter
        if storage or not checkpoint_id:
            return theirs(storage, checkpoint_id, reader)
        if tiers is not None:
            checkpoint_id = tiers.step_of(checkpoint_id)
        is_own = tiers or (is_url(checkpoint_id) and is_local(checkpoint_id)) or can_open_url(checkpoint_id)
        if not is_own and not stock.validate_checkpoint_id(checkpoint_id):
            _warn_of_url(checkpoint_id)
            return theirs(storage, checkpoint_id, reader)
        if not reader:
            return BcpWriter(checkpoint_id, config=config)
        ours = BcpReader(checkpoint_id, config=config)
        made.add(ours)
        return ours

    return setup


def _warn_of_url(checkpoint_id: Any) -> None:
    """Warns once in a process that DCP's own classes handle this URL."""
    global _has_warned_of_url
    if _has_warned_of_url or not is_url(checkpoint_id):
        return
    _has_warned_of_url = True
    scheme = str(checkpoint_id).partition("://")[0]  # the rest may hold secrets
    hint = " (pip install 'bytecheckpoint-dcp[cloud]' for ours)" if can_be_place(checkpoint_id) else ""
    warnings.warn(
        f"bytecheckpoint: {scheme}://...: register() leaves URLs to DCP's own writer and reader{hint}: such a save "
        "is not atomic and has no checksums, and a load runs the code in its pickles",
        RuntimeWarning,
        stacklevel=4,
    )
