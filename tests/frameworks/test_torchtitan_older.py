# SPDX-License-Identifier: Apache-2.0
"""torchtitan before 0.3. make installs each release into a folder beside the environment's packages.

``pip install --no-deps --target .venv/torchtitan-0.2.2 torchtitan==0.2.2`` does so, and the same with 0.1.0.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from support.titan import run_processes

from bytecheckpoint.errors import UnsupportedError

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("release", ["0.2.2", "0.1.0"])
def test_an_older_manager_saves_and_resumes_through_ours(tmp_path: Path, release: str) -> None:
    pytest.importorskip("torchdata", reason="torchdata is not installed: OLDER RELEASES OF TORCHTITAN ARE NOT TESTED")
    folder = Path(sys.prefix, f"torchtitan-{release}")
    if not folder.exists():
        pytest.skip(f"there is no {folder}: custom_import OF TORCHTITAN {release} IS NOT TESTED")
    path = f"{folder}:{ROOT}:{ROOT / 'tests'}"
    script = Path(__file__).with_name("titan_older.py")
    run_processes(2, [sys.executable, str(script), str(tmp_path)], PYTHONPATH=path)


@pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason="torchtitan is not installed")
def test_with_overrides_it_says_what_to_give_instead() -> None:
    with pytest.raises(UnsupportedError, match=r"--override\.imports bytecheckpoint\.torchtitan\.use$"):
        import bytecheckpoint.torchtitan.custom_import  # noqa: F401
