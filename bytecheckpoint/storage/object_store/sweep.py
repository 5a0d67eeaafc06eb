# SPDX-License-Identifier: Apache-2.0
"""Removes from an object store what saves that died have left, without a save. Needs no torch."""

from __future__ import annotations

import os
import uuid
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from typing import Any

from bytecheckpoint.config import Config
from bytecheckpoint.errors import CheckpointError, CheckpointNotFoundError, ConfigError
from bytecheckpoint.storage.names import is_mark, is_own_data, is_own_file
from bytecheckpoint.storage.object_store.client import StoreClient
from bytecheckpoint.storage.object_store.commit import sweep_grace_s
from bytecheckpoint.storage.object_store.marks import named_files
from bytecheckpoint.storage.object_store.stores import use_store
from bytecheckpoint.storage.object_store.unfinished_uploads import UnfinishedUploads
from bytecheckpoint.storage.object_store.urls import is_store_url, store_url
from bytecheckpoint.storage.small_files import storage_errors

__all__ = ["SweepReport", "sweep"]


@dataclass(frozen=True, kw_only=True)
class SweepReport:
    """What one sweep removed, or would remove.

    Attributes:
        url: URL of the folder.
        dry_run: Whether nothing was removed.
        removed: Names of data files that no commit mark named, relative to ``url``.
        bytes_freed: Bytes of these.
        aborted: Names of the objects whose uploads were never finished.
        notes: What was not looked at, and why.
    """

    url: str
    dry_run: bool = False
    removed: list[str] = field(default_factory=list)
    bytes_freed: int = 0
    aborted: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields, by name, as plain data."""
        return asdict(self)


def sweep(
    url: str | os.PathLike[str],
    *,
    older_than_s: float | None = None,
    dry_run: bool = False,
    config: Config | None = None,
) -> SweepReport:
    """Removes data files that no commit mark names, and aborts uploads that nobody finished, if they are old enough.

    A save into the same folder removes such files, too. This is for folders into which nobody will save again, and for
    the parts of unfinished uploads, which are invisible and cost money. In a directory nothing like it is needed: there
    each save sees whether another one is dead.

    Args:
        url: URL of a checkpoint, a run, or a folder with several runs.
        older_than_s: Age in seconds, by the clock of the store. None takes the least, which no save may take: a day, or
            twice ``Config.commit_deadline_s`` if that is longer.
        dry_run: Whether to remove nothing, and to report what would be removed. To see the clock of the store, one
            small object is written and removed in any case.
        config: Settings for the store; None reads ``BYTECHECKPOINT_*`` variables.

    Returns:
        A report.

    Raises:
        ConfigError: ``url`` is a path, or ``older_than_s`` is shorter than a save may take.
        CheckpointNotFoundError: There is no object below ``url``.
        StorageError: The store refused.
    """
    config = config or Config.from_env()
    least_s = sweep_grace_s(config.commit_deadline_s)
    older_than_s = least_s if older_than_s is None else older_than_s
    if not is_store_url(url):
        raise ConfigError(f"sweep({os.fspath(url)}): a path: in a directory, the next save removes what dead ones left")
    if not older_than_s >= least_s:
        raise ConfigError(
            f"sweep({os.fspath(url)}): an age of {older_than_s / 3600:g} h is too little: a save may be writing what "
            f"is younger than {least_s / 3600:g} h, a day or twice Config.commit_deadline_s"
        )
    url = store_url(url)
    client = use_store(url, config)
    with storage_errors("sweep", url):
        every = client.everything("")
    if not every:
        raise CheckpointNotFoundError(f"sweep({url}): there is no object below this URL", url)
    with storage_errors("sweep", url):
        before = _now(client) - timedelta(seconds=older_than_s)
        marks = [each.name for each in every if is_mark(each.name) and not each.is_tombstone]
        named = set(named_files(client, marks, strict=True))
        going = [each for each in every if is_own_data(each.name) and each.last_modified < before]
        going = [each for each in going if each.name not in named]
        if not dry_run:
            client.delete([each.name for each in going])
    aborted, notes = _abort_uploads(url, config, before, dry_run=dry_run)
    return SweepReport(
        url=url,
        dry_run=dry_run,
        removed=[each.name for each in going],
        bytes_freed=sum(each.num_bytes for each in going),
        aborted=aborted,
        notes=notes,
    )


def _now(client: StoreClient) -> datetime:
    """Returns the time by the clock of the store."""
    name = f".now.{uuid.uuid4().hex}"
    client.put(name, b"")
    try:
        meta = client.head(name)
    finally:
        client.delete([name])
    if meta is None:
        raise OSError(5, f"{name}, which was just written, is not there")
    now: datetime = meta["last_modified"]
    return now


def _abort_uploads(url: str, config: Config, before: datetime, *, dry_run: bool) -> tuple[list[str], list[str]]:
    """Aborts uploads that were begun before a time. Returns the names of their objects, and what was not done."""
    if not url.startswith(("s3://", "s3a://")):
        return [], ["unfinished uploads were not looked for: only stores that speak S3 can be asked"]
    try:
        uploads = UnfinishedUploads(url, config.storage_options or {})
        old = [each for each in uploads.below() if is_own_file(each.key) and each.begun < before]
    except ImportError:
        return [], ["unfinished uploads were not looked for: this needs boto3: pip install boto3"]
    except CheckpointError as error:
        return [], [f"unfinished uploads were not looked for: {error}"]
    aborted, notes = [], []
    for upload in old:
        try:
            if not dry_run:
                uploads.abort(upload)
        except CheckpointError as error:  # somebody may have ended it
            notes.append(f"the unfinished upload of {upload.key} was not removed: {error}")
        else:
            aborted.append(upload.key)
    return aborted, notes
