# SPDX-License-Identifier: Apache-2.0
"""Whether a store that speaks S3 refuses a body that was damaged on its way. obstore sends none: this needs boto3."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from bytecheckpoint.storage.object_store.s3_clients import s3_client, s3_errors
from bytecheckpoint.storage.object_store.urls import joined

__all__ = ["BodyCheck", "try_body_checks"]

_BODY, _DAMAGED = b"sent", b"send"


@dataclass(frozen=True)
class BodyCheck:
    """What a store has done with a body that is not what its SHA-256 says.

    Attributes:
        asked: The request.
        refusal: The code of the store's error; "" if it took the body.
        is_damage: Whether the body was damaged; else the header alone was wrong.
    """

    asked: str
    refusal: str
    is_damage: bool = True


def try_body_checks(url: str, options: Mapping[str, Any]) -> list[BodyCheck]:
    """Sends bodies that differ from their SHA-256, as an object of its own, and as a part of one; it removes both.

    The first two have the SHA-256 of the right body in the header ``x-amz-checksum-sha256`` and in the signature, as
    every upload of a save has. The third has the right one in the signature, and a wrong header.

    Args:
        url: URL of a folder.
        options: ``storage_options``, as obstore takes them.

    Raises:
        ImportError: boto3 is not installed.
        StorageError: The store refused for another reason.
    """
    bucket, key = urlsplit(url).netloc, joined(urlsplit(url).path.strip("/"), f".conditions.{uuid.uuid4().hex}")
    place = {"Bucket": bucket, "Key": key}
    settings = {"s3": {"payload_signing_enabled": True}, "retries": {"mode": "standard", "total_max_attempts": 3}}
    with s3_errors("put", url), contextlib.closing(s3_client(options, **settings)) as client:
        client.put_object(**place, Body=_BODY, ChecksumSHA256=_sha256(_BODY))
        try:
            wrong = _refusal(lambda: client.put_object(**place, Body=_BODY, ChecksumSHA256=_sha256(_DAMAGED)))
            for operation in ("PutObject", "UploadPart"):
                client.meta.events.register(f"before-send.s3.{operation}", _damage)
            damaged = _refusal(lambda: client.put_object(**place, Body=_BODY, ChecksumSHA256=_sha256(_BODY)))
            of_part = _refusal_of_part(client, place)
        finally:
            client.delete_object(**place)
    return [
        BodyCheck("PUT of a damaged body", damaged),
        BodyCheck("upload of a damaged part", of_part),
        BodyCheck("PUT with a wrong x-amz-checksum-sha256", wrong, is_damage=False),
    ]


def _damage(request: Any, **_: Any) -> None:
    """Changes a request that is signed, just before it is sent."""
    request.body = _DAMAGED


def _sha256(body: bytes) -> str:
    return base64.b64encode(hashlib.sha256(body).digest()).decode()


def _refusal_of_part(client: Any, place: Mapping[str, str]) -> str:
    upload = {**place, "UploadId": client.create_multipart_upload(**place, ChecksumAlgorithm="SHA256")["UploadId"]}
    try:
        return _refusal(lambda: client.upload_part(**upload, PartNumber=1, Body=_BODY, ChecksumSHA256=_sha256(_BODY)))
    finally:
        client.abort_multipart_upload(**upload)


def _refusal(call: Callable[[], object]) -> str:
    from botocore.exceptions import ClientError

    try:
        call()
    except ClientError as error:
        if error.response["ResponseMetadata"]["HTTPStatusCode"] >= 500:
            raise  # the store has a fault of its own
        return str(error.response["Error"]["Code"]) or "an error without a code"
    return ""
