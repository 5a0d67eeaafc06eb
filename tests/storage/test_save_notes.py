# SPDX-License-Identifier: Apache-2.0
"""Notes of saves that run, failed or died in a store; ``test_seaweedfs.py`` kills a save at each of its requests."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.cli_runs import run as run_bcp
from support.store_runs import names, save

from bytecheckpoint import BcpWriter, Config, Retention, save_state_dict
from bytecheckpoint.errors import CheckpointExistsError, SaveFailedError, UnsupportedError
from bytecheckpoint.observability import read_failures
from bytecheckpoint.storage.object_store import save_notes
from bytecheckpoint.storage.object_store.client import StoreClient
from bytecheckpoint.storage.save_records import UNENDED, about_save

ID = "0123456789abcdef" * 2


class Bad:
    def __reduce__(self) -> Any:
        raise LookupError("this cannot be pickled")


def fail(url: str, **settings: Any) -> None:
    with pytest.raises(SaveFailedError):
        save_state_dict(url, {"w": torch.ones(1000), "bad": Bad()}, config=Config(**settings))


def notes(client: StoreClient) -> list[str]:
    return sorted(name for name in names(client) if ".bcp/" in name)


def told(url: str) -> list[tuple[str, str]]:
    return [(each["path"], each["error_type"]) for each in read_failures(url)]


def note(client: StoreClient, path: str, **others: Any) -> None:
    """Puts the note of a save that began just now, on another machine."""
    about = json.loads(about_save(rank=3, world_size=4, began_at=time.time(), is_async=False, with_host=True))
    content = {**about, "processes": "elsewhere", "path": path, "deadline_s": 600.0, **others}
    client.put(f".bcp/save.{ID}.json", json.dumps(content).encode())


def test_a_save_that_fails_is_told(root: str, client: StoreClient) -> None:
    save(root, 1)
    assert notes(client) == []
    fail(f"{root}/step-2")
    with pytest.raises(CheckpointExistsError):
        save_state_dict(f"{root}/step-1", {"step": 1}, overwrite=False)
    assert told(root) == [("step-2", "LookupError"), ("step-1", "CheckpointExistsError")]
    assert [told(f"{root}/step-{step}") for step in (1, 2, 3)] == [[told(root)[1]], [told(root)[0]], []]
    save(root, 2, 3)
    assert len(told(root)) == len(notes(client)) == 2, "saves that succeed leave no note, and take none away"


def test_of_parts_and_of_checkpoints_that_are_no_step(root: str, client: StoreClient) -> None:
    fail(f"{root}/step-2/model")
    assert told(root) == told(f"{root}/step-2") == told(f"{root}/step-2/model")
    fail(f"{root}/final")
    assert told(f"{root}/final") == [("final", "LookupError")]
    assert [name.rpartition("/")[0] for name in notes(client)] == [".bcp", "final/.bcp"]


def test_where_nothing_can_be_saved_nothing_is_noted(root: str, client: StoreClient) -> None:
    save(root, 1)
    with pytest.raises(UnsupportedError):
        dcp.save({"step": 1}, storage_writer=BcpWriter(f"{root}/step-2"), use_collectives=False, no_dist=True)
    assert notes(client) == []


def test_the_journal_says_whether_there_are_notes(root: str, client: StoreClient, tmp_path: Path) -> None:
    fail(f"{root}/step-1", journal="off")
    assert notes(client) == []
    fail(f"{root}/step-1", journal=str(tmp_path / "journal"))
    assert [each["path"] for each in read_failures(tmp_path / "journal")] == [f"{root}/step-1"]
    assert told(root) == [("step-1", "LookupError")]


def test_the_oldest_go(root: str, client: StoreClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_notes, "_MOST_NOTES", 3)
    for step in range(5):
        fail(f"{root}/step-{step}")
    assert [path for path, _ in told(root)] == ["step-2", "step-3", "step-4"]


def test_a_save_of_another_machine(root: str, client: StoreClient) -> None:
    save(root, 1)
    note(client, "step-2")
    (died,) = read_failures(root)
    assert (died["error_type"], died["may_run"], died["phase"]) == (UNENDED, True, "begin")
    assert died["message"].startswith("the save has not ended: it runs in phase begin, or its processes were killed; ")
    client.put("step-2/__1_0.0123456789abcdef.distcp", b"12345")
    (died,) = read_failures(root)
    assert (died["phase"], died["last_rank"], died["ranks_without_files"]) == ("write", 1, [0, 2, 3])
    assert (died["step"], died["rank"], died["num_bytes"]) == (2, 3, 5)
    note(client, "step-2", at=time.time() - 601)
    assert read_failures(root)[0]["may_run"] is False


def test_a_save_of_this_machine(root: str, client: StoreClient) -> None:
    about = json.loads(about_save(rank=0, world_size=1, began_at=time.time(), is_async=False, with_host=True))
    note(client, "step-2", **about)
    assert read_failures(root) == [], "its process lives"
    note(client, "step-2", **{**about, "pid": 0})
    assert [each["may_run"] for each in read_failures(root)] == [False]


def test_a_save_that_died_behind_its_commit(root: str, client: StoreClient) -> None:
    saved = save_state_dict(f"{root}/step-1", {"w": torch.ones(10)})
    save(root, 2)

    def die_late() -> None:
        note(client, "step-1")
        content = client.get(f".bcp/save.{ID}.json")
        client.delete([f".bcp/save.{ID}.json"])
        client.put(f".bcp/save.{saved.save_id}.json", content)
        assert told(root) == []

    die_late()
    saved = save_state_dict(f"{root}/step-1", {"w": torch.ones(10)})
    assert notes(client) == []
    die_late()
    save(root, 3)
    Retention(root, keep_latest=1).prune()
    assert notes(client) == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"3",
        b"null",
        b"\xff\xfe",
        b'{"path": "step-1"}',
        b'{"path": "../../x", "kind": "failure", "format": 1}',
        b'{"path": "/etc", "kind": "failure", "format": 1}',
        b'{"path": {}, "format": 1, "at": "x"}',
        b"[" * 100_000,
        b" " * 100_000,
    ],
    ids=lambda content: repr(content[:20]),
)
def test_what_is_no_note_is_left_out(root: str, client: StoreClient, content: bytes) -> None:
    client.put(f".bcp/save.{ID}.json", content)
    assert read_failures(root) == []
    assert run_bcp("why", root).exit_code == 0


def test_the_command_line(root: str, client: StoreClient) -> None:
    assert f"{root}: there is nothing below this URL" in run_bcp("why", root).output
    save(root, 1)
    assert "no save failed or died" in run_bcp("why", root).output
    fail(f"{root}/step-2")
    note(client, "step-3/model")
    lines = run_bcp("why", root).output.splitlines()
    assert "save of step-3/model" in lines[0]
    assert "has not ended" in lines[0]
    assert "save of step-2" in lines[1]
    of_json = json.loads(run_bcp("why", root, "--json").output)
    assert [each["path"] for each in of_json["failures"]] == ["step-3/model", "step-2"]
