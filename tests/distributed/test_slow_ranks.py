# SPDX-License-Identifier: Apache-2.0
"""A rank that is really slow is named from the journal, with the phase and the cause; a healthy run names none."""

from __future__ import annotations

import itertools
import shutil
from collections import Counter
from pathlib import Path

import pytest
from support.ending_ranks import EndingRanks
from support.slow_ranks import FINDING_OF, save_steps

from bytecheckpoint.observability import findings, read_journal

SLOW = 2
# A busy machine makes some rank really slow, once, and hides once which one is.
BY_CHANCE = 1
STEPS = range(4)
CAUSES = dict(FINDING_OF.values())


def found_in_steps(run: Path) -> Counter[tuple[int | None, str, str]]:
    """Returns in how many steps each rank is named, with the cause and the phase."""
    records, _ = read_journal(run)
    assert len(records) == len(STEPS)
    found = [{(it.rank, it.kind, it.phase) for it in findings(record) if it.kind in CAUSES} for record in records]
    return Counter(itertools.chain.from_iterable(found))


@pytest.mark.parametrize("kind", FINDING_OF)
def test_the_slow_rank_is_named(tmp_path: Path, ending_ranks: EndingRanks, kind: str) -> None:
    if kind == "storage" and shutil.which("cc") is None:
        pytest.skip("A RANK WITH SLOW STORAGE IS NOT TESTED: there is no C compiler")
    save_steps(ending_ranks, tmp_path, STEPS, kind=kind, slow=SLOW)
    found = found_in_steps(tmp_path)
    assert found[SLOW, *FINDING_OF[kind]] >= len(STEPS) - BY_CHANCE, found
    del found[SLOW, *FINDING_OF[kind]]
    assert all(num <= BY_CHANCE for num in found.values()), found


def test_a_healthy_run_names_nobody(tmp_path: Path, ending_ranks: EndingRanks) -> None:
    save_steps(ending_ranks, tmp_path, STEPS)
    found = found_in_steps(tmp_path)
    assert all(num <= BY_CHANCE for num in found.values()), found
