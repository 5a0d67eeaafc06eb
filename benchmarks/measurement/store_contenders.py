# SPDX-License-Identifier: Apache-2.0
"""Who is compared at an object store: how each saves a state below a prefix of a bucket, and loads it from there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch.distributed.checkpoint as dcp

import bytecheckpoint
from measurement.states import State

BUCKET, REGION = "checkpoints", "us-east-1"  # those that the server of the tests has
RAW, OURS, FSSPEC = "obstore", "bytecheckpoint", "fsspec"
CONCURRENCY = 8
PART_BYTES = 8 << 20


@dataclass(frozen=True)
class StoreContender:
    """One way to save and load.

    Attributes:
        label: What tables call it.
        save: Writes the state below a prefix.
        load: Reads it back into the state.
        holds_state: False for raw obstore, which moves as many bytes but other ones.
    """

    label: str
    save: Callable[[State, str], None]
    load: Callable[[State, str], None]
    holds_state: bool = True


def _raw(endpoint: str, options: dict[str, Any]) -> StoreContender:
    """The same bytes in one object, in parts and ranges of the same size, as many at once."""
    import obstore
    from obstore.store import S3Store

    store = S3Store(BUCKET, client_options={"allow_http": True}, **{**options, "endpoint": endpoint})
    buffers: dict[int, bytearray] = {}

    def buffer(state: State) -> bytearray:
        if state.num_bytes not in buffers:
            buffers[state.num_bytes] = bytearray(os.urandom(1 << 20) * -(-state.num_bytes >> 20))
        return buffers[state.num_bytes]

    def parts(data: bytearray) -> Iterator[memoryview]:
        view = memoryview(data)
        for begin in range(0, len(view), PART_BYTES):
            yield view[begin : begin + PART_BYTES]

    def save(state: State, prefix: str) -> None:
        pieces = parts(buffer(state))
        obstore.put(
            store,
            f"{prefix}/raw",
            pieces,
            use_multipart=True,
            chunk_size=PART_BYTES,
            max_concurrency=CONCURRENCY,
        )

    def load(state: State, prefix: str) -> None:
        view = memoryview(buffer(state))

        def read(begin: int) -> None:
            end = min(begin + PART_BYTES, len(view))
            view[begin:end] = memoryview(obstore.get_range(store, f"{prefix}/raw", start=begin, end=end))

        with ThreadPoolExecutor(CONCURRENCY) as pool:
            list(pool.map(read, range(0, len(view), PART_BYTES)))

    return StoreContender("obstore alone", save, load, holds_state=False)


def _bytecheckpoint(endpoint: str, options: dict[str, Any], *, planners: bool = False) -> StoreContender:
    config = bytecheckpoint.Config(storage_options={**options, "endpoint": endpoint}, store_concurrency=CONCURRENCY)

    def save(state: State, prefix: str) -> None:
        dcp.save(
            state.tree,
            storage_writer=bytecheckpoint.BcpWriter(f"s3://{BUCKET}/{prefix}", config=config),
            planner=bytecheckpoint.BcpSavePlanner(config=config) if planners else None,
            no_dist=True,
        )

    def load(state: State, prefix: str) -> None:
        dcp.load(
            state.tree,
            storage_reader=bytecheckpoint.BcpReader(f"s3://{BUCKET}/{prefix}", config=config),
            planner=bytecheckpoint.BcpLoadPlanner() if planners else None,
            no_dist=True,
        )

    return StoreContender("bytecheckpoint, its planners" if planners else "bytecheckpoint", save, load)


def _planners(endpoint: str, options: dict[str, Any]) -> StoreContender:
    return _bytecheckpoint(endpoint, options, planners=True)


def _fsspec(endpoint: str, options: dict[str, Any]) -> StoreContender:
    from torch.distributed.checkpoint import _fsspec_filesystem as stock

    access = {
        "key": options["access_key_id"],
        "secret": options["secret_access_key"],
        "endpoint_url": endpoint,
        "use_listings_cache": False,
        "skip_instance_cache": True,
    }

    def save(state: State, prefix: str) -> None:
        writer = stock.FsspecWriter(f"s3://{BUCKET}/{prefix}", **access)
        dcp.save(state.tree, storage_writer=writer, no_dist=True)

    def load(state: State, prefix: str) -> None:
        reader = stock.FsspecReader(f"s3://{BUCKET}/{prefix}", **access)
        dcp.load(state.tree, storage_reader=reader, no_dist=True)

    return StoreContender("FsspecWriter, s3fs", save, load)


def _s3torchconnector(endpoint: str, options: dict[str, Any]) -> StoreContender:
    from s3torchconnector import S3ClientConfig
    from s3torchconnector.dcp import S3StorageReader, S3StorageWriter

    os.environ.update(
        AWS_ACCESS_KEY_ID=options["access_key_id"],
        AWS_SECRET_ACCESS_KEY=options["secret_access_key"],
        AWS_ENDPOINT_URL=endpoint,
    )
    config = S3ClientConfig(force_path_style=True)

    def save(state: State, prefix: str) -> None:
        os.environ["AWS_ENDPOINT_URL"] = endpoint
        writer = S3StorageWriter(REGION, f"s3://{BUCKET}/{prefix}/", s3client_config=config)
        dcp.save(state.tree, storage_writer=writer, no_dist=True)

    def load(state: State, prefix: str) -> None:
        os.environ["AWS_ENDPOINT_URL"] = endpoint
        reader = S3StorageReader(REGION, f"s3://{BUCKET}/{prefix}/", s3client_config=config)
        dcp.load(state.tree, storage_reader=reader, no_dist=True)

    return StoreContender("s3torchconnector", save, load)


_MAKERS: dict[str, Callable[[str, dict[str, Any]], StoreContender]] = {
    RAW: _raw,
    OURS: _bytecheckpoint,
    "bytecheckpoint-planners": _planners,
    FSSPEC: _fsspec,
    "s3torchconnector": _s3torchconnector,
}
_NEEDS = {FSSPEC: "s3fs", "s3torchconnector": "s3torchconnector"}
NAMES = tuple(_MAKERS)


def missing_package(name: str) -> str | None:
    """Returns the package that a contender needs and that is not installed."""
    package = _NEEDS.get(name)
    return package if package is not None and find_spec(package) is None else None


def make_store_contender(name: str, endpoint: str, options: dict[str, Any]) -> StoreContender:
    """Makes a contender for the store at ``endpoint``.

    Args:
        name: One of ``NAMES``.
        endpoint: URL of the store, or of a proxy before it.
        options: ``storage_options`` for the store.
    """
    return _MAKERS[name](endpoint, options)
