# SPDX-License-Identifier: Apache-2.0
"""Errors of a save: as a rank sends them to the coordinator, and as all ranks raise them."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from errno import ENOENT, ESTALE

from bytecheckpoint.dcp._places import refuse_other_places
from bytecheckpoint.dcp._save_session import RankResult, SaveSession
from bytecheckpoint.distributed.call_order import check_in_step
from bytecheckpoint.errors import CheckpointError, SaveFailedError, StorageError, sendable, texts_of_ranks
from bytecheckpoint.storage.folders import folder_at

__all__ = ["check_handed_in", "error_to_send", "explaining_unseen", "save_failed", "say_files_stay"]

_UNDONE = " and was undone"


def error_to_send(error: BaseException, session: SaveSession) -> BaseException:
    """Returns ``error``, which is being handled, in a form that can be sent to other ranks.

    The traceback is kept as a text note. Its frames are dropped, because they would keep the job, its threads and its
    files alive.
    """
    error.add_note(traceback.format_exc())
    _forget_frames(error)
    return sendable(_with_cause(error, session))


def check_handed_in(session: SaveSession, results: Sequence[RankResult], failed: Mapping[int, BaseException]) -> None:
    """Checks on the coordinator that all ranks have written their parts of this very save.

    Raises:
        OutOfStepError: Ranks came with different calls.
        ConfigError: Ranks save to different places.
        SaveFailedError: Ranks failed.
        CheckpointSupersededError: A rank failed because another save has removed its files.
        ProcessGroupChangedError: Ranks are missing.
    """  # noqa: DOC501
    check_in_step("save", session.path, {result.rank: result.call for result in results})
    refuse_other_places(session.path, results, session.rank)
    if failed:
        if any(getattr(error, "errno", None) in (ENOENT, ESTALE) for error in failed.values()):
            _check_right(session)
        raise save_failed(session.path, failed)
    session.check_ranks([result.rank for result in results])


def _check_right(session: SaveSession) -> None:
    """Raises a ``CheckpointSupersededError`` if another save has taken this one's right to commit."""
    if session.commit is not None:
        session.commit.check_right()


def save_failed(path: str, failed: Mapping[int, BaseException]) -> SaveFailedError:
    """Returns the error that all ranks raise, made from the errors of the ranks that failed."""
    return SaveFailedError(f"save({path}) failed{_UNDONE}: {texts_of_ranks(failed)}", failed)


def say_files_stay(error: BaseException, path: str, of_clean_up: CheckpointError) -> None:
    """Makes the ``error`` of a failed save to ``path`` say that its files could not be removed.

    The first failure is the one to raise. The sweep of a later save there, or a prune, removes what is left.
    """
    error.add_note(f"the files of the failed save could not be removed: {of_clean_up}")
    failed = f"save({path}) failed"
    if isinstance(error, SaveFailedError) and str(error).startswith(failed + _UNDONE):
        left = f", and could not be undone: a later save there, or a prune, removes its files ({of_clean_up})"
        error.args = (failed + left + str(error).removeprefix(failed + _UNDONE),)


@contextmanager
def explaining_unseen(path: str, handed_in: Sequence[RankResult]) -> Iterator[None]:
    """If the ``with`` block fails because the coordinator does not see what a rank wrote, the error says so."""
    try:
        yield
    except StorageError as error:
        explained = _not_seen(error, path, handed_in)
        if explained is None:
            raise
        raise explained from error


def _not_seen(error: StorageError, path: str, handed_in: Sequence[RankResult]) -> StorageError | None:
    """Explains ``error`` if the coordinator does not see files that a rank wrote.

    Returns:
        An error that names the ranks whose path is another directory; None if all files are seen.
    """
    if error.errno != ENOENT:  # storage that does not answer must not be asked
        return None
    folder = folder_at(path)
    unseen = [result for result in handed_in if not folder.sees(result.file_names)]
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
    """Drops the frames of an error, of its causes and of its contexts.

    A log or other code that keeps the error then keeps nothing else alive. A frame may also refer to a torch Future
    whose value is this error, and the garbage collector cannot find that cycle.
    """
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
    """Explains ``error`` if it is ENOENT because this rank does not see the directory of the checkpoint.

    The coordinator makes the directory before any rank begins to write. So the rank's path is another directory.
    """
    if not (isinstance(error, StorageError) and error.errno == ENOENT):
        return error
    if not session.folder.is_gone():
        return error
    explained = StorageError(
        f"save({session.path}): the path is not shared between the ranks: rank {session.rank} does not see the "
        f"directory that the coordinator has made ({error})",
        session.path,
        ENOENT,
    )
    explained.__notes__ = list(getattr(error, "__notes__", []))
    return explained
