# SPDX-License-Identifier: Apache-2.0
"""Every kind of place does what the contract says."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.seaweedfs import SeaweedFS
from support.web_site import Site

from bytecheckpoint import Config
from bytecheckpoint.storage.memory.client import HolderClient
from bytecheckpoint.storage.memory.connection import stop_holder
from storage.contract import READING, WRITING
from storage.places import Place

_numbers = itertools.count()
_Case = Callable[[Place], None]
_Kind = Callable[[pytest.FixtureRequest, Path], Iterator[Callable[[], Place]]]


def _directory(request: pytest.FixtureRequest, folder: Path) -> Iterator[Callable[[], Place]]:
    yield lambda: Place(str(folder / str(next(_numbers)) / "run"))


def _in_memory(request: pytest.FixtureRequest, folder: Path) -> Iterator[Callable[[], Place]]:
    yield lambda: Place(f"memory://contract/{next(_numbers)}/run")


def _in_a_holder(request: pytest.FixtureRequest, folder: Path) -> Iterator[Callable[[], Place]]:
    run = f"contract-{os.getpid()}"
    HolderClient(f"held://{run}").put("started", b"")
    yield lambda: Place(f"held://{run}/{next(_numbers)}/run")
    stop_holder(run)


def _on_seaweedfs(request: pytest.FixtureRequest, folder: Path) -> Iterator[Callable[[], Place]]:
    server: SeaweedFS = request.getfixturevalue("server")
    yield lambda: Place(f"s3://checkpoints/contract-{next(_numbers)}/run", Config(storage_options=server.options))


def _over_http(request: pytest.FixtureRequest, folder: Path) -> Iterator[Callable[[], Place]]:
    def place() -> Place:
        name = f"{next(_numbers)}/run"
        return Place(f"{site.url}/{name}", written=str(folder / name))

    site = Site(folder)
    yield place
    site.close()


KINDS: dict[str, _Kind] = {
    "directory": _directory,
    "memory": _in_memory,
    "holder": _in_a_holder,
    "SeaweedFS": _on_seaweedfs,
}
ONLY_READ: dict[str, _Kind] = {"HTTP": _over_http}


@pytest.fixture(scope="module")
def places(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Place]]:
    """Yields what makes places of one kind."""
    yield from (KINDS | ONLY_READ)[request.param](request, tmp_path_factory.mktemp("places"))


def _name(case: _Case) -> str:
    return case.__name__


@pytest.mark.parametrize("case", READING, ids=_name)
@pytest.mark.parametrize("places", [*KINDS, *ONLY_READ], indirect=True)
def test_reading(places: Callable[[], Place], case: _Case) -> None:
    case(places())


@pytest.mark.filterwarnings("ignore:.*files of older saves were not removed")
@pytest.mark.parametrize("case", WRITING, ids=_name)
@pytest.mark.parametrize("places", KINDS, indirect=True)
def test_writing(places: Callable[[], Place], case: _Case) -> None:
    case(places())
