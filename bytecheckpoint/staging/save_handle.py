# SPDX-License-Identifier: Apache-2.0
"""Saves a state in the background, and returns a handle of the save."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, Generic, TypeVar

from bytecheckpoint.checkpoint.durable_copies import when_durable
from bytecheckpoint.config import Config
from bytecheckpoint.errors import CheckpointError, RankError, SaveCancelledError
from bytecheckpoint.staging import background as _background
from bytecheckpoint.staging.background import BackgroundFuture
from bytecheckpoint.staging.leases import beginning
from bytecheckpoint.staging.staged_state import StagedState, end_of_save, stage_state
from bytecheckpoint.storage.tiers import tier_of, tiers_of

__all__ = ["SaveHandle", "save_in_background"]

R = TypeVar("R")

_CANCEL_WAIT_S = 2.0


class SaveHandle(Generic[R]):
    """A save that goes on in the background.

    The futures cannot be cancelled: their ``cancel`` returns False. So ``asyncio.wait_for`` may time out on them while
    the save goes on.

    Attributes:
        path: Directory that the save writes to.
        staged: Future that is done when tensors on devices may change. Host tensors and objects may change as soon as
            you have the handle.
        committed: Future of the report. Until it is done, the checkpoint before this save is the one at the path.
        memory: Future of the report of the commit in memory, if the path is in ``Tiers`` with memory; else None. It
            fails alone if the state does not fit.
        near: ``committed``, if the path is in ``Tiers`` with a near place; else None.
    """

    def __init__(
        self, path: str, staged: Future[None], committed: BackgroundFuture[R], give_up: Callable[[], None]
    ) -> None:
        self.path = path
        self.staged = staged
        self.committed: Future[R] = committed
        self._committed = committed
        self._give_up = give_up
        self.memory: Future[Any] | None = None
        self.near = self.committed if tier_of(path) == "near" else None
        self._durable: Future[str] | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.path!r}, {self._state()})"

    def _state(self) -> str:
        if not self._committed.done():
            return "saving" if self.staged.done() else "staging"
        error = None if self._committed.cancelled() else self._committed.peek()
        if self._committed.cancelled() or isinstance(error, SaveCancelledError):
            return "cancelled"
        return "committed" if error is None else f"failed: {type(error).__name__}"

    @property
    def durable(self) -> Future[str] | None:
        """Future of the durable copy, if the path is in ``Tiers`` with a durable place; else None.

        Its result is the path or URL of the copy. It fails with the error of the save, or with a ``CheckpointError`` if
        the step is left out: it was not its turn, newer ones waited, or a newer one is there. A process that does not
        copy looks at the durable place, every 15 s at last.
        """
        found = tiers_of(self.path)
        if self._durable is None and found is not None and found[0].durable:
            self._durable = future = Future[str]()
            future.set_running_or_notify_cancel()
            self.committed.add_done_callback(partial(_when_durable, self.path, future))
        return self._durable

    @property
    def report(self) -> R | None:
        """The report of the save; None until it is committed."""
        if not self._committed.done() or self._committed.peek() is not None:
            return None
        return self._committed.result()

    def cancel(self, timeout_s: float = _CANCEL_WAIT_S) -> bool:
        """Gives the save up and waits until it has ended. The checkpoint before it stays; no file of the save is left.

        Parts of a ``bytecheckpoint.save`` that are already committed stay, though. In a new step folder they are not
        yet a checkpoint; in an older one the folder then has parts of different saves, which ``load`` refuses.

        Local. The save fails on all ranks, with a ``SaveCancelledError`` on this one. A rank on which nobody calls this
        first writes what it has: call it on all ranks to end the save soon.

        Args:
            timeout_s: Seconds to wait for the end of the save.

        Returns:
            True if the save was cancelled. False if it was too late: the save was committed, or had failed.

        Raises:
            TimeoutError: The save has not ended yet. It will not be committed, unless its commit had already begun.
        """
        self._give_up()
        try:
            error = self.committed.exception(timeout_s)
        except TimeoutError:
            raise TimeoutError(f"cancel({self.path}): the save has not ended after {timeout_s} s") from None
        return isinstance(error, SaveCancelledError)


@beginning()
def save_in_background(
    path: str,
    state_of: Callable[[], dict[str, Any]],
    save: Callable[[dict[str, Any]], R],
    fail: Callable[[Exception], R],
    give_up: Callable[[], None],
    config: Config,
    *,
    is_alone: bool,
    queue: str = "",
    in_parts: Callable[[str], bool] | None = None,
) -> SaveHandle[R]:
    """Stages a state, and saves it in the thread for background saves.

    Args:
        path: Path of the save, for messages.
        state_of: Returns the state. Raises what is wrong, also the failure of an earlier save that nobody looked at.
        save: Saves the staged state; called in that thread.
        fail: Called instead of ``save`` if this rank has no state to save: tells the other ranks why, and raises.
        give_up: See ``BcpWriter.cancel``.
        config: Settings of staging.
        is_alone: Whether no other rank takes part in this save.
        queue: Name of the queue; saves of one queue run one after the other.
        in_parts: See ``stage_state``.

    Raises:
        CheckpointError: The state cannot be staged. The other ranks hear of it.
    """
    submit: Callable[[Callable[[], R]], BackgroundFuture[R]] = partial(
        _background.submit,
        path,
        queue=queue,
        give_up=give_up,
        exit_timeout_s=config.exit_timeout_s,
        exit_code=config.failed_save_exit_code,
    )
    try:
        options: dict[str, Any] = {"overlap": True, "is_for_one_save": True, "path": path, "in_parts": in_parts}
        staging = stage_state(state_of(), config, is_shareable=False, **options)
    except BaseException as error:
        if not is_alone:  # the other ranks come to this save, and hear of the failure there
            failed = error if isinstance(error, Exception) else RankError(f"save({path}): {error!r} while staging")
            failing = submit(lambda: fail(failed))
            failing.is_seen = True
        raise
    # Whoever takes the state out gives its memory back: the save, or this call if it is interrupted before.
    kept = [staging]
    try:
        return SaveHandle(path, _when_staged(staging), submit(partial(_save_staged, kept, path, save, fail)), give_up)
    except BaseException:  # Ctrl-C
        if kept:
            end_of_save(kept.pop())
        raise


def _when_durable(path: str, future: Future[str], committed: Future[Any]) -> None:
    """Completes ``future`` when the copy of a step that was committed is durable."""
    error = committed.exception()
    copied = None if error is not None else when_durable(path)
    if copied is None:
        future.set_exception(error or CheckpointError(f"{path}: it is in no tiers any more", path))
    else:
        copied.add_done_callback(partial(_pass_on, future))


def _pass_on(future: Future[Any], done: Future[Any]) -> None:
    error = done.exception()
    if error is None:
        future.set_result(done.result())
    else:
        future.set_exception(error)


def _when_staged(staging: Future[StagedState]) -> Future[None]:
    """Returns a future that is done as soon as ``staging`` is, even if the save still waits for earlier saves."""
    staged: Future[None] = Future()
    staged.set_running_or_notify_cancel()  # so that nobody can cancel it

    def tell(staging: Future[StagedState]) -> None:
        error = staging.exception()
        if error is None:
            staged.set_result(None)
        else:
            staged.set_exception(error)

    staging.add_done_callback(tell)
    return staged


def _save_staged(
    kept: list[Future[StagedState]], path: str, save: Callable[[dict[str, Any]], R], fail: Callable[[Exception], R]
) -> R:
    """Saves the state in ``kept``, and gives its memory back. Runs in the background."""
    try:
        state = kept.pop().result()
    except IndexError:
        return fail(RankError(f"save({path}): interrupted before it began"))
    except Exception as error:
        return fail(error)
    try:
        state.wait_for_checksums()
        return save(state)
    finally:
        state.release()
