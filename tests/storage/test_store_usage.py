# SPDX-License-Identifier: Apache-2.0
"""Tests ``bcp du`` and ``bcp why`` below URLs: in memory, in a real store, and from a web server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cli_runs import as_json, run, start
from support.seaweedfs import SeaweedFS
from support.store_runs import save
from support.store_trials import Store

import bytecheckpoint
from bytecheckpoint import Config, save_state_dict
from bytecheckpoint.checkpoint.disk_usage import disk_usage
from bytecheckpoint.observability import flush
from bytecheckpoint.storage.object_store.client import StoreClient
from bytecheckpoint.storage.object_store.stores import use_store

LEFT = "step-1/__0_0.0123456789abcdef.distcp"


def check_sums(told: dict[str, Any], client: StoreClient) -> None:
    for each in told["checkpoints"]:
        name = each["path"].removeprefix(client.url).strip("/")
        assert each["bytes"] == sum(entry.num_bytes for entry in client.everything(name) if not entry.is_tombstone)
        others = ("unreferenced_bytes", "unfinished_bytes", "unread_bytes", "other_bytes")
        of_keys = sum(row["bytes"] for row in each["keys"])
        assert each["bytes"] == of_keys + each["overhead"]["bytes"] + sum(each[name] for name in others), each
    assert told["bytes"] == told["allocated_bytes"]


def test_a_run(root: str, client: StoreClient) -> None:
    save(root, 1, 2)
    client.put(LEFT, b"left by a save that died")
    client.put("step-2/notes.txt", b"12345")
    client.put("log", b"123")
    told = as_json("du", root, code=1)
    check_sums(told, client)
    assert [each["step"] for each in told["checkpoints"]] == [1, 2]
    assert {row["key"]: row["bytes"] for row in told["keys"]}["w"] == 8000
    assert told["checkpoints"][0]["unreferenced"] == [LEFT.partition("/")[2]]
    assert told["checkpoints"][1]["other_bytes"] == 5
    assert told["beside"] == {"files": 1, "bytes": 3, "allocated_bytes": 3}
    freed = as_json("du", root, "--keep-latest", "1", code=1)["would_free"]
    assert freed["removed"] == [f"{root}/step-1"]
    assert freed["bytes"] == freed["allocated_bytes"] == told["checkpoints"][0]["bytes"]
    told = as_json("du", f"{root}/step-2")
    check_sums(told, client)
    assert run("du", f"{root}/step-3").exit_code == 2


def test_what_a_prune_has_left_is_no_step(root: str, client: StoreClient) -> None:
    save(root, 1, 2, 3)
    bytecheckpoint.Retention(root, keep_latest=1).prune()
    assert "step-1/.metadata" in {entry.name for entry in client.everything("")}  # a tombstone
    told = as_json("du", root)
    check_sums(told, client)
    assert [each["step"] for each in told["checkpoints"]] == [3]
    assert run("du", root).output.splitlines()[1].startswith("step-3 ")
    assert "step-1" not in run("du", root).output


def test_a_wrong_path_names_no_step_that_a_prune_has_removed(root: str, client: StoreClient) -> None:
    model = torch.nn.Linear(2, 2)
    for step in (1, 2, 3):
        bytecheckpoint.save(root, {"model": model}, "ddp", global_steps=step)
    bytecheckpoint.Retention(root, keep_latest=2).prune()
    assert "it is a run folder with the steps 2, 3: " in run("ls", root).stderr


def test_a_save_that_commits_after_the_listing(root: str, client: StoreClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """The listing of a run is older than the commit marks that are read: a step that does not fit is listed again."""
    save(root, 1)
    everything, saves = StoreClient.everything, iter([1])

    def list_and_save(self: StoreClient, folder: str) -> Any:
        found = everything(self, folder)
        if folder == "" and self.url == root:
            for step in saves:
                save(root, step)
        return found

    monkeypatch.setattr(StoreClient, "everything", list_and_save)
    told = disk_usage(root).to_dict()
    assert next(saves, None) is None
    assert told["findings"] == 0
    check_sums(told, client)


def test_who_wrote_a_tensor(root: str, tmp_path: Path) -> None:
    """Beside a URL no journal is kept, but it may be elsewhere."""
    save(root, 1)
    url = f"{root}/step-1"
    told = as_json("why", url, "w")
    assert told["notes"] == [
        "no journal is kept beside a URL; --journal names the folder of one: hosts and times are not known"
    ]
    (chunk,) = told["items"][0]["chunks"]
    assert (len(chunk["blocks"]["crc32"]), chunk["rank"]) == (1, 0)
    config = Config(journal=str(tmp_path), journal_hosts=False)
    save_state_dict(url, {"w": torch.ones(1000)}, config=config)
    assert flush()
    told = as_json("why", url, "w", "--journal", str(tmp_path))
    assert told["notes"] == []
    assert told["items"][0]["chunks"][0]["written"]["host"] == "host 0"


def test_a_real_store(server: SeaweedFS, store: Store) -> None:
    variables = {
        f"AWS_{name.upper()}": server.options[name] for name in ("access_key_id", "secret_access_key", "region")
    }
    variables["AWS_ENDPOINT_URL"] = server.options["endpoint"]

    def told(*arguments: str) -> Any:
        return json.loads(start(*arguments, "--json", environment=variables).communicate(timeout=60)[0])

    url = store.url()
    for step in (1, 2):
        state = {"model": {"w": torch.full((300, 1000), float(step))}, "step": step}
        save_state_dict(f"{url}/step-{step}", state, config=store.config)
    client = use_store(url, store.config)
    client.put(LEFT, b"left by a save that died")
    of_run = told("du", url)
    check_sums(of_run, client)
    assert {row["key"]: row["bytes"] for row in of_run["keys"]}["model"] == 2_400_000
    assert of_run["checkpoints"][0]["unreferenced_bytes"] == 24
    (chunk,) = told("why", f"{url}/step-1", "model.w")["items"][0]["chunks"]
    assert len(chunk["blocks"]["crc32"]) == 5
