# SPDX-License-Identifier: Apache-2.0
"""Findings about the store of a URL, that matter to saves and loads there."""

from __future__ import annotations

import errno
from collections.abc import Iterator

from bytecheckpoint.cli.machine import Condition
from bytecheckpoint.config import Config
from bytecheckpoint.errors import StorageError
from bytecheckpoint.storage.folders import folder_at
from bytecheckpoint.storage.object_store.body_checks import try_body_checks
from bytecheckpoint.storage.object_store.client import StoreClient
from bytecheckpoint.storage.object_store.conditions import ADVICE, AS_GIVEN, REFUSED, try_conditions_of_reads
from bytecheckpoint.storage.object_store.stores import use_store

__all__ = ["findings_of_store"]

_SIGNATURE_COUNTS = "; what counts is the SHA-256 in the signature, which is right in every upload"
_SPEAK_S3 = ("s3://", "s3a://")


def findings_of_store(url: str) -> Iterator[Condition]:
    """Returns findings about a URL in the order in which they are shown. Removes what it has put there.

    Raises:
        ConfigError: An option of the store is unknown.
        UnsupportedError: obstore is not installed.
    """
    config = Config.from_env()
    client = use_store(url, config)
    try:
        names = folder_at(url).names()
    except StorageError as error:
        yield Condition("store", "broken", str(error), "see docs/object_stores.md for variables and permissions")
        return
    if client.is_http:
        yield Condition("store", "note", f"{url}: a web server", "a checkpoint can only be read there")
        return
    yield Condition("store", "ok", f"{url}: can be listed; it holds {len(names)} objects and folders")
    yield Condition("server", "ok", client.server())
    try:
        yield from _conditions(client)
        yield from _conditions_of_reads(client)
    except OSError as error:
        advice = "allow these credentials to put and to delete objects" if error.errno == errno.EACCES else ""
        yield Condition("conditions", "broken", f"nothing can be saved below {url}: {error.strerror}", advice)
        return
    if url.startswith(_SPEAK_S3):
        yield from _body_checks(url, config)


def _conditions(client: StoreClient) -> Iterator[Condition]:
    found = client.conditions()
    advice = f"nothing can be saved or pruned there: {ADVICE}"
    for answer in found.answers:
        is_other_form = answer.asked.startswith("If-Match") and found.etag_form != AS_GIVEN
        text = f"PUT, {answer.asked}{f' (ETags go {found.etag_form})' if is_other_form else ''}: {answer.got}"
        if answer.is_right:
            yield Condition("condition", "ok", text)
            continue
        yield Condition("condition", "broken", f"{text}; it should be {answer.wanted}", advice)
        advice = ""  # once is enough


def _conditions_of_reads(client: StoreClient) -> Iterator[Condition]:
    for answer in try_conditions_of_reads(client):
        text = f"{answer.asked}: {answer.got}"
        if answer.is_right:
            yield Condition("condition", "ok", text)
        elif answer.is_ignored:
            advice = "that a file is replaced under a load is noticed by its checksums alone"
            yield Condition("condition", "note", f"{text}; it should be {answer.wanted}", advice)
        else:
            advice = f"a load would say that the checkpoint was replaced: {ADVICE}" if answer.got == REFUSED else ADVICE
            yield Condition("condition", "broken", f"{text}; it should be {answer.wanted}", advice)


def _body_checks(url: str, config: Config) -> Iterator[Condition]:
    try:
        checks = try_body_checks(url, config.storage_options or {})
    except ImportError:
        yield Condition("SHA-256", "note", "it was not tried whether the store compares it", "pip install boto3")
        return
    except StorageError as error:
        yield Condition("SHA-256", "note", f"it was not tried whether the store compares it: {error}")
        return
    for check in checks:
        if check.refusal:
            yield Condition("SHA-256", "ok", f"{check.asked}: refused ({check.refusal})")
        elif check.is_damage:
            advice = "damage on the way is found by loads and by `bcp verify` alone: verify what you save there"
            yield Condition("SHA-256", "note", f"{check.asked}: accepted", advice)
        else:
            counts = "" if any(each.is_damage and not each.refusal for each in checks) else _SIGNATURE_COUNTS
            yield Condition("SHA-256", "ok", f"{check.asked}: accepted{counts}")
