# SPDX-License-Identifier: Apache-2.0
"""Searches every order of events in ``commit.pml`` with spin: the protocol is sound, and each part of it is needed.

The model must have the failpoints of the code. Each search is exhaustive and compares whole states. With BCP_LONG=1 it
also searches configurations of millions of states.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from model.spin import IS_LONG, SECONDS_PER_SEARCH, check_sound, errors_in, search, violated_in

ROOT = Path(__file__).parents[2]
MODEL = Path(__file__).with_name("commit.pml")

# Numbers of the properties, as in the model.
WHOLE, ONE_RIGHT, NO_BLOCK, NEWEST, LIVE, READS = range(1, 7)

# Flags, and the statements that nothing reaches with them. In one of them nobody else is left to decline for.
SOUND: dict[str, set[str]] = {
    "LOCKS=1 RANKS=3": set(),
    "LOCKS=0 RANKS=3": set(),
    "LOCKS=1 RANKS=2 TAKE_OVER=1": set(),
    "LOCKS=1 RANKS=2 EMPTY=1": set(),
    "LOCKS=1 RANKS=2 EMPTY=1 OVERWRITE=0": {"t = 0", "foreign = 0"},
    "LOCKS=0 RANKS=1 EMPTY=1 OVERWRITE=0": set(),
    "LOCKS=1 RANKS=1 READER=1": set(),
    "LOCKS=0 RANKS=1 READER=1": set(),
    "LATE=1 LOCKS=0 RANKS=2": set(),
    "LATE=1 LOCKS=0 RANKS=2 EMPTY=1": set(),
    "LATE=1 LOCKS=0 RANKS=1 EMPTY=1 OVERWRITE=0": set(),
    "LATE=1 LOCKS=0 RANKS=1 READER=1": set(),
}
SOUND_LONG = ("LOCKS=1 RANKS=3 TAKE_OVER=1", "LOCKS=0 RANKS=2 READER=1")

# What the code must not do, and the property that it would violate.
MUTATIONS = {
    "LOCKS=1 RANKS=1 M_MARK_FIRST": WHOLE,
    "LOCKS=0 RANKS=1 M_MARK_FIRST": WHOLE,
    "LOCKS=1 RANKS=1 M_LIST_LAST": WHOLE,
    "LOCKS=1 RANKS=1 M_NO_SECOND_LOOK": LIVE,
    "LOCKS=0 RANKS=1 M_NO_SECOND_LOOK": WHOLE,
    "LOCKS=1 RANKS=1 M_NO_SWEEP_SYNC": WHOLE,
    "LOCKS=1 RANKS=1 M_NO_COMMIT_SYNC": NEWEST,
    "LOCKS=1 RANKS=1 M_NO_FILE_SYNC": WHOLE,
    "LOCKS=1 RANKS=1 M_NO_TMP_SYNC": WHOLE,
    "LOCKS=1 RANKS=1 M_NO_RANK_DIRECTORY_SYNC": WHOLE,
    "LOCKS=1 RANKS=1 M_DELETE_AFTER_RENAME": WHOLE,
    "LOCKS=1 RANKS=1 M_RANK_DELETES": WHOLE,
    "LOCKS=1 RANKS=2 M_NOT_ALL": WHOLE,
    "LOCKS=1 RANKS=1 M_NO_LOOK": NEWEST,
    "LOCKS=1 RANKS=1 M_LOOK_FIRST": NEWEST,
    "LOCKS=1 RANKS=1 M_UNLOCKED_UNLINK": LIVE,
    "LOCKS=1 RANKS=1 M_NO_KILL": NO_BLOCK,
    "LATE=1 LOCKS=0 RANKS=1 M_NO_FLUSH": WHOLE,
    "LATE=1 LOCKS=0 RANKS=1 M_NO_OWN_LOOK": WHOLE,
    "LATE=1 LOCKS=0 RANKS=1 M_NO_OWN_TMP": WHOLE,
    "LATE=1 LOCKS=0 RANKS=1 M_NO_SECOND_LOOK": WHOLE,
    "LATE=1 LOCKS=0 RANKS=1 M_MARK_FIRST": WHOLE,
    "LATE=1 LOCKS=0 RANKS=1 M_LIST_LAST": WHOLE,
    "LATE=1 LOCKS=0 RANKS=1 M_NO_LAST_LOOK": NEWEST,
    "LATE=1 LOCKS=0 RANKS=1 M_COMMITTED_KILLS": WHOLE,
}
# The code does more than these properties need: without it the rename would find the same, but later.
HARMLESS = ("LOCKS=1 RANKS=1 M_NO_NLINK", "LOCKS=1 RANKS=1 M_NO_CHECK_RIGHT")


@pytest.mark.parametrize("flags", SOUND)
def test_the_protocol_is_sound(flags: str, tmp_path: Path) -> None:
    check_sound(MODEL, flags, tmp_path, SOUND.get(flags, set()))


@pytest.mark.skipif(not IS_LONG, reason="set BCP_LONG=1 to search millions of states")
@pytest.mark.timeout(SECONDS_PER_SEARCH + 60)
@pytest.mark.parametrize("flags", SOUND_LONG)
def test_the_protocol_is_sound_in_larger_worlds(flags: str, tmp_path: Path) -> None:
    check_sound(MODEL, flags, tmp_path, SOUND.get(flags, set()))


@pytest.mark.parametrize("flags", MUTATIONS)
def test_each_part_of_the_protocol_is_needed(flags: str, tmp_path: Path) -> None:
    assert violated_in(search(MODEL, flags, tmp_path)) == MUTATIONS[flags]


@pytest.mark.parametrize("flags", HARMLESS)
def test_what_only_fails_early_is_not_needed(flags: str, tmp_path: Path) -> None:
    assert errors_in(search(MODEL, flags, tmp_path)) == 0


def _failpoints() -> dict[str, str]:
    """Returns the names of failpoints by their constants."""
    header = (ROOT / "csrc/base/failpoint.h").read_text()
    constants = re.findall(r"^  (k\w+),", header, re.MULTILINE)
    names = re.findall(r'"(\w+)"', header.split("kFailpointNames[]")[1].split("};")[0])
    assert len(constants) == len(names)
    return dict(zip(constants, names, strict=True))


def _of_functions() -> list[tuple[str, list[str]]]:
    """Returns the failpoints of each function of the code, in their order."""
    names = _failpoints()
    found = []
    for source in sorted((ROOT / "csrc").rglob("*.cpp")):
        for body in re.split(r"^}", source.read_text(), flags=re.MULTILINE):
            points = [names[constant] for constant in re.findall(r"BCP_FAILPOINT\((k\w+)\)", body)]
            if points:
                found.append((str(source.relative_to(ROOT)), points))
    return found


def _labels() -> list[str]:
    """Returns the labels of the model that stand for failpoints. They begin with the phase, as failpoints do."""
    phases = "|".join(sorted({name.split("_")[0] for name in _failpoints().values()}))
    return re.findall(rf"^((?:{phases})_\w+):", MODEL.read_text(), re.MULTILINE)


def test_the_model_has_the_failpoints_of_the_code_in_its_order() -> None:
    """Fails if a failpoint was added, renamed or moved. First make the model follow the code, then change this."""
    labels = _labels()
    in_code = [point for _, points in _of_functions() for point in points]
    assert sorted(in_code) == sorted(_failpoints().values()), "a failpoint is used twice or not at all"
    assert sorted(labels) == sorted(in_code)
    for source, points in _of_functions():
        in_model = [label for label in labels if label in points]
        assert in_model == points, f"{source}: the model has {in_model}, the code {points}"
