# SPDX-License-Identifier: Apache-2.0
"""`make wheels` makes no file twice, and goes on where it was interrupted. Here nothing is compiled."""

from __future__ import annotations

import json
import re
from pathlib import Path

import make_wheels
import pytest

ROOT = Path(__file__).parents[2]
NAMES = ["2.13.0-python3.11", "2.14.1-python3.11"]
WHEEL = "bytecheckpoint_dcp-0.1.0+torch{}-cp311-cp311-linux_x86_64.whl"


class Maker:
    """Stands for git and make: notes what is made, and fails where it is told to."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.environments: list[list[str]] = []
        self.fails = ""
        self.made_of = "a" * 64

    def export(self, commit: str, copy: Path) -> None:
        copy.mkdir(parents=True, exist_ok=True)
        self.environments.append(sorted(path.name for path in make_wheels.WORK.iterdir()))

    def run_make(self, copy: Path, target: str, **variables: str) -> Path:
        torch, _ = copy.name.split("-")[1:]
        if self.fails == f"{target} {torch}":
            raise KeyboardInterrupt
        self.made.append(f"{target} {torch}")
        file = copy / (
            WHEEL.format(torch.rpartition(".")[0]) if target == "wheel" else "bytecheckpoint_dcp-0.1.0.tar.gz"
        )
        file.write_text(f"{target} {torch} {self.made_of}")
        return file


@pytest.fixture
def maker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Maker:
    made = Maker()
    monkeypatch.setattr(make_wheels, "RELEASE", tmp_path / "release")
    monkeypatch.setattr(make_wheels, "DONE", tmp_path / "release" / "done.json")
    monkeypatch.setattr(make_wheels, "WORK", tmp_path / "work")
    monkeypatch.setattr(make_wheels, "MOST_BYTES", 0)
    monkeypatch.setattr(make_wheels, "source", lambda name, commit: made.made_of)
    monkeypatch.setattr(make_wheels, "git", lambda *arguments: "")
    monkeypatch.setattr(make_wheels, "export", made.export)
    monkeypatch.setattr(make_wheels, "run_make", made.run_make)
    monkeypatch.setattr(make_wheels, "refuse_others", lambda copy, wheel: [])
    monkeypatch.setattr("sys.argv", ["make_wheels.py", *NAMES])
    return made


def test_what_was_interrupted_goes_on_and_nothing_is_made_twice(maker: Maker) -> None:
    maker.fails = "wheel 2.14.1"
    with pytest.raises(KeyboardInterrupt):
        make_wheels.main()
    assert maker.made == ["wheel 2.13.0", "sdist 2.13.0"]
    maker.fails = ""
    make_wheels.main()
    assert maker.made == ["wheel 2.13.0", "sdist 2.13.0", "wheel 2.14.1"]
    assert maker.environments[-1] == maker.environments[-2] == ["aaaaaaaaaaaa-2.14.1-python3.11"]
    assert max(map(len, maker.environments)) == 1
    assert not make_wheels.WORK.exists()
    make_wheels.main()
    assert len(maker.made) == 3
    assert sorted(json.loads(make_wheels.DONE.read_text())) == [*NAMES, "sdist"]


def test_other_sources_and_damaged_files_are_made_again(maker: Maker) -> None:
    make_wheels.main()
    (make_wheels.RELEASE / WHEEL.format("2.13")).write_text("cut")
    make_wheels.main()
    assert maker.made[3:] == ["wheel 2.13.0"]
    maker.made_of = "b" * 64
    make_wheels.main()
    assert maker.made[4:] == ["wheel 2.13.0", "sdist 2.13.0", "wheel 2.14.1"]


def test_a_full_disk_is_said_before_anything_is_made(maker: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_wheels, "MOST_BYTES", 10**18)
    with pytest.raises(SystemExit, match=r"2\.13\.0-python3\.11: .* GB are free"):
        make_wheels.main()
    assert maker.made == []


def test_wheels_are_made_for_torches_that_are_tried() -> None:
    (tried,) = re.findall(r"^VERSIONS := (.*)$", (ROOT / "tests/compat.mk").read_text(), re.MULTILINE)
    (wheels,) = re.findall(r"^WHEELS .*foreach torch,([\d. ]+),", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert wheels.split() == [version.partition("-")[0] for version in tried.split()][-3:]
