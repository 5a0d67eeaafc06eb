# SPDX-License-Identifier: Apache-2.0
"""A save that goes on in the background, and its handle."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, Generic, TypeVar

from bytecheckpoint import _background
from bytecheckpoint._background import BackgroundFuture
from bytecheckpoint.config import Config
from bytecheckpoint.dcp._staged import StagedState, end_of_save, stage_state
from bytecheckpoint.dcp._stays import beginning
from bytecheckpoint.dcp._switching import quick_switches
from bytecheckpoint.errors import RankError, SaveCancelledError

__all__ = ["SaveHandle", "save_in_background"]

R = TypeVar("R")

_CANCEL_WAIT_S = 2.0


class SaveHandle(Generic[R]):
    """A save that goes on in the background.

    The futures cannot be cancelled: their ``cancel`` returns False, and so ``asyncio.wait_for`` may time out on them
    while the save goes on.

    Attributes:
        path: Directory that it writes to.
        staged: Future of the moment from which on tensors on devices may change; host tensors and objects may change
            as soon as there is a handle.
        committed: Future of the report; until then the checkpoint before it is the one at the path.
    """

    def __init__(
        self, path: str, staged: Future[None], committed: BackgroundFuture[R], give_up: Callable[[], None]
    ) -> None:
        self.path = path
        self.staged = staged
        self.committed: Future[R] = committed
        self._committed = committed
        self._give_up = give_up

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
    def report(self) -> R | None:
        """What was done; None until it is committed."""
        if not self._committed.done() or self._committed.peek() is not None:
            return None
        return self._committed.result()

    def cancel(self, timeout_s: float = _CANCEL_WAIT_S) -> bool:
        """Gives the save up, and waits until it has ended: the checkpoint before it stays, no file of it is left.

        Of ``bytecheckpoint.save``, parts that are committed already stay: of a new step folder that is no checkpoint
        yet; over an older one it leaves parts of different saves, which ``load`` refuses.

        Local; it fails on all ranks, with a ``SaveCancelledError`` on this one. Ranks that are not told write what they
        have before they hear of it: call it on all of them to end soon.

        Args:
            timeout_s: Seconds to wait for the end.

        Returns:
            False if it was too late: the save was committed, or had failed.

        Raises:
            TimeoutError: It has not ended yet. It will not be committed unless it was being committed already.
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
) -> SaveHandle[R]:
    """Stages a state, and saves it in the thread for background saves.

    Args:
        path: For messages.
        state_of: Gives the state; raises what is wrong, an earlier save's failure that nobody has looked at included.
        save: Saves it; in that thread, with the staged state.
        fail: Takes this rank's part in a save that it cannot take part in: tells the others why, and raises.
        give_up: As of ``BcpWriter.cancel``.
        config: Of staging.
        is_alone: Nobody else comes to this save.
        queue: Saves of one queue follow one another.

    Raises:
        CheckpointError: The state cannot be staged; the others are told.
    """
    submit: Callable[[Callable[[], R]], BackgroundFuture[R]] = partial(
        _background.submit, path, queue=queue, give_up=give_up, exit_timeout_s=config.exit_timeout_s
    )
    try:
        staging = stage_state(state_of(), config, is_shareable=False, overlap=True, is_for_one_save=True, path=path)
    except BaseException as error:
        if not is_alone:  # the others come to this save, and hear of it there
            failed = error if isinstance(error, Exception) else RankError(f"save({path}): {error!r} while staging")
            told = submit(lambda: fail(failed))
            told.is_seen = True
        raise
    # Who takes it out gives its memory back: the save, or this call where it ends before.
    kept = [staging]
    try:
        return SaveHandle(path, _when_staged(staging), submit(partial(_save_staged, kept, path, save, fail)), give_up)
    except BaseException:  # Ctrl-C
        if kept:
            end_of_save(kept.pop())
        raise


def _when_staged(staging: Future[StagedState]) -> Future[None]:
    """Done as soon as ``staging`` is, though the save may wait for others before it."""
    staged: Future[None] = Future()
    staged.set_running_or_notify_cancel()  # and can no longer be cancelled

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
    """In the background: saves the state in ``kept``, and gives its memory back."""
    with quick_switches():
        try:
            state = kept.pop().result()
        except IndexError:
            return fail(RankError(f"save({path}): interrupted before it began"))
        except Exception as error:
            return fail(error)
        try:
            state.wait_for_sums()
            return save(state)
        finally:
            state.release()
