# SPDX-License-Identifier: Apache-2.0
"""torchtitan before 0.3, from folders that BCP_OLDER_TORCHTITAN names, with a colon between them. To make one:

``pip install --no-deps --target FOLDER torchtitan==0.2.2``, and the same with 0.1.0.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from bytecheckpoint.errors import UnsupportedError
from frameworks.titan import run_processes

ROOT = Path(__file__).parents[2]
FOLDERS = [folder for folder in os.environ.get("BCP_OLDER_TORCHTITAN", "").split(":") if folder]


def _folder_of(release: str) -> str:
    for folder in FOLDERS:
        if any(Path(folder).glob(f"torchtitan-{release}*.dist-info")):
            return folder
    pytest.skip(f"BCP_OLDER_TORCHTITAN names no torchtitan {release}: ITS custom_import IS NOT TESTED")


@pytest.mark.parametrize("release", ["0.2.2", "0.1.0"])
def test_an_older_manager_saves_and_resumes_through_ours(tmp_path: Path, release: str) -> None:
    pytest.importorskip("torchdata", reason="torchdata is not installed: OLDER RELEASES OF TORCHTITAN ARE NOT TESTED")
    path = f"{_folder_of(release)}:{ROOT}:{ROOT / 'tests'}"
    script = Path(__file__).with_name("titan_older.py")
    run_processes(2, [sys.executable, str(script), str(tmp_path)], PYTHONPATH=path)


@pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason="torchtitan is not installed")
def test_with_overrides_it_says_what_to_give_instead() -> None:
    with pytest.raises(UnsupportedError, match=r"--override\.imports bytecheckpoint\.torchtitan\.use$"):
        import bytecheckpoint.torchtitan.custom_import  # noqa: F401
