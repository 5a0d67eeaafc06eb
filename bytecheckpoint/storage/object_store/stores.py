# SPDX-License-Identifier: Apache-2.0
"""Opens stores for URLs, and makes them known to the engine."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
import os
import re
from collections import OrderedDict
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, cast
from urllib.parse import unquote, urlsplit

from bytecheckpoint.config import Config
from bytecheckpoint.errors import ConfigError, UnsupportedError
from bytecheckpoint.native import _core
from bytecheckpoint.runtime.per_process import HomeProcess, PerProcess
from bytecheckpoint.storage.memory.client import HolderClient
from bytecheckpoint.storage.object_store.client import PART_BYTES, StoreClient
from bytecheckpoint.storage.object_store.urls import is_held

__all__ = [
    "MOST_FILE_BYTES",
    "can_use_stores",
    "keep_known",
    "keep_options",
    "place_in_store",
    "use_store",
    "with_store_ring",
]

# A request for a part moves 8 MiB: slow links need more than obstore's 30 s.
_LEAST_TIMEOUT_S, _MOST_TIMEOUT_S = 5.0, 300.0
# obstore's own limits, which bound how long its credentials must stay valid.
_MOST_RETRY_S = 180.0
_PREFIXES = ("AWS_", "AZURE_", "GOOGLE_")
# Of options and variables that say on which server, or in whose account, a bucket is.
_PLACE = re.compile("endpoint|account_name|emulator", re.IGNORECASE)

# Slots that are filled, or emptied, meanwhile.
_SPARE_SLOTS = 2
_MOST_RING_BYTES, _MOST_THREADS = 256 << 20, 16
# Of a data file: an object may have 10,000 parts, and the rest is room for its end.
MOST_FILE_BYTES = 9_900 * PART_BYTES
# Stores in memory live as long as the process. The others are kept by what they were made of, since each has its own
# connections, and a job saves every step to another URL.
_in_memory: PerProcess[dict[str, Any]] = PerProcess(dict)
_opened: PerProcess[OrderedDict[str, Any]] = PerProcess(OrderedDict)
_MOST_OPENED = 8
# By URL, the latest last. The engine keeps as many.
_clients: PerProcess[OrderedDict[str, StoreClient]] = PerProcess(OrderedDict)
_MOST_CLIENTS = 1000
_options: PerProcess[dict[str, Mapping[str, Any]]] = PerProcess(dict)  # of runs, by their URLs
_home: HomeProcess | None = None  # the first process that used obstore


def can_use_stores() -> bool:
    """Whether obstore is installed."""
    return importlib.util.find_spec("obstore") is not None


def use_store(url: str, config: Config, extension: Any = _core) -> StoreClient:
    """Returns a client for the objects below ``url``, and registers it with extension modules, which then open them.

    Local; no request is made.

    Args:
        url: A URL as ``store_url`` returns it.
        config: ``storage_options``, ``store_concurrency`` and ``io_timeout_s`` are used. Without ``storage_options``,
            those count that ``keep_options`` was told.
        extension: ``_C`` if it is to open them, too; ``_core`` always does.

    Raises:
        ConfigError: An option is unknown, or the URL is not one of that store.
        UnsupportedError: obstore is not installed.
    """
    if is_held(url):
        return _registered(url, cast(StoreClient, HolderClient(url)), extension)
    if not can_use_stores():
        raise UnsupportedError(f"{url}: URLs need obstore: pip install 'bytecheckpoint-dcp[cloud]'", url)
    _refuse_forked_child(url)
    if not config.storage_options:
        config = dataclasses.replace(config, storage_options=_kept_options(url))
    root, prefix = _root_and_prefix(url)
    once = functools.partial(_open, root, config, once=True)
    client = StoreClient(
        url, _open(root, config), prefix, config.store_concurrency, _bucket_and_server(root, config), once
    )
    return _registered(url, client, extension)


def keep_options(url: str, config: Config) -> None:
    """Has calls in this process that pass no ``storage_options`` use those of ``config`` at and below ``url``.

    So what saves to, loads from and copies to a run finds its store, whatever other settings each of them is passed.
    """
    if config.storage_options:
        _options.get()[url] = config.storage_options


def _kept_options(url: str) -> Mapping[str, Any] | None:
    above = [run for run in _options.get() if url == run or url.startswith(f"{run}/")]
    return _options.get()[max(above, key=len)] if above else None


def _registered(url: str, client: StoreClient, extension: Any) -> StoreClient:
    for module in {_core, extension}:  # what explains errors looks by way of `_core`
        module.register_store(url, client)
    clients = _clients.get()
    clients.pop(url, None)
    clients[url] = client
    while len(clients) > _MOST_CLIENTS:
        clients.popitem(last=False)
    return client


def _refuse_forked_child(url: str) -> None:
    """Refuses a child of a process that has used obstore, whose threads the child does not have: it would wait."""
    global _home
    if _home is None:
        _home = HomeProcess()
    if not _home.is_here():
        raise UnsupportedError(
            f"{url}: this process was forked from one that uses an object store, and obstore cannot go on in it; start "
            "it with the method spawn or forkserver",
            url,
        )


def place_in_store(url: str) -> tuple[StoreClient, str]:
    """Finds the client that ``use_store`` made for ``url``, or for the nearest folder above it.

    Returns:
        The client, and the name of the folder below its URL; "" for the URL itself.

    Raises:
        UnsupportedError: There is no such client.
    """
    above = _known_above(url)
    if above is None:
        raise UnsupportedError(f"open({url}): this call does not take a URL", url)
    return _clients.get()[above], url[len(above) + 1 :]


def keep_known(url: str, extension: Any = _core) -> bool:
    """Whether ``place_in_store`` finds a client. If so, the engine keeps it as long as Python does.

    Args:
        url: See ``use_store``.
        extension: See ``use_store``.
    """
    above = _known_above(url)
    if above is None:
        return False
    if not is_held(url):
        _refuse_forked_child(url)
    clients = _clients.get()
    clients.move_to_end(above)
    for module in {_core, extension}:
        module.register_store(above, clients[above])
    return True


def _known_above(url: str) -> str | None:
    clients = _clients.get()
    while url not in clients:
        url = url.rpartition("/")[0]
        if url.endswith("/") or not url:
            return None
    return url


def with_store_ring(config: Config) -> Config:
    """Returns ``config`` with a thread for each part in flight, and a ring that has room for all of them."""
    num = config.store_concurrency
    ring_bytes = max(config.ring_bytes, min((num + _SPARE_SLOTS) * PART_BYTES, _MOST_RING_BYTES))
    return dataclasses.replace(config, io_threads=min(num, _MOST_THREADS), load_io_threads=0, ring_bytes=ring_bytes)


def _root_and_prefix(url: str) -> tuple[str, str]:
    """Returns the URL of the bucket or container, and the key of the folder in it."""
    parts = urlsplit(url)
    root, prefix = f"{parts.scheme}://{parts.netloc}", parts.path.strip("/")
    # A store escapes a key itself, once more. Only in a URL of HTTP is "%20" a space.
    return root, unquote(prefix) if parts.scheme in ("http", "https") else prefix


def _open(root: str, config: Config, *, once: bool = False) -> Any:
    """Opens the store of a bucket.

    Args:
        root: URL of the bucket.
        config: Settings.
        once: Whether requests are tried once, and for seconds only.

    Raises:
        ConfigError: An option is unknown.
    """
    from obstore.exceptions import BaseError
    from obstore.store import HTTPStore, MemoryStore, from_url

    if root.startswith("memory://"):
        return _in_memory.get().setdefault(root, MemoryStore())
    timeout_s = _LEAST_TIMEOUT_S if once else config.io_timeout_s or _MOST_TIMEOUT_S
    options = _with_checksums(root, config.storage_options or {})
    client_options: dict[str, Any] = {
        "timeout": timedelta(seconds=min(max(timeout_s, _LEAST_TIMEOUT_S), _MOST_TIMEOUT_S)),
        **({"allow_http": True} if any(map(_is_http, (root, *options.values(), *_endpoints()))) else {}),
        **options.get("client_options", {}),
    }
    of_store = {key: value for key, value in options.items() if key != "client_options"}
    retry_config: dict[str, Any] = {"retry_timeout": timedelta(seconds=min(timeout_s, _MOST_RETRY_S))}
    if once:
        retry_config["max_retries"] = 0
    is_http = root.startswith(("http://", "https://"))
    made_of = repr((root, sorted(of_store.items()), sorted(client_options.items()), retry_config))
    # Credentials in the variables may have changed meanwhile: they are a part of what it is made of.
    key = hashlib.sha256("\0".join([made_of, *_variables()]).encode(errors="surrogateescape")).hexdigest()
    opened = _opened.get()
    if key in opened:
        return opened[key]
    try:
        # `from_url` would make a store with credentials of the URL of a bucket, such as https://b.s3.amazonaws.com.
        open_url: Any = HTTPStore.from_url if is_http else from_url
        config_of_store = {} if is_http or not of_store else {"config": of_store}
        store = open_url(root, client_options=client_options, retry_config=retry_config, **config_of_store)
    except BaseError as error:
        # The message of an unknown key names it; no message has a value.
        first = str(error).partition("\n")[0]
        raise ConfigError(f"{root}: {first}; see Config(storage_options=...)") from None
    opened[key] = store
    while len(opened) > _MOST_OPENED:
        opened.popitem(last=False)
    return store


def _with_checksums(root: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns ``options``, in which S3 is to compare what arrives with its SHA-256, unless they say otherwise.

    The signature of a request needs the SHA-256 anyway. But not every store compares it, and then it would commit what
    was damaged on the way. Buckets with Object Lock take nothing without. Text that is empty turns it off.
    """
    if not root.startswith(("s3://", "s3a://")) or "AWS_CHECKSUM_ALGORITHM" in os.environ:
        return options
    given = [name for name in options if name.lower().endswith("checksum_algorithm")]
    if not given:
        return {**options, "checksum_algorithm": "sha256"}
    return {name: value for name, value in options.items() if name not in given or value}


def _variables() -> list[str]:
    """Returns the variables from which stores take what the options leave open."""
    return sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(_PREFIXES))


def _bucket_and_server(root: str, config: Config) -> str:
    """Returns what tells buckets of one name apart that are on several servers, or of several accounts."""
    given = [*(config.storage_options or {}).items(), *os.environ.items()]
    places = sorted(f"{name}={value}" for name, value in given if _PLACE.search(name))
    return hashlib.sha256("\0".join([root, *places]).encode(errors="surrogateescape")).hexdigest()


def _endpoints() -> list[str]:
    return [value for name, value in os.environ.items() if name.startswith(_PREFIXES) and "ENDPOINT" in name]


def _is_http(value: Any) -> bool:
    """Whether ``value`` is an address without TLS: a store that is asked for there shall be used there."""
    return isinstance(value, str) and value.startswith("http://")
