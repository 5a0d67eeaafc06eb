# SPDX-License-Identifier: Apache-2.0
"""Searches every order of requests in ``store_commit.pml`` with spin: saves, prunes and loads at a URL are sound."""

from __future__ import annotations

from pathlib import Path

import pytest

from model.spin import IS_LONG, SECONDS_PER_SEARCH, check_sound, errors_in, search, violated_in

MODEL = Path(__file__).with_name("store_commit.pml")

# Numbers of the properties, as in the model.
WHOLE, ONE_RIGHT, NO_BLOCK, NEWEST = range(1, 5)

SOUND = (
    "RANKS=2",
    "RANKS=2 EMPTY=1",
    "RANKS=1 READER=1",
    "RANKS=1 EMPTY=1 PRUNE=1",
    "SAVERS=1 RANKS=2 PRUNE=1 READER=1",
)
SOUND_LONG = ("RANKS=1 PRUNE=1", "SAVERS=3 RANKS=1 EMPTY=1")

# What the code must not do, and the property that it would violate.
MUTATIONS = {
    "RANKS=1 M_NO_CONDITION": WHOLE,
    "RANKS=2 M_COMMIT_BEFORE_DATA": WHOLE,
    "RANKS=1 M_NO_GRACE": WHOLE,
    "RANKS=1 EMPTY=1 PRUNE=1 M_PRUNE_YOUNGER": WHOLE,
    "RANKS=1 M_NO_LOOK": ONE_RIGHT,
    "RANKS=1 M_NO_DOUBT": ONE_RIGHT,
    "SAVERS=1 RANKS=1 PRUNE=1 M_TOMBSTONE_IS_NOTHING": NO_BLOCK,
    "SAVERS=1 RANKS=1 PRUNE=1 M_NO_CLAIM": NEWEST,
    "SAVERS=1 RANKS=1 PRUNE=1 M_ANY_TOMBSTONE": NEWEST,
    # No mutation, but what is assumed: that no request is carried out minutes after it was given up.
    "SAVERS=1 RANKS=1 PRUNE=1 LATE=1": NEWEST,
}
# The code does more than these properties need: an object that is missing is found before the commit.
HARMLESS = ("RANKS=1 M_NO_CHECK",)


@pytest.mark.parametrize("flags", SOUND)
def test_the_protocol_is_sound(flags: str, tmp_path: Path) -> None:
    check_sound(MODEL, flags, tmp_path, set())


@pytest.mark.skipif(not IS_LONG, reason="set BCP_LONG=1 to search millions of states")
@pytest.mark.timeout(SECONDS_PER_SEARCH + 60)
@pytest.mark.parametrize("flags", SOUND_LONG)
def test_the_protocol_is_sound_in_larger_worlds(flags: str, tmp_path: Path) -> None:
    check_sound(MODEL, flags, tmp_path, set())


@pytest.mark.parametrize("flags", MUTATIONS)
def test_each_part_of_the_protocol_is_needed(flags: str, tmp_path: Path) -> None:
    assert violated_in(search(MODEL, flags, tmp_path)) == MUTATIONS[flags]


@pytest.mark.parametrize("flags", HARMLESS)
def test_what_only_fails_early_is_not_needed(flags: str, tmp_path: Path) -> None:
    assert errors_in(search(MODEL, flags, tmp_path)) == 0
