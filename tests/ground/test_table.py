# SPDX-License-Identifier: Apache-2.0
"""The table of file systems in docs/guarantees.md is the one that table.py makes."""

from __future__ import annotations

import json

from ground.table import MEASURED, PAGE, in_page, table


def test_the_page_has_the_table_of_what_was_measured() -> None:
    page = PAGE.read_text()
    assert in_page(page, table(json.loads(MEASURED.read_text()))) == page
