# SPDX-License-Identifier: Apache-2.0
"""A rank that is really slow is named from the journal, with the phase and the cause; a healthy run names none."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.slow_ranks import FINDING_OF, save_steps

from bytecheckpoint.observability import read_journal
from bytecheckpoint.observability.findings import findings

SLOW = 2


@pytest.mark.parametrize("kind", FINDING_OF)
def test_the_slow_rank_is_named(tmp_path: Path, kind: str) -> None:
    if kind == "storage" and shutil.which("cc") is None:
        pytest.skip("A RANK WITH SLOW STORAGE IS NOT TESTED: there is no C compiler")
    save_steps(tmp_path, [1], kind=kind, slow=SLOW)
    (record,), _ = read_journal(tmp_path)
    of_ranks = [found for found in findings(record) if found.rank is not None and found.rank != record["rank"]]
    assert [(found.rank, found.kind, found.phase) for found in of_ranks] == [(SLOW, *FINDING_OF[kind])], record["ranks"]


def test_a_healthy_run_names_nobody(tmp_path: Path) -> None:
    save_steps(tmp_path, range(4))
    records, _ = read_journal(tmp_path)
    assert len(records) == 4
    assert [found for record in records for found in findings(record) if found.kind in dict(FINDING_OF.values())] == []
