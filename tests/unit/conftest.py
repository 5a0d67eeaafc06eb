# SPDX-License-Identifier: Apache-2.0
"""Fixtures that the unit tests share."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from unit.run_folder import RunFolder, save_at

from bytecheckpoint import Config
from bytecheckpoint.staging import leases as _leases


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saves a checkpoint that step folders are copied from, and returns its path."""
    path = tmp_path_factory.mktemp("template") / "ckpt"
    save_at(path, config=Config(journal="off"))  # a line of it would be in the journal of each step
    return path


@pytest.fixture
def run(tmp_path: Path, template: Path) -> RunFolder:
    """Returns the folder of a run, without a step yet."""
    return RunFolder(tmp_path / "run", template)


@pytest.fixture
def no_state_is_left() -> Iterator[None]:
    """Releases the memory that a failed test still holds, so that the next test does not wait for it."""
    yield
    gc.collect()
    for use in _leases._uses:
        use.lease.arena_lease.release()
