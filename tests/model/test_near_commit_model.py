# SPDX-License-Identifier: Apache-2.0
"""Searches ``near_commit.pml`` with spin: what was reported counts on the disks of all machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from model.spin import check_sound, errors_in, search, violated_in

MODEL = Path(__file__).with_name("near_commit.pml")

# Numbers of the properties, as in the model.
NEWEST, WHOLE = 1, 2

# Two machines, four saves, three jobs and two prunes, unless the flags say otherwise.
SOUND = ("", "CORRUPT=1", "JOBS=3 SAVES=4 PRUNES=3", "M=3 SAVES=3 PRUNES=1", "M=3 SAVES=3 JOBS=1 CORRUPT=1")

# What the code must not do, and the property that it would violate.
MUTATIONS = {
    "M_REPORT_EARLY": NEWEST,
    # A prune finds the note of a save whose other marks never come, and removes the one before.
    "M_NOTE_EARLY": NEWEST,
    "M_PRUNE_MARKED": NEWEST,
    "M_TAKE_FIRST M_MARK_EARLY": WHOLE,
    # No promise: one step that is saved over again and again, and no other one.
    "M_SAME_STEP": NEWEST,
}
# A rank marks what it has written, so marks on all disks say that all is there; and so does the first mark, since the
# coordinator waits for all. One of the two would do, but for a check of files that fails behind the first mark.
HARMLESS = ("M_TAKE_FIRST", "M_MARK_EARLY")


@pytest.mark.parametrize("flags", SOUND)
def test_the_protocol_is_sound(flags: str, tmp_path: Path) -> None:
    check_sound(MODEL, flags, tmp_path, set())


@pytest.mark.parametrize("flags", MUTATIONS)
def test_each_part_of_the_protocol_is_needed(flags: str, tmp_path: Path) -> None:
    assert violated_in(search(MODEL, flags, tmp_path)) == MUTATIONS[flags]


@pytest.mark.parametrize("flags", HARMLESS)
def test_what_one_of_two_checks_would_do(flags: str, tmp_path: Path) -> None:
    assert errors_in(search(MODEL, flags, tmp_path)) == 0
