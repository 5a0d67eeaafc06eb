# SPDX-License-Identifier: Apache-2.0
"""What users get wrong, and buckets with settings of their own: one sentence says what to do, on every rank."""

from __future__ import annotations

import importlib.util
import itertools
import socket
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.moto_server import MotoServer
from support.ranks import failures, run_ranks
from support.store_proxy import Fault, StoreProxy
from support.store_trials import failures_of, load, save, tells, with_timeout

from bytecheckpoint import BcpReader, BcpWriter, Config
from bytecheckpoint.errors import CheckpointNotFoundError, ConfigError, StorageError

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("moto") is None, reason="moto is not installed; pip install 'moto[server]'"
)

_VERSIONS = "<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>"
_LOCK = (
    "<ObjectLockConfiguration><ObjectLockEnabled>Enabled</ObjectLockEnabled><Rule><DefaultRetention>"
    "<Mode>COMPLIANCE</Mode><Days>1</Days></DefaultRetention></Rule></ObjectLockConfiguration>"
)
_numbers = itertools.count()


@pytest.fixture(scope="module")
def server() -> Iterator[MotoServer]:
    started = MotoServer()
    yield started
    started.close()


@pytest.fixture
def bucket(server: MotoServer) -> str:
    name = f"bucket-{next(_numbers)}"
    server.ask("PUT", f"/{name}")
    return name


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)


def settings(server: MotoServer, **changes: Any) -> Config:
    """None as a value leaves an option out."""
    options = {name: value for name, value in {**server.options, **changes}.items() if value is not None}
    return Config(storage_options=options, io_timeout_s=1.0)


def refusals(url: str, config: Config) -> list[str]:
    """What a save and a load say, both of which must fail."""
    texts = []
    for call in (lambda: save(url, config, 1), lambda: load(url, config)):
        (error,) = failures_of(call)
        assert isinstance(error, StorageError)
        texts.append(str(error))
    return texts


def refused_on_ranks(url: str, options: dict[str, Any]) -> list[str]:
    config = Config(storage_options=options, io_timeout_s=2.0)
    state = {f"of rank {dist.get_rank()}": torch.ones(10)}
    told = []
    for call in (
        lambda: dcp.save(state, storage_writer=BcpWriter(url, config=config)),
        lambda: dcp.load(state, storage_reader=BcpReader(url, config=config)),
    ):
        errors = failures(call)
        told += sorted(
            {type(tells(error)).__name__ + ": " + str(error).rpartition("; ")[2] for error in errors.values()}
        )
    return told


def test_all_ranks_are_told_that_there_is_no_such_bucket(server: MotoServer) -> None:
    told = run_ranks(2, refused_on_ranks, "s3://absent/run", server.options)
    assert told == [["StorageError: create the bucket, or correct the URL"] * 2] * 2


@pytest.mark.parametrize(
    ("status", "code", "advice"),
    [
        (403, "AccessDenied", "AccessDenied: injected; allow these credentials what docs/object_stores.md lists"),
        (403, "SignatureDoesNotMatch", "SignatureDoesNotMatch: injected; pass valid credentials"),
        (400, "AuthorizationHeaderMalformed", "AuthorizationHeaderMalformed: injected; pass the region of the bucket"),
        (301, "PermanentRedirect", "pass the region of the bucket"),
    ],
)
def test_requests_that_a_store_refuses(server: MotoServer, bucket: str, status: int, code: str, advice: str) -> None:
    """No permission, and a region that is not that of the bucket."""
    with closing(StoreProxy(server.options["endpoint"], lambda _: Fault(status=status, code=code))) as proxy:
        for text in refusals(f"s3://{bucket}/run", settings(server, endpoint=proxy.endpoint)):
            assert advice in text
    assert server.keys(bucket) == []


def test_permission_to_read_alone(server: MotoServer, bucket: str) -> None:
    def rule(request: Any) -> Fault | None:
        return None if request.method in ("GET", "HEAD") else Fault(status=403, code="AccessDenied")

    with closing(StoreProxy(server.options["endpoint"], rule)) as proxy:
        config = settings(server, endpoint=proxy.endpoint)
        (error,) = failures_of(lambda: save(f"s3://{bucket}/run", config, 1))
        assert "AccessDenied: injected; allow these credentials" in str(error)
        (error,) = failures_of(lambda: load(f"s3://{bucket}/run", config))
        assert isinstance(error, CheckpointNotFoundError)
    assert server.keys(bucket) == []


@pytest.mark.parametrize("answers", [True, False], ids=["refused", "no answer"])
def test_no_credentials(server: MotoServer, bucket: str, answers: bool) -> None:
    """obstore then asks the machine for those of its role; nothing may listen there, or nothing may answer."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if not answers:
            silent.listen()
        role = f"http://127.0.0.1:{silent.getsockname()[1]}"
        config = settings(server, access_key_id=None, secret_access_key=None, metadata_endpoint=role)
        config = with_timeout(config, "1s")
        save_text, load_text = refusals(f"s3://{bucket}/run", config)
    assert "no credentials were found: pass valid credentials" in save_text
    assert "no credentials were found" in load_text or "has not answered for 1 s" in load_text
    assert server.keys(bucket) == []


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("s4://bucket/run", "unknown kind of store; known are s3"),
        ("s3:/bucket/run", "write s3://bucket/folder"),
        ("s3:///run", "write s3://bucket/folder"),
    ],
)
def test_typos_in_a_url(text: str, advice: str) -> None:
    for make in (BcpWriter, BcpReader):
        with pytest.raises(ConfigError, match=advice):
            make(text)


def test_a_bucket_with_versions(server: MotoServer, bucket: str) -> None:
    """A save replaces the checkpoint as elsewhere. The versions before it stay until a lifecycle rule removes them."""
    server.ask("PUT", f"/{bucket}?versioning", _VERSIONS)
    url, config = f"s3://{bucket}/run", settings(server)
    for step in (1, 2, 3):
        save(url, config, step)
        assert load(url, config) == step
    assert len(server.keys(bucket)) == 2
    versions = server.ask("GET", f"/{bucket}?versions")
    assert versions.count("<Key>run/.metadata</Key>") == 3


def test_a_bucket_with_object_lock(server: MotoServer) -> None:
    """It takes nothing without a checksum. What a save removes gets a marker there."""
    bucket = "locked"
    server.ask("PUT", f"/{bucket}", headers={"x-amz-bucket-object-lock-enabled": "true"})
    server.ask("PUT", f"/{bucket}?object-lock", _LOCK)
    url = f"s3://{bucket}/run"
    (error,) = failures_of(lambda: save(url, settings(server, checksum_algorithm=""), 1))
    assert "the bucket has Object Lock, which needs a checksum of each upload: do not turn off" in str(error)
    assert "not known" not in str(error)
    assert server.keys(bucket) == []
    # moto looks for this header, where others look for x-amz-checksum-sha256.
    headers = {"default_headers": {"x-amz-sdk-checksum-algorithm": "SHA256"}}
    config = settings(server, client_options={**server.options["client_options"], **headers})
    for step in (1, 2):
        save(url, config, step)
        assert load(url, config) == step
    assert len(server.keys(bucket)) == 2


def test_each_upload_has_a_checksum(server: MotoServer, bucket: str) -> None:
    """So the store refuses what was damaged on its way, even one that does not check the signed hash of the body."""
    with closing(StoreProxy(server.options["endpoint"])) as proxy:
        save(f"s3://{bucket}/run", settings(server, endpoint=proxy.endpoint), 1)
        uploads = [each for each in proxy.requests if each.method == "PUT" and ".conditions" not in each.target]
    assert len(uploads) == 3  # the note of the save, its data file, and its mark
    assert all("x-amz-checksum-sha256" in request.headers for request in uploads)
