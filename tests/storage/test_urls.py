# SPDX-License-Identifier: Apache-2.0
"""URLs: what is one, what is refused with a sentence, and that no message has a secret."""

from __future__ import annotations

import pickle

import pytest

from bytecheckpoint import BcpReader, BcpWriter, Config, read, save_state_dict
from bytecheckpoint.errors import CheckpointNotFoundError, ConfigError, UnsupportedError
from bytecheckpoint.storage.object_store import stores
from bytecheckpoint.storage.object_store.client import StoreClient
from bytecheckpoint.storage.object_store.urls import is_store_url, store_url


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("s3://bucket/run/step-1", "s3://bucket/run/step-1"),
        ("S3://bucket//run/", "s3://bucket/run"),
        ("s3://bucket", "s3://bucket"),
        ("gs://bucket/run", "gs://bucket/run"),
        ("az://container/run", "az://container/run"),
        ("memory://", "memory://"),
        ("https://host:8443/run", "https://host:8443/run"),
    ],
)
def test_urls(text: str, url: str) -> None:
    assert is_store_url(text)
    assert store_url(text) == url
    assert str(BcpWriter(text).path) == str(BcpReader(text).path) == url


@pytest.mark.parametrize("path", ["/s3/bucket", "run", "file:///run", "s3", "./s3:x", "C:/run"])
def test_paths(path: str) -> None:
    assert not is_store_url(path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("s3:/bucket/run", r"the URL is incomplete; write s3://bucket/folder"),
        ("gs:bucket", r"the URL is incomplete; write gs://bucket/folder"),
        ("s4://bucket/run", r"s4://\.\.\.: unknown kind of store; known are s3, .*, memory, and file"),
        ("s3:///run", "the URL has no bucket"),
        ("s3://bucket/../run", "'.' and '..' mean nothing in a store"),
        ("s3://bucket/run?token=SECRET", r"storage_options"),
        ("s3://user:SECRET@bucket/run", r"must not have a user or password"),
    ],
)
def test_what_is_no_url_of_a_folder(text: str, reason: str) -> None:
    for make in (BcpWriter, BcpReader):
        with pytest.raises(ConfigError, match=reason) as caught:
            make(text)
        assert "SECRET" not in str(caught.value)


def test_options_are_in_no_text_and_no_pickle() -> None:
    config = Config(storage_options={"secret_access_key": "SECRET", "region": "x"})
    assert "SECRET" not in repr(config)
    assert "region, secret_access_key" in repr(config)
    assert b"SECRET" not in pickle.dumps(config)
    assert b"SECRET" not in pickle.dumps(BcpWriter("s3://bucket/run", config=config))
    assert dict(pickle.loads(pickle.dumps(config)).storage_options) == {}
    assert hash(config) == hash(Config(storage_options={"secret_access_key": "OTHER", "region": "x"}))
    with pytest.raises(ConfigError, match="must be a dict of options by name"):
        Config(storage_options="region=x")  # type: ignore[arg-type]


def test_an_unknown_option_is_named() -> None:
    config = Config(storage_options={"acess_key_id": "SECRET"})
    with pytest.raises(ConfigError, match="acess_key_id") as caught:
        save_state_dict("s3://bucket/run", {"step": 1}, config=config)
    assert "SECRET" not in str(caught.value)


def test_without_obstore(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"pip install 'bytecheckpoint-dcp\[cloud\]'"):
        save_state_dict("memory://none/run", {"step": 1})


def test_http_is_for_reading() -> None:
    with pytest.raises(UnsupportedError, match="over HTTP a checkpoint can only be read"):
        save_state_dict("http://127.0.0.1:1/run", {"step": 1})


@pytest.mark.parametrize("host", ["bucket.s3.us-east-1.amazonaws.com", "account.blob.core.windows.net", "example.com"])
def test_the_web_address_of_a_bucket_needs_no_credentials(host: str) -> None:
    """Buckets may be public. Who has credentials writes the URL with the scheme of the store."""
    client = stores.use_store(f"https://{host}/run", Config())
    assert client.is_http
    assert type(client._store).__name__ == "HTTPStore"


def test_an_object_that_is_no_checkpoint(root: str, client: StoreClient) -> None:
    client.put("empty.pt", b"")
    client.put("other.txt", b"hello")
    with pytest.raises(CheckpointNotFoundError, match=rf"^open\({root}/empty\.pt\): the file is empty \(0 bytes\)$"):
        read(f"{root}/empty.pt")
    with pytest.raises(CheckpointNotFoundError, match=r"it is a file of 5 bytes that is no checkpoint: neither of"):
        read(f"{root}/other.txt")
