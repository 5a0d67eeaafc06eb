# SPDX-License-Identifier: Apache-2.0
"""What every place of checkpoints must do, on whatever storage it is: ``Folder`` and ``Commit``.

``tests/storage/contract.py`` says it as tests, which run on every kind of place.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Set
from typing import TYPE_CHECKING, Any, Protocol

from bytecheckpoint.config import Config
from bytecheckpoint.storage.paths import Place

if TYPE_CHECKING:
    from bytecheckpoint.storage.folder_files import StoredFile

__all__ = ["Commit", "Folder"]


class Commit(Protocol):
    """The coordinator's part of a save: it replaces the old checkpoint of a folder by a new one, all or nothing.

    Whoever makes it has the right to commit, until the commit, ``abort``, ``abandon``, the deadline, or until another
    save takes the right.
    """

    @property
    def directory_id(self) -> tuple[int, int]:
        """Identifies the folder in this process; see ``Folder.key``."""

    def check_right(self) -> None:
        """Checks that no other save has taken the right, as far as that shows before the commit.

        Raises:
            CheckpointSupersededError: Another save has it.
        """

    def check_files(self, checkpoint: Any, ranks: Set[int] | None = None) -> None:
        """Checks that every data file of ``checkpoint`` is as its rank left it.

        Args:
            checkpoint: What is to be committed.
            ranks: Those whose files are in this folder; None for all.

        Raises:
            CheckpointError: One is not.
        """

    def commit(self, checkpoint: Any) -> dict[str, Any]:
        """Commits ``checkpoint``, whose data files are there, and removes what the replaced one leaves.

        Returns:
            ``directory_synced``, ``files_swept``, ``sweep_s`` and ``warnings``.

        Raises:
            CheckpointSupersededError: Another save has the right; nothing has changed.
            StorageError: The storage refused; the message says if it is not known whether the save is committed.
        """

    def abort(self, file_names: list[str], in_doubt: bool, links: list[str] = ...) -> None:
        """Removes the data files of a save that failed.

        Args:
            file_names: Names of all files that the ranks may have made.
            in_doubt: Whether the storage has failed to answer some rank.
            links: Names of files that other saves may name in the same way: they are removed only while this save has
                the right.

        Raises:
            StorageError: A file could not be removed.
        """

    def abandon(self) -> None:
        """Gives the right up. It has no effect after ``commit`` has begun. Any thread may call it."""

    def is_over(self) -> bool:
        """Whether this save can no longer commit. Any thread may ask."""


class Folder(Protocol):
    """A folder in which a checkpoint is, or a run of them. Nothing is read before a method is called.

    Methods raise ``StorageError`` where the storage refuses or does not answer.

    Attributes:
        place: Its path or URL.
        has_listing: Whether its names can be listed.
        keeps_journals: Whether saves append to a journal in it.
        keeps_notes: Whether notes of saves that run, failed or died are kept in its run; see ``save_notes``.
        commits_by_rank: Whether ranks may commit parts of their own.
        orders_commits: Whether the times of its commit marks are in the order of commits, whatever clocks say.
        is_of_one_machine: Whether other machines have other folders at its place.
        lists_deep: Whether listing all that is below it takes about as long as listing the folder itself.
        num_at_once: How many requests it answers about as fast as one.
        is_best_read_together: Whether ranks that want the same bytes had better read them once, and share them.
        may_read_late: Whether a read that was given up may still write into its memory.
        most_file_bytes: The most bytes of one data file; 0 if there is no limit.
        num_requests: Requests that were made through this object; 0 where nobody counts them.
    """

    has_listing: bool
    keeps_journals: bool
    keeps_notes: bool
    commits_by_rank: bool
    orders_commits: bool
    is_of_one_machine: bool
    lists_deep: bool
    num_at_once: int
    is_best_read_together: bool
    may_read_late: bool
    most_file_bytes: int

    @property
    def place(self) -> Place: ...

    @property
    def num_requests(self) -> int: ...

    def use(
        self, config: Config | None, extension: Any = None, on_request: Callable[[int, int], None] | None = None
    ) -> None:
        """Makes the storage known to the engine, which then opens what is in it. Only the first call has an effect.

        Args:
            config: Settings; None keeps those that it is known with, else reads ``BYTECHECKPOINT_*`` variables.
            extension: ``_C`` if that is to know it, too; ``_core`` always does.
            on_request: Called with the begin and the end of each request; see ``StoreClient``.

        Raises:
            ConfigError: A setting does not fit the storage.
            UnsupportedError: A package is missing.
        """

    def tuned(self, config: Config) -> Config:
        """Returns ``config`` with as many threads and as much memory as reading and writing here needs."""

    def key(self, io_timeout_s: float | None = None) -> tuple[int, int] | None:
        """Returns what identifies the folder in this process, whatever leads to it; None if it is not there.

        Args:
            io_timeout_s: Seconds after which a storage that does not answer is given up; None waits.
        """

    # Looking.

    def is_there(self) -> bool:
        """Whether there is such a folder."""

    def is_absent(self) -> bool:
        """Whether nothing has its name, not even a link to a disk that is not mounted. Raises bare ``OSError``."""

    def is_gone(self) -> bool:
        """Whether it is certain that there is no such folder. It raises nothing."""

    def is_removed(self) -> bool:
        """Whether the folder only seems to be there, since a removal, or a save that died, has left a mark."""

    def folders(self, *, follow_links: bool = False) -> list[str]:
        """Returns the names of the folders in it; symbolic links, wherever they lead, only with ``follow_links``."""

    def names(self) -> list[str]:
        """Returns the names in it, of files and of folders."""

    def has(self, name: str) -> bool:
        """Whether anything has the name ``name`` in it. A directory that cannot be looked at has nothing."""

    def changed(self, name: str) -> int | None:
        """Returns when a file in it was last changed, in nanoseconds since 1970; None if there is none."""

    def file_times(self) -> dict[str, int]:
        """Returns when the files right in it were last changed, by name; see ``changed``."""

    def file(self, name: str) -> StoredFile | None:
        """Returns what is known of a file in it; None if there is none."""

    def files(self, without: Collection[str] = ()) -> list[StoredFile]:
        """Returns all files below it, and in folders of it; or the file that ``place`` is. Follows no symbolic link.

        A folder that goes away meanwhile counts as empty. Without a listing it is the commit mark alone.

        Args:
            without: Names right below the folder that are not looked at.
        """

    def is_same(self, other: str | os.PathLike[str]) -> bool | None:
        """Whether another path or URL leads to the same folder; None if that cannot be told from here."""

    def sees(self, names: Collection[str]) -> bool:
        """Whether this process sees all of these files, which another one has written."""

    def shows_late(self, io_timeout_s: float) -> bool:
        """Whether what another machine has written may be seen late."""

    # Small files, whole or not at all.

    def read_file(self, name: str, max_bytes: int) -> bytes | None:
        """Returns the content of a file of at most ``max_bytes``; None if there is none."""

    def write_file(self, name: str, content: bytes) -> None:
        """Durably writes a file, in place of one that is there. A reader sees the old one, or all of the new one."""

    def remove_file(self, name: str) -> None:
        """Removes a file that ``write_file`` wrote. It is no error if there is none."""

    # Saves.

    def begin_commit(
        self,
        config: Config,
        *,
        save_id: str,
        rank: int | None,
        overwrite: bool,
        sync: bool,
        reserve_bytes: int,
        about: bytes = b"",
    ) -> Commit:
        """Takes the right to commit. Waits a moment if another save has it, which may be one that has just failed.

        Args:
            config: Settings.
            save_id: Id of the save, 32 hex digits.
            rank: The rank that commits a part of its own; None if the ranks commit together.
            overwrite: Whether a checkpoint may be there.
            sync: Whether to sync what is written.
            reserve_bytes: Bytes that ``.metadata`` may need.
            about: Who saves, as ``about_save`` says it: stays if the save dies, for whoever looks; b"" says nothing.

        Raises:
            CheckpointBusyError: Another save has the right.
            CheckpointExistsError: There is a checkpoint, and ``overwrite`` is False.
            UnsupportedError: Nothing can be saved here, or not by ranks that commit by themselves.
        """
