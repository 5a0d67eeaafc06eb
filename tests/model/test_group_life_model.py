# SPDX-License-Identifier: Apache-2.0
"""Searches every order in which process groups end during a background save: it commits everything or nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from model.spin import count_of, errors_in, search, violated_in

MODEL = Path(__file__).with_name("group_life.pml")

# Numbers of the properties, as in the model.
WHOLE, KEPT, TOLD, LIVE = range(1, 5)

SOUND = (
    "RANKS=2",
    "RANKS=3",
    "RANKS=2 SHARDED=0",
    "RANKS=3 SHARDED=0",
    "RANKS=2 TOGETHER=1",
    "RANKS=3 TOGETHER=1",
    "RANKS=2 ASTRAY=1",
    "RANKS=3 ASTRAY=1",
)

# What the code must not do, and the property that it would violate.
MUTATIONS = {
    # The code of the past: it committed half of a model.
    "M_ASK_LATE M_NO_COVERAGE": WHOLE,
    # Only coverage is checked: saves fail for no reason, and what no tensor shows is lost.
    "M_ASK_LATE": LIVE,
    "M_ASK_LATE SHARDED=0": KEPT,
    # Only the ranks are fixed at the call: a rank that calls as if it were alone commits its shards.
    "M_NO_COVERAGE ASTRAY=1": WHOLE,
    "M_NOT_ALL": WHOLE,
    "M_NOT_ALL SHARDED=0": KEPT,
}


@pytest.mark.parametrize("flags", SOUND)
def test_a_save_is_whole_or_nothing(flags: str, tmp_path: Path) -> None:
    said = search(MODEL, flags, tmp_path)
    assert errors_in(said) == 0, f"{flags}:\n{said}"
    assert "Search not completed" not in said, said
    print(f"{flags}: {count_of(said)} states")


@pytest.mark.parametrize("flags", MUTATIONS)
def test_each_rule_is_needed(flags: str, tmp_path: Path) -> None:
    assert violated_in(search(MODEL, flags, tmp_path)) == MUTATIONS[flags]
