# SPDX-License-Identifier: Apache-2.0
"""Tests that ``sweep`` and ``bcp sweep`` remove what dead saves have left, and nothing else."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cli_runs import as_json, run
from support.seaweedfs import SeaweedFS
from support.store_runs import copy_ranks, loaded, names, save
from support.store_trials import Store

import bytecheckpoint
from bytecheckpoint import Config, save_state_dict
from bytecheckpoint.errors import CheckpointError, CheckpointNotFoundError, ConfigError, StorageError
from bytecheckpoint.storage.object_store import sweep as store_sweep
from bytecheckpoint.storage.object_store.client import StoreClient
from bytecheckpoint.storage.object_store.unfinished_uploads import UnfinishedUploads, Upload

# Saves of these tests are over at once.
SHORT = Config(commit_deadline_s=0.01)
LEFT = "step-1/__0_0.0123456789abcdef.distcp"


def sweep(url: str, **arguments: Any) -> bytecheckpoint.SweepReport:
    """Takes what is older than a moment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_sweep, "sweep_grace_s", lambda deadline_s: 2 * deadline_s)
        return bytecheckpoint.sweep(url, **{"older_than_s": 0.02, "config": SHORT, **arguments})


def test_what_no_commit_names(root: str, client: StoreClient) -> None:
    save(root, 1, 2)
    for name in (LEFT, "step-3/__1_0.0123456789abcdef.distcp"):
        client.put(name, b"left by a save that died")
    client.put("step-3/__0_0.distcp", b"of stock DCP, whose names say nothing of the save")
    client.put("step-3/notes.txt", b"")
    before = names(client)
    time.sleep(0.05)
    assert sweep(root, dry_run=True).removed == [LEFT, "step-3/__1_0.0123456789abcdef.distcp"]
    assert names(client) == before
    report = sweep(root)
    assert before - names(client) == {*report.removed} == {LEFT, "step-3/__1_0.0123456789abcdef.distcp"}
    assert report.bytes_freed == 48
    assert "only stores that speak S3" in report.notes[0]
    assert (loaded(f"{root}/step-1"), loaded(f"{root}/step-2")) == (1, 2)


def test_what_a_save_may_be_writing_stays(root: str, client: StoreClient) -> None:
    client.put(LEFT, b"being written")
    assert bytecheckpoint.sweep(root).removed == []
    assert names(client) == {LEFT}
    with pytest.raises(
        ConfigError, match="an age of 2 h is too little: a save may be writing what is younger than 24 h"
    ):
        bytecheckpoint.sweep(root, older_than_s=7200)
    with pytest.raises(ConfigError, match=r"younger than 55\.5556 h"):
        bytecheckpoint.sweep(root, older_than_s=90000, config=Config(commit_deadline_s=100000))


def test_a_mark_that_does_not_open_keeps_everything(root: str, client: StoreClient) -> None:
    client.put(LEFT, b"may be of the checkpoint")
    client.put("step-1/.metadata", b"damaged" * 100)
    time.sleep(0.05)
    with pytest.raises(CheckpointError, match=r"step-1/\.metadata"):
        sweep(root)
    assert LEFT in names(client)


def test_what_ranks_that_committed_by_themselves_name_stays(root: str, client: StoreClient, tmp_path: Path) -> None:
    """Such a checkpoint can only have been copied there."""
    copy_ranks(client, tmp_path, "step-1")
    client.put(LEFT, b"left by a save that died")
    time.sleep(0.05)
    assert sweep(root).removed == [LEFT]
    assert [folder.state for folder in bytecheckpoint.scan_steps(root)] == ["complete"]


def test_wrong_places(root: str) -> None:
    with pytest.raises(CheckpointNotFoundError, match="no object below this URL"):
        sweep(root)
    with pytest.raises(ConfigError, match="the next save removes"):
        sweep("/a/directory")


def test_a_store_that_refuses(root: str, client: StoreClient, monkeypatch: pytest.MonkeyPatch) -> None:
    client.put(LEFT, b"")

    def refuse(self: StoreClient, going: Any) -> None:
        raise OSError(13, "Access Denied")

    monkeypatch.setattr(StoreClient, "delete", refuse)
    with pytest.raises(StorageError, match=r"sweep\(memory://.*Access Denied"):
        sweep(root)


def test_the_command(root: str, client: StoreClient) -> None:
    save(root, 1)
    client.put(LEFT, b"being written")
    assert as_json("sweep", root)["removed"] == []
    said = run("sweep", root, "--dry-run")
    assert said.exit_code == 0
    assert "would remove 0 files (0 bytes) and 0 unfinished uploads" in said.output
    assert run("sweep", root, "--older-than", "0.001").exit_code == 2
    assert run("sweep", "/a/directory").exit_code == 2


def refuse(self: UnfinishedUploads, upload: Upload) -> None:
    raise StorageError("abort upload: AccessDenied")


def test_uploads_that_were_never_finished(store: Store, server: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> None:
    boto3: Any = pytest.importorskip("boto3", reason="boto3 is not installed: UNFINISHED UPLOADS ARE NOT TESTED")
    options = server.options
    client = boto3.client(
        "s3",
        endpoint_url=options["endpoint"],
        region_name=options["region"],
        aws_access_key_id=options["access_key_id"],
        aws_secret_access_key=options["secret_access_key"],
    )
    url = store.url()
    save_state_dict(f"{url}/step-1", {"w": torch.ones(3)}, config=store.config)
    prefix = url.removeprefix("s3://checkpoints/")
    for name in (f"{prefix}/{LEFT}", f"{prefix}/of-somebody-else", f"{prefix}-other/{LEFT}"):
        begun = client.create_multipart_upload(Bucket="checkpoints", Key=name)
        client.upload_part(
            Bucket="checkpoints", Key=name, UploadId=begun["UploadId"], PartNumber=1, Body=b"0" * (5 << 20)
        )
    config = Config(commit_deadline_s=0.1, storage_options=options)
    assert bytecheckpoint.sweep(url, config=config).aborted == []
    time.sleep(2.0)  # the server counts whole seconds
    name = f"{prefix}/{LEFT}"
    assert sweep(url, older_than_s=0.5, dry_run=True, config=config).aborted == [name]
    with monkeypatch.context() as patch:
        patch.setattr(store_sweep.UnfinishedUploads, "abort", refuse)
        refused = sweep(url, older_than_s=0.5, config=config)
        assert refused.aborted == []
        assert name in refused.notes[0]
    assert sweep(url, older_than_s=0.5, config=config).aborted == [name]
    left = {each["Key"] for each in client.list_multipart_uploads(Bucket="checkpoints").get("Uploads", ())}
    assert {f"{prefix}/of-somebody-else", f"{prefix}-other/{LEFT}"} <= left
    assert f"{prefix}/{LEFT}" not in left
    assert bytecheckpoint.verify(f"{url}/step-1", config=store.config).is_whole

    with monkeypatch.context() as patch:
        patch.setenv("AWS_PROFILE", "of-nobody")
        assert "could not be found" in bytecheckpoint.sweep(url, config=config).notes[0]

    class Absent:
        def __init__(self, *_: Any) -> None:
            raise ImportError("boto3")

    monkeypatch.setattr(store_sweep, "UnfinishedUploads", Absent)
    assert "pip install boto3" in bytecheckpoint.sweep(url, config=config).notes[0]
