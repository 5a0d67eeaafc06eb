# SPDX-License-Identifier: Apache-2.0
"""`make check` finds what is near to a change, and names only files that exist."""

from __future__ import annotations

import pytest
from check import GENERAL, MOST_FILES, OF_FOLDER, TESTS, select
from support.slow_files import SLOWEST_FIRST


@pytest.mark.parametrize(
    ("changed", "wanted"),
    [
        ("tests/unit/test_steps.py", {"unit/test_steps.py"}),
        ("bytecheckpoint/planning/plan_cache.py", {"unit/test_plan_cache.py", "distributed/test_plan_exchange.py"}),
        ("bytecheckpoint/cli/why.py", {"unit/test_cli_why.py"}),
        ("bytecheckpoint/config.py", {"unit/test_config.py", *GENERAL}),
        ("tests/unit/staged_states.py", {"unit/test_staged_saves.py"}),
        ("csrc/engine/commit/commit.cpp", set(OF_FOLDER["csrc"])),
        ("docs/api.md", {"docs/test_pages.py"}),
        ("tests/unit/test_ends.py", {"unit/test_ends.py"}),
    ],
)
def test_a_change_selects_what_is_near(changed: str, wanted: set[str]) -> None:
    selection = select([changed])
    assert wanted <= set(selection.files)
    assert len(selection.files) <= MOST_FILES


def test_a_changed_source_selects_the_cases_that_include_its_header() -> None:
    for source in ("csrc/engine/commit/commit.cpp", "csrc/engine/commit/commit.h"):
        assert "test_commit.cpp" in select([source]).cases
    assert select(["tests/cpp/test_box.cpp"]).cases == ["test_box.cpp"]


def test_what_many_files_import_is_cut_and_said() -> None:
    selection = select(["tests/support/ranks.py", "tests/distributed/test_peers.py"])
    assert selection.files[0] == "distributed/test_peers.py"
    assert len(selection.files) == MOST_FILES
    assert "frameworks/test_ranks.py" in selection.left_out


def test_slow_files_run_only_if_they_have_changed() -> None:
    selection = select(["tests/unit/lives.py"])
    assert selection.files == []
    assert selection.left_out == ["unit/test_lives_of_calls.py"]


def test_a_file_that_is_gone_is_not_run() -> None:
    assert select(["tests/unit/test_that_was_removed.py"]).files == []


def test_the_lists_name_files_that_exist() -> None:
    named = {file for files in OF_FOLDER.values() for file in files} | set(GENERAL)
    assert not [file for file in named if not (TESTS / file).exists()]
    assert not named & set(SLOWEST_FIRST)
    folders = {path.parent.name for path in (TESTS.parent / "bytecheckpoint").glob("*/__init__.py")}
    assert folders <= OF_FOLDER.keys()
