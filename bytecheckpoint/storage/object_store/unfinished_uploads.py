# SPDX-License-Identifier: Apache-2.0
"""Multipart uploads that nobody has finished. obstore cannot list them: this needs boto3, and a store of S3's kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import urlsplit

from bytecheckpoint.storage.object_store.s3_clients import s3_client, s3_errors

__all__ = ["UnfinishedUploads", "Upload"]


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
        self._url = url
        self._bucket = urlsplit(url).netloc
        self._prefix = urlsplit(url).path.strip("/")
        with s3_errors("open", url):
            self._client: Any = s3_client(options)

    def below(self) -> list[Upload]:
        """Returns the uploads of objects below the URL.

        Raises:
            StorageError: The store refused.
        """
        prefix = f"{self._prefix}/" if self._prefix else ""
        with s3_errors("list uploads", self._url):
            pages = self._client.get_paginator("list_multipart_uploads").paginate(Bucket=self._bucket, Prefix=prefix)
            found = [each for page in pages for each in page.get("Uploads", ())]
        return [Upload(each["Key"], each["UploadId"], each["Initiated"]) for each in found]

    def abort(self, upload: Upload) -> None:
        """Removes the parts of an upload.

        Raises:
            StorageError: The store refused.
        """
        with s3_errors("abort upload", self._url):
            self._client.abort_multipart_upload(Bucket=self._bucket, Key=upload.key, UploadId=upload.upload_id)
