# SPDX-License-Identifier: Apache-2.0
"""Why a save failed: as a rank hands it in, and as the coordinator tells it to all."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from errno import ENOENT
from pathlib import Path

from bytecheckpoint.dcp._save_session import RankResult, SaveSession
from bytecheckpoint.errors import SaveFailedError, StorageError, sendable

__all__ = ["not_seen", "save_failed", "to_hand_in"]


def to_hand_in(error: BaseException, session: SaveSession) -> BaseException:
    """``error``, which is being handled, as it can be sent: its frames would keep the job, its threads and its files,
    and are kept as text."""
    error.add_note(traceback.format_exc())
    _forget_frames(error)
    return sendable(_with_cause(error, session))


def save_failed(path: str, failed: Mapping[int, BaseException]) -> SaveFailedError:
    """What all ranks get, of the errors that some handed in."""
    reasons = "; ".join(f"rank {rank}: {type(error).__name__}: {error}" for rank, error in sorted(failed.items()))
    return SaveFailedError(f"save({path}) failed and was undone: {reasons}", failed)


def not_seen(error: StorageError, path: str, handed_in: Sequence[RankResult]) -> StorageError | None:
    """``error`` explained, if the coordinator does not find what a rank wrote: they mean different directories."""
    if error.errno != ENOENT:  # storage that does not answer must not be asked
        return None
    unseen = [r for r in handed_in if not all(Path(path, name).exists() for name in r.file_names)]
    if not unseen:
        return None
    ranks = ", ".join(f"rank {result.rank} to {result.path}" for result in unseen)
    return StorageError(
        f"save({path}): the path is not shared between the ranks: the coordinator does not see what was written by "
        f"{ranks} ({error})",
        path,
        ENOENT,
    )


def _forget_frames(error: BaseException) -> None:
    """Of an error and of those that it came from. Whoever keeps them, a log say, keeps nothing else, and the garbage
    collector would not find the way from a frame to the Future of torch that has the error for its value."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)
        one.__traceback__ = None
        waiting += [one.__cause__, one.__context__]


def _with_cause(error: BaseException, session: SaveSession) -> BaseException:
    """Of a rank that does not have the directory that the coordinator made before it could come to write."""
    if not (isinstance(error, StorageError) and error.errno == ENOENT) or Path(session.path).is_dir():
        return error
    explained = StorageError(
        f"save({session.path}): the path is not shared between the ranks: rank {session.rank} does not see the "
        f"directory that the coordinator has made ({error})",
        session.path,
        ENOENT,
    )
    explained.__notes__ = list(getattr(error, "__notes__", []))
    return explained
