# SPDX-License-Identifier: Apache-2.0
"""What leads to a version in the fewest bytes, which versions may go, and the keys of deltas."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from bytecheckpoint import Config, save_state_dict, scan_steps
from bytecheckpoint.errors import ConfigError
from bytecheckpoint.publishing.held_boxes import box_of_key
from bytecheckpoint.publishing.pruning import removable
from bytecheckpoint.publishing.published import BASE, DELTA, Published, Standing, Versions, folder_name, noted
from bytecheckpoint.publishing.registrations import Registration, Registrations, check_subscriber

P, Q = "p" * 32, "q" * 32


class Listed(Versions):
    """Versions that are only said to be there."""

    def __init__(self, *published: Published) -> None:
        super().__init__(Path("nowhere"), Config())
        self.published = {each.name: each for each in published}

    def names(self) -> dict[tuple[int, str], str]:
        return dict(sorted(((each.version, name.partition("-")[0]), name) for name, each in self.published.items()))

    def find(self, name: str) -> Published | None:
        return self.published.get(name)


def base(version: int, num_bytes: int = 100, publisher: str = P) -> Published:
    return Published(folder_name(BASE, version), version, publisher, None, "", num_bytes)


def delta(version: int, num_bytes: int = 6, publisher: str = P, builds_on: int | None = None) -> Published:
    behind = version - 1 if builds_on is None else builds_on
    return Published(folder_name(DELTA, version), version, publisher, behind, "", num_bytes)


def way(versions: Versions, at: Standing | None, *avoided: str) -> list[str] | None:
    steps = versions.way(at, avoided)
    return None if steps is None else [f"{step.name[0]}{step.version}" for step in steps]


RUN = Listed(base(1), *(delta(v) for v in range(2, 14)), base(5), base(9))


@pytest.mark.parametrize(
    ("at", "steps"),
    [
        (None, ["b9", "d10", "d11", "d12", "d13"]),
        (Standing(13, P), None),
        (Standing(14, P), None),
        (Standing(12, P), ["d13"]),
        (Standing(8, P), ["d9", "d10", "d11", "d12", "d13"]),
        (Standing(2, P), ["d3", "d4", "d5", "d6", "d7", "d8", "d9", "d10", "d11", "d12", "d13"]),
        (Standing(12, Q), ["b9", "d10", "d11", "d12", "d13"]),  # of a run that another publisher went on with
    ],
)
def test_way(at: Standing | None, steps: list[str] | None) -> None:
    assert way(RUN, at) == steps


def test_the_fewest_bytes_lead_there() -> None:
    costly = Listed(base(1), *(delta(v, 40) for v in range(2, 10)), base(5))
    assert way(costly, Standing(3, P)) == ["d4", "d5", "d6", "d7", "d8", "d9"]  # 240 bytes: the base and 4 take 260
    assert way(costly, Standing(1, P)) == ["b5", "d6", "d7", "d8", "d9"]  # 320 bytes
    assert way(Listed(base(1, 10), delta(2, 5), base(2, 100)), None) == ["b1", "d2"]


def test_gaps_and_what_is_damaged_are_gone_around() -> None:
    assert way(RUN, Standing(2, P), folder_name(DELTA, 8)) == ["b9", "d10", "d11", "d12", "d13"]
    assert way(RUN, None, folder_name(BASE, 9)) == ["b5", *(f"d{v}" for v in range(6, 14))]
    # Nothing leads to the newest: the newest that can be reached.
    assert way(RUN, Standing(10, P), folder_name(DELTA, 13)) == ["d11", "d12"]
    assert way(RUN, Standing(12, P), folder_name(DELTA, 13)) is None
    assert way(Listed(delta(2), delta(3)), None) is None
    assert way(Listed(), None) is None


def test_versions_may_be_far_apart_and_of_several_publishers() -> None:
    versions = Listed(base(10), delta(20, builds_on=10), base(30, publisher=Q), delta(35, publisher=Q, builds_on=30))
    assert way(versions, Standing(20, P)) == ["b30", "d35"]
    assert way(versions, Standing(30, Q)) == ["d35"]
    assert way(versions, Standing(30, P)) == ["b30", "d35"]


def at_versions(*versions: int | None, reads: int | None = None) -> list[Registration]:
    return [Registration(version, reads, 60.0) for version in versions]


ALL = [(1, BASE), *((v, DELTA) for v in range(2, 14)), (5, BASE), (9, BASE)]


@pytest.mark.parametrize(
    ("registrations", "keep_versions", "stays"),
    [
        ([], 1, ["base-9", *(f"delta-{v}" for v in range(9, 14))]),
        ([], 5, ["base-9", *(f"delta-{v}" for v in range(9, 14))]),
        ([], 100, None),
        (at_versions(13), 1, ["base-9", *(f"delta-{v}" for v in range(9, 14))]),
        (at_versions(7, 12), 1, ["base-9", *(f"delta-{v}" for v in range(8, 14))]),
        (at_versions(None), 1, ["base-9", *(f"delta-{v}" for v in range(9, 14))]),
        (at_versions(2, reads=5), 1, ["base-5", "base-9", *(f"delta-{v}" for v in range(5, 14))]),
        (at_versions(-1), 1, ["base-9", *(f"delta-{v}" for v in range(2, 14))]),
    ],
)
def test_what_may_go(registrations: list[Registration], keep_versions: int, stays: list[str] | None) -> None:
    going = removable(ALL, registrations, keep_versions)
    assert going == sorted(going)
    left = sorted((kind, version) for version, kind in {*ALL} - {*going})
    assert stays is None or [f"{kind}-{version}" for kind, version in left] == stays
    assert stays is not None or not going


def test_nothing_goes_without_a_base() -> None:
    assert removable([(2, DELTA), (3, DELTA)], [], 1) == []


def test_registrations(tmp_path: Path) -> None:
    registrations = Registrations(tmp_path)
    registrations.write("a", Registration(3, None, 60.0))
    registrations.write("b", Registration(None, 2, 60.0))
    registrations.write("late", Registration(1, None, 60.0))
    (tmp_path / "subscriber-odd.json").write_text("{}")
    (tmp_path / "other.json").write_text("{}")
    hour_ago = time.time() - 3600
    os.utime(tmp_path / "subscriber-late.json", (hour_ago, hour_ago))
    (tmp_path / "subscriber-torn.json").write_text('{"version": 3, "re')
    os.utime(tmp_path / "subscriber-torn.json", (hour_ago - 60, hour_ago - 60))
    odd = {"version": 3, "reads": None, "expires_s": 10**400}
    (tmp_path / "subscriber-large.json").write_text(json.dumps(odd))
    (tmp_path / "subscriber-deep.json").write_text("[" * 4000)
    found = registrations.alive()
    assert {each.oldest for each in found} == {3, 1, -1}  # one that cannot be read needs everything
    assert not (tmp_path / "subscriber-late.json").exists()
    assert not (tmp_path / "subscriber-torn.json").exists(), "nobody has written it again for an hour"
    registrations.remove("a")
    registrations.remove("a")
    assert len(registrations.alive()) == 4


@pytest.mark.parametrize("name", ["", "a/b", "..\n", "x" * 81, 5])
def test_names_of_subscribers(name: Any) -> None:
    with pytest.raises(ConfigError, match="letters"):
        check_subscriber(name)


@pytest.mark.parametrize(
    ("key", "box"),
    [
        ("positions:w@+", ("w", (), ())),
        ("positions:a.b@0,3+4,5", ("a.b", (0, 3), (4, 5))),
        ("positions:odd@1+2@0+7", ("odd@1+2", (0,), (7,))),
        ("positions:a\nb@0+7", ("a\nb", (0,), (7,))),
        ("values:w@0+7", None),
        ("positions:w@0,1+7", None),
        ("positions:w", None),
    ],
)
def test_keys_of_boxes(key: str, box: Any) -> None:
    assert box_of_key(key) == box


def test_other_checkpoints_are_no_versions(tmp_path: Path) -> None:
    for name, about in {
        folder_name(BASE, 3): None,
        folder_name(BASE, 4): noted(Standing(5, P), None, None),  # moved
        folder_name(DELTA, 6): noted(Standing(6, P), None, None),
        folder_name(DELTA, 7): noted(Standing(7, P), 7, None),
        "step-9": noted(Standing(9, P), None, None),
        folder_name(BASE, 2): noted(Standing(2, P), None, {"mine": 1}),
    }.items():
        save_state_dict(tmp_path / name, {"a": 1}, user_metadata=about, no_dist=True)
    (tmp_path / folder_name(BASE, 8)).mkdir()
    newest = Versions(tmp_path, Config()).newest()
    assert newest is not None
    assert (newest.standing, newest.builds_on) == (Standing(2, P), None)
    assert newest.user_metadata == {"mine": 1}
    assert [folder.name for folder in scan_steps(tmp_path)] == ["step-9"], "versions are no steps of a run"
