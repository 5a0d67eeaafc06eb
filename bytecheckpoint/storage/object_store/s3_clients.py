# SPDX-License-Identifier: Apache-2.0
"""Clients of boto3, for what obstore cannot ask of a store that speaks S3."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from bytecheckpoint.errors import StorageError

__all__ = ["s3_client", "s3_errors"]

# Names of boto3's arguments, and of obstore's options; obstore also takes these with a prefix.
_OPTIONS = {
    "aws_access_key_id": ("access_key_id",),
    "aws_secret_access_key": ("secret_access_key",),
    "aws_session_token": ("session_token", "token"),
    "endpoint_url": ("endpoint", "endpoint_url"),
    "region_name": ("region", "default_region"),
}


def s3_client(options: Mapping[str, Any], **settings: Any) -> Any:
    """Returns a client of boto3 that goes where obstore goes with these options.

    Args:
        options: ``storage_options``, as obstore takes them.
        settings: Further arguments of ``botocore.config.Config``.

    Raises:
        ImportError: boto3 is not installed.
        BotoCoreError: It does not take the options, or what its own files and variables say.
    """
    import boto3
    from botocore.config import Config

    given = {name.lower().removeprefix("aws_"): value for name, value in options.items()}
    arguments = {
        name: next(given[each] for each in names if each in given)
        for name, names in _OPTIONS.items()
        if any(each in given for each in names)
    }
    # boto3 reads AWS_ENDPOINT_URL, too, but not the other name that obstore takes.
    if "endpoint_url" not in arguments and "AWS_ENDPOINT" in os.environ:
        arguments["endpoint_url"] = os.environ["AWS_ENDPOINT"]
    # The default session would keep the credentials that the variables had when it was first used.
    return boto3.session.Session().client("s3", config=Config(**settings), **arguments)


@contextmanager
def s3_errors(operation: str, url: str) -> Iterator[None]:
    """Turns what boto3 raises into a ``StorageError``.

    Raises:
        StorageError: The store, or boto3, refused.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except (BotoCoreError, ClientError, ValueError) as error:
        raise StorageError(f"{operation}({url}): {error}", url) from error
