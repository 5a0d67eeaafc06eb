# SPDX-License-Identifier: Apache-2.0
"""What is told of the errors of a store: its code and message, what to do, and no query of a URL."""

from __future__ import annotations

import errno

import pytest
from obstore.exceptions import GenericError, PermissionDeniedError, PreconditionError

from bytecheckpoint import Config
from bytecheckpoint.storage.object_store.refusals import errno_of, text_of
from bytecheckpoint.storage.object_store.stores import _with_checksums

BODY = (
    '<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{}</Code><Message>Why</Message>'
    "<RequestId>18EB</RequestId></Error>\n\nDebug source:\nGeneric {{}}"
)


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        ("NoSuchBucket", "create the bucket, or correct the URL"),
        ("ExpiredToken", "pass valid credentials"),
        ("PermanentRedirect", "pass the region of the bucket"),
        ("AccessDenied", "allow these credentials"),
    ],
)
def test_the_reply_of_a_store(code: str, advice: str) -> None:
    text = text_of(GenericError(f"Error performing PUT http://h/b/k?uploadId=SECRET in 1ms - {BODY.format(code)}"))
    assert text.startswith(f"Error performing PUT http://h/b/k?... in 1ms - {code}: Why; {advice}")
    assert "18EB" not in text
    assert "\n" not in text


@pytest.mark.parametrize(
    "body", ["", "<Error></Error>", "<html>of a proxy</html>", "x" * 2000], ids=["none", "empty", "other", "long"]
)
def test_a_reply_that_is_not_of_s3(body: str) -> None:
    text = text_of(GenericError(f"Error performing GET http://h/b/k in 1ms - 500: {body}"))
    assert text.startswith("Error performing GET http://h/b/k in 1ms - 500")
    assert len(text) < 700


def test_errnos() -> None:
    assert errno_of(PermissionDeniedError("")) == errno.EACCES
    assert errno_of(PreconditionError("")) == errno.ESTALE
    assert errno_of(GenericError("operation timed out")) == errno.ETIMEDOUT
    assert errno_of(GenericError("Server returned non-2xx status code: 400 Bad Request")) == errno.EINVAL
    assert errno_of(GenericError("Server returned non-2xx status code: 503")) == errno.EIO
    assert errno_of(ValueError("of the parts")) is None


def test_checksums_of_uploads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_CHECKSUM_ALGORITHM", raising=False)
    given = Config(storage_options={"region": "x"}).storage_options or {}
    assert dict(_with_checksums("s3://b", given)) == {"region": "x", "checksum_algorithm": "sha256"}
    assert dict(_with_checksums("s3://b", {"AWS_CHECKSUM_ALGORITHM": "crc64nvme"})) == {
        "AWS_CHECKSUM_ALGORITHM": "crc64nvme"
    }
    assert dict(_with_checksums("s3://b", {"checksum_algorithm": ""})) == {}
    assert dict(_with_checksums("gs://b", {})) == {}
    monkeypatch.setenv("AWS_CHECKSUM_ALGORITHM", "sha256")
    assert dict(_with_checksums("s3://b", {})) == {}
