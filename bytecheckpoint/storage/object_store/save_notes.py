# SPDX-License-Identifier: Apache-2.0
"""What a store keeps of saves that run, that failed and that died: a small object of each. Needs no torch.

    RUN/.bcp/save.{save id}.json    of the saves to the steps of a run
    CHECKPOINT/.bcp/...             of the saves to a checkpoint that is no step of a run

A save puts its object before anything else, and says in it who saves; it removes it when it is committed. If it fails,
its record takes the place of that. So an object of a save that neither ended nor can still commit tells that it died,
and the data files that it has left tell how far it came. Nothing else reads these objects, and anybody may delete them.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from bytecheckpoint.config import Config
from bytecheckpoint.errors import CheckpointError
from bytecheckpoint.native import _core
from bytecheckpoint.runtime.place import own_place
from bytecheckpoint.storage.names import RECORDS, is_own_data
from bytecheckpoint.storage.object_store.client import StoreClient
from bytecheckpoint.storage.object_store.entries import Entry
from bytecheckpoint.storage.object_store.stores import place_in_store, use_store
from bytecheckpoint.storage.object_store.urls import joined
from bytecheckpoint.storage.paths import name_of
from bytecheckpoint.storage.save_records import FORMAT, about_of, record_of_unended
from bytecheckpoint.storage.small_files import storage_errors
from bytecheckpoint.storage.step_names import run_and_step

__all__ = ["SaveNote", "forget_saves", "keep_failure", "noted_saves"]

_MOST_NOTES = 100  # of failed saves; each that is more takes the place of the oldest
_MOST_BYTES = 1 << 16  # of one
_SAME_TIME = timedelta(seconds=1)  # stores give times of whole seconds


class SaveNote:
    """The object of one save. Its methods raise ``OSError``.

    Args:
        url: URL of the checkpoint.
        save_id: Id of the save.
        config: Settings of the store. ``commit_deadline_s`` is when the save can no longer commit.
        on_request: See ``StoreClient``.
    """

    def __init__(
        self, url: str, save_id: str, config: Config, on_request: Callable[[int, int], None] | None = None
    ) -> None:
        above = _url_of_notes(url)
        self._client = use_store(above, config)
        self._client.on_request = on_request
        self._path = _path_below(above, url)
        self._name = _name_of(save_id)
        self._deadline_s = config.commit_deadline_s

    @property
    def num_requests(self) -> int:
        """Requests that were made through this object."""
        return self._client.num_requests

    def put(self, about: bytes) -> None:
        """Says that the save has begun.

        Args:
            about: What ``about_save`` returned.
        """
        known = json.loads(about)
        text = json.dumps({**known, "path": self._path, "deadline_s": self._deadline_s}, separators=(",", ":"))
        self._client.put(self._name, text.encode(), once=True)

    def remove(self, replaced: str = "") -> None:
        """Says that the save has ended as it should; and the one that it replaces, which may have died at its end.

        Args:
            replaced: Id of the save that it has replaced; "" for none.
        """
        self._client.delete([self._name, *([_name_of(replaced)] if replaced else [])])


def forget_saves(url: str, save_ids: Sequence[str]) -> None:
    """Removes the notes of saves that are committed, if any died before it could: their checkpoint is about to go.

    Args:
        url: URL of the checkpoint, of which something is known.
        save_ids: Ids of the saves.

    Raises:
        OSError: The store refused.
    """
    client, folder = _known(_url_of_notes(url))
    client.delete([joined(folder, _name_of(each)) for each in save_ids])


def keep_failure(url: str, record: Mapping[str, Any], config: Config) -> None:
    """Keeps the record of a save that failed, and of the newest such saves so many.

    It is tried once, and for seconds only: what made the save fail may be the store.

    Args:
        url: URL of the checkpoint.
        record: What ``failure_record_of`` returned.
        config: Settings of the save.

    Raises:
        OSError: The store refused.
    """
    above = _url_of_notes(url)
    client = use_store(above, config)
    name = _name_of(str(record.get("save_id") or uuid.uuid4().hex))
    text = json.dumps({**record, "path": _path_below(above, url)}, separators=(",", ":"))
    client.put(name, text.encode(), once=True)
    notes = sorted(_notes_in(client, ""), key=lambda each: each.last_modified)
    client.delete([f"{RECORDS}/{each.name}" for each in notes[:-_MOST_NOTES]])


def noted_saves(url: str) -> list[dict[str, Any]]:
    """Returns the records of the saves of a run, or to a checkpoint, that failed or died, or that may still run.

    A save runs, as far as can be known from here, if its process is seen; on another machine, until its deadline.

    Args:
        url: URL of a run, of a step of one, of a part of that, or of another checkpoint. The store is known.

    Raises:
        StorageError: The store refused.
    """
    found = []
    with storage_errors("list", url):
        for above in dict.fromkeys((url, _url_of_notes(url))):
            client, folder = _known(above)
            for note in _notes_in(client, folder):
                with suppress(FileNotFoundError):  # its save has ended meanwhile
                    content = client.get(joined(folder, RECORDS, note.name))
                    path = _path_in(content)
                    if path is not None and _is_below(joined(above, path), url):
                        found.append(_record(joined(above, path), note, content))
    return [{**record, "path": record["path"] or name_of(url)} for record in found if record is not None]


def _url_of_notes(url: str) -> str:
    """Returns the URL below which the notes of the saves to a checkpoint are."""
    run, _ = run_and_step(url)
    return url if run is None else str(run)


def _known(url: str) -> tuple[StoreClient, str]:
    """Does what ``place_in_store`` does, also for a folder above one that is known."""
    try:
        return place_in_store(url)
    except CheckpointError:
        return use_store(url, Config.from_env()), ""


def _path_below(above: str, url: str) -> str:
    return url[len(above) :].lstrip("/")


def _is_below(path: str, url: str) -> bool:
    return f"{path}/".startswith(f"{url}/") or f"{url}/".startswith(f"{path}/")


def _name_of(save_id: str) -> str:
    return f"{RECORDS}/save.{save_id}.json"


def _notes_in(client: StoreClient, folder: str) -> list[Entry]:
    entries = client.entries(joined(folder, RECORDS))
    names = (each for each in entries if each.name.startswith("save.") and each.name.endswith(".json"))
    return [each for each in names if each.num_bytes <= _MOST_BYTES]


def _path_in(content: bytes) -> str | None:
    """Returns the path that an object names, relative to where it is kept; None if it names none."""
    try:
        path = str(json.loads(content)["path"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return None if any(name in ("", ".", "..") for name in path.split("/") if path) else path


def _record(url: str, note: Entry, content: bytes) -> dict[str, Any] | None:
    """Returns the record that an object holds, or that of a save that did not end. Anybody may have put the object."""
    known, about = json.loads(content), about_of(content)
    if known.get("kind") == "failure" and isinstance(known.get("format"), int):
        return dict(known)
    if about is None or known.get("format") != FORMAT:
        return None
    deadline_s = known.get("deadline_s")
    is_over = not isinstance(deadline_s, int | float) or time.time() > about["at"] + deadline_s
    is_here = bool(about["processes"]) and about["processes"] == own_place().processes
    if not is_over and is_here and Path(f"/proc/{about['pid']}").exists():
        return None
    save_id = note.name.removeprefix("save.").removesuffix(".json")
    files = _files_of(url, save_id, note)
    if files is None:
        return None
    begun, may_run = note.last_modified.timestamp(), not (is_over or is_here)
    return {**record_of_unended(url, save_id, about, begun, files, may_run=may_run), "path": known["path"]}


def _files_of(url: str, save_id: str, note: Entry) -> dict[str, tuple[int, float]] | None:
    """Returns bytes and times of the data files that a save may have left, by name; None if it is committed."""
    client, folder = _known(url)
    named: set[str] = set()
    with suppress(CheckpointError):
        checkpoint = _core.Checkpoint.open(url)
        if checkpoint.save_id == save_id:
            return None
        named = {name for name, *_ in checkpoint.files()}
    entries = [each for each in client.entries(folder) if is_own_data(each.name) and each.name not in named]
    return {
        each.name: (each.num_bytes, each.last_modified.timestamp())
        for each in entries
        if each.last_modified >= note.last_modified - _SAME_TIME
    }
