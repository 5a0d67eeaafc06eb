# SPDX-License-Identifier: Apache-2.0
"""What a store or obstore raised, as an errno and one line of text that says what to do about it."""

from __future__ import annotations

import errno
import re

__all__ = ["errno_of", "text_of"]

_QUERY = re.compile(r"\?[^\s\"']*")
_BODY = re.compile(r"<(\?xml|Error\b)")
_CODE = re.compile(r"<Code>([^<]*)</Code>")
_MESSAGE = re.compile(r"<Message>([^<]*)</Message>")
_MOST_TEXT = 600
# In the text of errors: whoever asks again gets the same reply, but obstore asks ten times.
_NOT_IMPLEMENTED = "status code: 501"

_RENEW = "pass valid credentials, in the variables of the provider or as Config(storage_options=...)"
_REGION = "pass the region of the bucket, as AWS_REGION or Config(storage_options={'region': ...})"
_ALLOW = "allow these credentials what docs/object_stores.md lists: to get, put, list and delete objects"
# What is found in the text of an error, in the order in which it is looked for, and what to do then.
_ADVICE = {
    r"NoSuchBucket": "create the bucket, or correct the URL",
    r"NoSuchContainer|ContainerNotFound": "create the container, or correct the URL",
    r"/latest/(api/token|meta-data)|/metadata/identity": f"no credentials were found: {_RENEW}",
    r"ExpiredToken|InvalidAccessKeyId|InvalidToken|SignatureDoesNotMatch": _RENEW,
    r"AuthorizationHeaderMalformed|PermanentRedirect|IllegalLocationConstraint|redirect without LOCATION": _REGION,
    r"Content-MD5.*required": "the bucket has Object Lock, which needs a checksum of each upload: "
    "do not turn off checksum_algorithm in Config(storage_options=...), or use a bucket without default retention",
    r"AccessDenied|403 Forbidden": _ALLOW,
}

_ERRNO_OF = {
    "AlreadyExistsError": errno.EEXIST,
    "NotSupportedError": errno.EOPNOTSUPP,
    "PermissionDeniedError": errno.EACCES,
    "PreconditionError": errno.ESTALE,
    "UnauthenticatedError": errno.EACCES,
}


def errno_of(error: BaseException) -> int | None:
    """Returns the errno that a file system would have for an exception of obstore; None if it is not known."""
    known = _ERRNO_OF.get(type(error).__name__)
    if known is not None or type(error).__name__ != "GenericError":
        return known
    text = str(error)
    if "timed out" in text:
        return errno.ETIMEDOUT
    if _NOT_IMPLEMENTED in text:
        return errno.EOPNOTSUPP
    # The store has understood the request, and does not carry it out.
    return errno.EINVAL if "status code: 400" in text else errno.EIO


def text_of(error: BaseException) -> str:
    """Returns the message of an exception of obstore in one line, without queries of URLs, and with what to do."""
    # The first paragraph: obstore adds a listing of its cause. A reply of S3 is told by its code and message alone.
    first = str(error).strip().partition("\n\nDebug source:")[0].replace("\n", " ")
    body = _BODY.search(first)
    said = ": ".join(found[1] for pattern in (_CODE, _MESSAGE) if body and (found := pattern.search(first)))
    text = _QUERY.sub("?...", f"{first[: body.start()]}{said}" if body else first).rstrip(": ")
    if len(text) > _MOST_TEXT:
        text = f"{text[:_MOST_TEXT]}..."
    advice = next((advice for pattern, advice in _ADVICE.items() if re.search(pattern, first)), "")
    return f"{text}; {advice}" if advice else text
