# SPDX-License-Identifier: Apache-2.0
"""``bcp ls`` and ``bcp verify`` of a place in which a ``Publisher`` publishes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.cli_runs import as_json, run

from bytecheckpoint import Publisher

pytestmark = pytest.mark.filterwarnings("ignore:.*it is on one device with:RuntimeWarning")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    publisher = Publisher(tmp_path, base_every=2, no_dist=True)
    for version in (1, 2, 3):
        publisher.publish({"w": torch.full((1000,), 1.0).index_fill(0, torch.tensor([version]), 2.0)}, version)
    return tmp_path


def test_ls(place: Path) -> None:
    (place / "base-000000000009").mkdir()  # a publisher has died there
    lines = run("ls", str(place)).stdout.splitlines()
    names = ["base-000000000001", "delta-000000000002", "base-000000000003", "delta-000000000003"]
    assert lines[0].split() == ["NAME", "BUILDS", "ON", "BYTES", "PUBLISHER"]
    assert [line.split()[0] for line in lines[1:5]] == names
    assert lines[5].startswith("2 bases, 2 deltas; ")
    found = as_json("ls", str(place))["published"]
    assert [(each["version"], each["builds_on"]) for each in found] == [(1, None), (2, 1), (3, None), (3, 2)]
    assert run("ls", str(place / names[1])).exit_code == 0


def test_verify(place: Path) -> None:
    assert run("verify", str(place)).stdout.count(": whole; ") == 4
    (file,) = (place / "delta-000000000002").glob("*.distcp")
    with file.open("r+b") as opened:
        opened.seek(100)
        opened.write(b"\x55\xaa")
    result = run("verify", str(place))
    assert result.exit_code == 1
    assert result.stdout.count(": whole; ") == 3
    found = as_json("verify", str(place), code=1)
    assert [name for name, each in found["parts"].items() if not each["is_whole"]] == ["delta-000000000002"]


def test_a_folder_of_other_things_is_none(tmp_path: Path) -> None:
    assert run("ls", str(tmp_path)).exit_code == 2
    assert run("verify", str(tmp_path / "absent")).exit_code == 2


def test_a_place_in_a_store(tmp_path: Path) -> None:
    place = f"memory://published{tmp_path}"
    Publisher(place, no_dist=True).publish({"a": 1}, 7)
    assert run("ls", place).stdout.splitlines()[1].startswith("base-000000000007")
    assert run("verify", place).stdout.count(": whole; ") == 1
