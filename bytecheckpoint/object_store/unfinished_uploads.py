# SPDX-License-Identifier: Apache-2.0
"""Multipart uploads that nobody has finished. obstore cannot list them: this needs boto3, and a store of S3's kind."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import urlsplit

from bytecheckpoint.errors import StorageError

__all__ = ["UnfinishedUploads", "Upload"]

# Names of boto3's arguments, and of obstore's options; obstore also takes these with a prefix.
_OPTIONS = {
    "aws_access_key_id": ("access_key_id",),
    "aws_secret_access_key": ("secret_access_key",),
    "aws_session_token": ("session_token", "token"),
    "endpoint_url": ("endpoint", "endpoint_url"),
    "region_name": ("region", "default_region"),
}


@dataclass(frozen=True)
class Upload:
    """An upload that was begun, and neither finished nor aborted. ``begun`` is by the clock of the store."""

    key: str
    upload_id: str
    begun: datetime


class UnfinishedUploads:
    """The unfinished uploads of a bucket.

    Args:
        url: URL of a folder.
        options: ``storage_options``, as obstore takes them.

    Raises:
        ImportError: boto3 is not installed.
        StorageError: boto3 does not take the options, or what its own files and variables say.
    """

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        import boto3

        self._url = url
        self._bucket = urlsplit(url).netloc
        self._prefix = urlsplit(url).path.strip("/")
        given = {name.lower().removeprefix("aws_"): value for name, value in options.items()}
        arguments = {
            name: next(given[each] for each in names if each in given)
            for name, names in _OPTIONS.items()
            if any(each in given for each in names)
        }
        # boto3 reads AWS_ENDPOINT_URL, too, but not the other name that obstore takes.
        if "endpoint_url" not in arguments and "AWS_ENDPOINT" in os.environ:
            arguments["endpoint_url"] = os.environ["AWS_ENDPOINT"]
        with self._errors("open"):
            self._client: Any = boto3.client("s3", **arguments)

    def below(self) -> list[Upload]:
        """Returns the uploads of objects below the URL.

        Raises:
            StorageError: The store refused.
        """
        prefix = f"{self._prefix}/" if self._prefix else ""
        with self._errors("list uploads"):
            pages = self._client.get_paginator("list_multipart_uploads").paginate(Bucket=self._bucket, Prefix=prefix)
            found = [each for page in pages for each in page.get("Uploads", ())]
        return [Upload(each["Key"], each["UploadId"], each["Initiated"]) for each in found]

    def abort(self, upload: Upload) -> None:
        """Removes the parts of an upload.

        Raises:
            StorageError: The store refused.
        """
        with self._errors("abort upload"):
            self._client.abort_multipart_upload(Bucket=self._bucket, Key=upload.key, UploadId=upload.upload_id)

    @contextmanager
    def _errors(self, operation: str) -> Iterator[None]:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            yield
        except (BotoCoreError, ClientError, ValueError) as error:
            raise StorageError(f"{operation}({self._url}): {error}", self._url) from error
