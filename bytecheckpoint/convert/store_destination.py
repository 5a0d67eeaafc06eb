# SPDX-License-Identifier: Apache-2.0
"""The URL of a store as the target of a conversion: files are uploaded, and one conditional request commits them."""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from pathlib import Path

from bytecheckpoint.checkpoint.verification import verify as verify_checkpoint
from bytecheckpoint.config import Config
from bytecheckpoint.convert.dcp_target import DcpTarget
from bytecheckpoint.convert.destination import Conversion
from bytecheckpoint.convert.file_piece import compare_checksums
from bytecheckpoint.errors import CheckpointError, CheckpointExistsError, ConfigError, UnsupportedError
from bytecheckpoint.storage.object_store.commit import StoreCommit
from bytecheckpoint.storage.object_store.entries import is_tombstone
from bytecheckpoint.storage.object_store.stores import use_store
from bytecheckpoint.storage.small_files import storage_errors

__all__ = ["StoreDestination"]

_MARK = ".metadata"
# A sweep takes what no commit names once it is a day old. A commit may take half of that.
_MOST_SECONDS = 12 * 3600.0


class StoreDestination:
    """The objects below a URL, where there must be no checkpoint; see ``Destination``.

    Files are uploaded as those of a save, under names that nobody reads before the commit. What was uploaded is noted
    in a temporary directory of this machine, so one process, with its workers, converts alone.

    Args:
        url: The URL.
        config: Settings.

    Raises:
        ConfigError: An option of the store is wrong.
        UnsupportedError: obstore is not installed.
    """

    def __init__(self, url: str, config: Config) -> None:
        self.url = url
        self._config = config
        self._client = use_store(url, config)

    def check(self, to: str, *, resume: bool, is_shared: bool) -> None:
        """See ``Destination``. Only one process, with its workers, can upload, and from the beginning."""
        if self._client.is_http:
            raise UnsupportedError(f"convert({self.url}): over HTTP a checkpoint can only be read", self.url)
        if to != "bcp":
            raise ConfigError(
                f"convert({self.url}): only a checkpoint of ours (--to bcp) can be written to a URL, not {to}: convert "
                "to a directory, and copy it there"
            )
        if resume or is_shared:
            what = "resume" if resume else "a conversion by several ranks"
            raise ConfigError(
                f"convert({self.url}): {what} is for directories alone: to a URL one process converts, with its "
                "workers, from the beginning"
            )
        with storage_errors("convert", self.url):
            there = self._client.head(_MARK)
        if there is not None and not is_tombstone(there):
            raise CheckpointExistsError(f"convert({self.url}): it exists, and nothing is changed in place", self.url)

    def write(self, work: Conversion, *, resume: bool) -> int:
        """See ``Destination``. If it fails, it removes the files that were finished.

        Raises:
            CheckpointExistsError: A checkpoint has appeared.
            CheckpointSupersededError: A save committed meanwhile; or it took more than 12 hours.
            CorruptCheckpointError: What was read back is not what was written. The checkpoint is there.
            StorageError: The store refused.
            UnsupportedError: The store knows no conditional requests.
        """
        made = work.made
        assert isinstance(made, DcpTarget), "check() has refused any other"
        commit = StoreCommit(self._client, overwrite=False, deadline_s=_MOST_SECONDS)
        with tempfile.TemporaryDirectory(prefix="bytecheckpoint-convert-") as folder:
            notes = Path(folder)
            try:
                work.run(made.pieces, notes, verify=False)
                compare_checksums(work.job, work.opened, notes)
                checkpoint = made.assembled(work.opened, notes, self.url)
                commit.check_files(checkpoint)
                report = commit.commit(checkpoint)
            except BaseException:
                with contextlib.suppress(CheckpointError):  # the first error is the one to tell; a sweep finds the rest
                    commit.abort(made.written_files(notes))
                raise
        for warning in report["warnings"]:
            warnings.warn(f"convert({self.url}): {warning}", RuntimeWarning, stacklevel=2)
        if work.verify:
            verify_checkpoint(self.url, config=self._config).raise_if_damaged()
        return len(made.pieces)
