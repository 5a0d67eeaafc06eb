# SPDX-License-Identifier: Apache-2.0
"""``StoreCommit``: the coordinator's part of a save into an object store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from datetime import timedelta
from errno import EACCES, EINVAL, EOPNOTSUPP, ESTALE
from typing import Any

from bytecheckpoint.errors import (
    CheckpointBusyError,
    CheckpointError,
    CheckpointExistsError,
    CheckpointSupersededError,
    StorageError,
    UnsupportedError,
)
from bytecheckpoint.native import _core
from bytecheckpoint.storage.names import RECORDS, is_own_data
from bytecheckpoint.storage.object_store.client import StoreClient
from bytecheckpoint.storage.object_store.conditions import has_not_changed, refused_in_vain
from bytecheckpoint.storage.object_store.entries import is_tombstone
from bytecheckpoint.storage.object_store.save_notes import SaveNote
from bytecheckpoint.storage.object_store.tombstones import claim
from bytecheckpoint.storage.object_store.urls import key_of_url

__all__ = ["StoreCommit", "sweep_grace_s"]

_MARK = ".metadata"
# A data file that no commit names may belong to a save that runs. It is swept when it is older than any save may be.
_LEAST_GRACE_S = 86400.0
# Each look tries as long as any request. So after a long one there are no more.
_LOOKS_AFTER_A_LOST_REPLY, _MOST_LOOKING_S = 5, 5.0


def sweep_grace_s(deadline_s: float) -> float:
    """Returns the age in seconds from which on no save can still be writing a data file that no commit names.

    Args:
        deadline_s: Seconds within which a save must be committed.
    """
    return max(_LEAST_GRACE_S, 2 * deadline_s)


class StoreCommit:
    """Replaces the old checkpoint below a URL by a new one, in one request.

    A checkpoint exists if and only if its ``.metadata`` does, as on a file system. There is no lock and no rename:

    1. The constructor notes which version of ``.metadata`` is there, or that there is none. It refuses a store that
       does not obey conditions; the first save of a process to a bucket tries that. A tombstone, which a prune has
       left, it replaces by one of its own, so that this prune does not delete the mark of step 4 for it. Then it puts a
       note of the save beside the steps of the run (``save_notes``), which step 5 removes.
    2. All ranks upload data files, under names that no other save has. Nobody reads them before step 4.
    3. ``check_files`` opens all of them.
    4. ``commit`` puts ``.metadata``, on the condition that it is still what step 1 saw. **This is the commit.** Of two
       saves that ran at once, the store lets one through. The other gets a ``CheckpointSupersededError``. If the reply
       is lost, what is there now decides: our bytes, with our save id in them, or not.
    5. It removes the data files of the checkpoint that it replaced, and such as no commit names and no save can still
       be writing. Their age is taken from the store's clock alone.

    A save that fails before step 4 removes its data files. If it dies, they stay until step 5 of a later save finds
    them old enough. If it cannot be known whether the request of step 4 has arrived, they stay, because it may arrive
    later.

    Thread safety: any thread may call ``abandon`` and ``is_over``.

    Args:
        client: Of the URL.
        overwrite: Whether a checkpoint may be there.
        deadline_s: Seconds from now within which the save must be committed.
        note: What is to stay of the save if it dies; None for nothing.
        about: What to put there; see ``about_save``.

    Raises:
        UnsupportedError: The URL is one of HTTP, over which a checkpoint can only be read; or the store does not obey
            the conditions that the commit needs.
        CheckpointBusyError: A prune, or another save, has begun here at the same moment.
        CheckpointExistsError: There is a checkpoint, and ``overwrite`` is False.
        StorageError: The store refused.
    """

    def __init__(
        self,
        client: StoreClient,
        *,
        overwrite: bool,
        deadline_s: float,
        note: SaveNote | None = None,
        about: bytes = b"",
    ) -> None:
        if client.is_http:
            raise UnsupportedError(f"save({client.url}): over HTTP a checkpoint can only be read", client.url)
        self._client = client
        self._deadline_s = deadline_s
        self._deadline = time.monotonic() + deadline_s
        self._lock = threading.Lock()
        self._is_over = False
        self._may_be_committed = False  # the request was sent, and nothing proves that it had no effect
        self._replaces = self._asked("head", _MARK, lambda: client.head(_MARK))
        is_removed = self._replaces is not None and is_tombstone(self._replaces)
        if self._replaces is not None and not is_removed and not overwrite:
            raise CheckpointExistsError(
                f"save({client.url}): Checkpoint already exists, and overwrite=False", client.url
            )
        conditions = self._asked("put", "", client.conditions)
        if conditions.fault:
            raise UnsupportedError(f"save({client.url}): {conditions.fault}", client.url)
        if self._replaces is not None and is_removed:
            self._replaces = self._claimed(self._replaces)
        self._old_files: list[str] = []
        self._replaced_id = ""
        if self._replaces is not None:
            with suppress(CheckpointError):  # it does not load; its files are swept by their age
                old = _core.Checkpoint.open(client.url)
                self._old_files, self._replaced_id = [name for name, *_ in old.files()], old.save_id
        self._warnings: list[str] = []
        self._note = note
        if note is not None:
            self._noting(lambda: note.put(about))

    @property
    def directory_id(self) -> tuple[int, int]:
        """Identifies the URL in this process, as device and inode identify a directory."""
        return key_of_url(self._client.url)

    def check_right(self) -> None:
        """See ``storage.folder.Commit``: who has the right shows only when ``commit`` sends its request."""

    def check_files(self, checkpoint: Any, ranks: Set[int] | None = None) -> None:
        """Checks that every data file is as its rank left it; see ``Commit::check_files``."""
        assert ranks is None, "all ranks see one store"
        checkpoint.check_files(self._client.url)

    def commit(self, checkpoint: Any) -> dict[str, Any]:
        """Commits, and sweeps. Returns what ``Commit.commit`` does.

        Raises:
            CheckpointSupersededError: Another save committed meanwhile, or the deadline has passed.
            StorageError: The store refused; the message says if it is not known whether the save is committed.
            UnsupportedError: The store knows no conditions.
        """
        url, data = self._client.url, checkpoint.metadata_file()
        with self._lock:
            if self._is_over or time.monotonic() > self._deadline:
                self._is_over = True
                raise CheckpointSupersededError(
                    f"commit({url}): this save gave up its right to commit, or its {self._deadline_s:g} s have passed",
                    url,
                )
            self._is_over = True
            self._put_mark(data)
        begun = time.monotonic()
        warnings = self._warnings
        num_swept = 0
        note = self._note
        if note is not None:
            self._noting(lambda: note.remove(self._replaced_id))
        try:
            num_swept = self._sweep({name for name, *_ in checkpoint.files()})
        except (OSError, CheckpointError) as error:
            warnings.append(f"data files of older saves could not be removed: {error}")
        return {
            "directory_synced": True,
            "files_swept": num_swept,
            "sweep_s": time.monotonic() - begun,
            "warnings": warnings,
        }

    def abort(self, file_names: Sequence[str], in_doubt: bool = False, links: Sequence[str] = ()) -> None:
        """Removes the data files of a save that failed, unless it may be committed, or may still become so.

        Copies of unchanged files stay, since a store has no right to commit that one save alone has: another one may
        have committed copies of the same names. They are swept by their age.

        Raises:
            StorageError: A file could not be removed, or the store has failed to answer some rank (``in_doubt``).
        """
        with self._lock:
            self._is_over = True
            if self._may_be_committed:
                return
        if in_doubt:
            url = self._client.url
            raise StorageError(f"{url}: the store did not answer some rank, so it was not asked to delete", url)
        self._asked("delete", "", lambda: self._client.delete(file_names))

    def abandon(self) -> None:
        """Gives the right to commit up. It has no effect after ``commit``. Data files are left to a later sweep."""
        if self._lock.acquire(blocking=False):  # else it is being committed
            self._is_over = True
            self._lock.release()

    def is_over(self) -> bool:
        """Whether this save can no longer commit."""
        return self._is_over or time.monotonic() > self._deadline

    def _noting(self, call: Callable[[], None]) -> None:
        """Puts or removes the note. Where the store refuses that, the save goes on."""
        try:
            call()
        except OSError as error:
            self._warnings.append(
                f"the store refuses the note in {RECORDS} that says that this save runs: {error.strerror}; "
                'Config(journal="off") needs none'
            )

    def _claimed(self, tombstone: dict[str, Any]) -> dict[str, Any]:
        url = self._client.url
        own: dict[str, Any] | None = self._asked("put", _MARK, lambda: claim(self._client, _MARK, tombstone))
        if own is None:
            raise CheckpointBusyError(f"save({url}): a prune, or another save, has begun here at the same moment", url)
        return own

    def _put_mark(self, data: bytes) -> None:
        url = self._client.url
        self._may_be_committed = True
        try:
            self._client.put_if(_MARK, data, self._replaces)
        except OSError as error:
            is_refused = isinstance(error, FileExistsError) or error.errno == ESTALE
            found = self._mark_now(error)
            if found is not None and found[1] == data:
                return  # it was our own request that came before, and its reply was lost
            self._may_be_committed = not is_refused and error.errno not in (EACCES, EINVAL, EOPNOTSUPP)
            if is_refused and has_not_changed(self._replaces, found[0] if found is not None else None):
                raise StorageError(
                    f"put({url}/{_MARK}): {refused_in_vain(self._client, self._replaces)}; nothing was replaced: "
                    f"{error.strerror}",
                    url,
                    error.errno or 0,
                ) from error
            if is_refused:
                raise CheckpointSupersededError(
                    f"commit({url}): while this save ran, another one committed, or a prune removed what was here; "
                    "that was not replaced",
                    url,
                ) from error
            if error.errno == EOPNOTSUPP:
                raise UnsupportedError(f"commit({url}): {error.strerror}", url) from error
            doubt = " It is not known whether the save is committed." if self._may_be_committed else ""
            raise StorageError(f"put({url}/{_MARK}): {error.strerror}.{doubt}", url, error.errno or 0) from error

    def _mark_now(self, error: OSError) -> tuple[dict[str, Any], bytes] | None:
        """Returns the commit mark that is there after a request of ours has failed; None if there is none."""
        give_up = time.monotonic() + _MOST_LOOKING_S
        for trial in range(_LOOKS_AFTER_A_LOST_REPLY):
            try:
                return self._client.get_with_meta(_MARK)
            except FileNotFoundError:
                return None
            except OSError as of_look:
                if of_look.errno == EACCES or time.monotonic() > give_up:
                    break
                time.sleep(0.1 * 2**trial)
        url = self._client.url
        raise StorageError(
            f"put({url}/{_MARK}): {error.strerror}; and the store did not say what is there now: it "
            "is not known whether the save is committed",
            url,
            error.errno or 0,
        ) from error

    def _sweep(self, named: set[str]) -> int:
        entries = self._client.entries()
        marks = [entry for entry in entries if entry.name == _MARK and not entry.is_tombstone]
        if not marks:
            self._warnings.append("the checkpoint was removed as soon as it was committed")
            return 0
        now = marks[0].last_modified
        grace = timedelta(seconds=sweep_grace_s(self._deadline_s))
        old = {*self._old_files}
        going = [entry.name for entry in entries if is_own_data(entry.name) and entry.name not in named]
        ages: Mapping[str, timedelta] = {entry.name: now - entry.last_modified for entry in entries}
        going = [name for name in going if name in old or ages[name] > grace]
        self._client.delete(going)
        return len(going)

    def _asked(self, operation: str, name: str, call: Any) -> Any:
        url = self._client.url
        try:
            return call()
        except OSError as error:
            place = f"{operation}({url}{'/' if name else ''}{name})"
            if error.errno == EOPNOTSUPP:
                raise UnsupportedError(f"{place}: {error.strerror}", url) from error
            raise StorageError(f"{place}: {error.strerror}", url, error.errno or 0) from error
